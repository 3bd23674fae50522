"""The folder of taken knowledge bundles, in the data folder.

knowledge/state.json             -> KnowledgeState: which bundle is in use
knowledge/NUMBER/manifest.json   -> Manifest
knowledge/NUMBER/profiles/       -> its profiles, in place of the shipped ones
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gateway.domain import Value
from gateway.domain.base import Field, ValidationError
from gateway.logging import Logger
from gateway.version import __version__

log = Logger("fitserve.knowledge")

FOLDER = "knowledge"
STATE = "state.json"
MANIFEST = "manifest.json"
PROFILES = "profiles"


class Manifest(Value):
    """The signed part of a bundle.

    files: SHA-256 in hexadecimal digits of each file below `profiles/`, by its path.
    """

    form: int = Field(ge=1, le=1, description="version of the bundle's form")
    number: int = Field(ge=1, le=2**53, description="number of the bundle; later ones have more")
    date: str = Field(max_length=40, description="date of the bundle, YYYY-MM-DD")
    versions: str = Field(
        max_length=200, description="versions of fitserve that can read it, as `>=0.1,<0.2`"
    )
    note: str = Field("", max_length=2000, description="news in a sentence, for people")
    files: dict[str, str] = Field(min_length=1, max_length=5000)

    @property
    def fits(self) -> bool:
        """Whether this version of fitserve can read the bundle's profiles."""
        # Most machines have no bundle.
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            return SpecifierSet(self.versions).contains(__version__, prereleases=True)
        except InvalidSpecifier:
            return False


class KnowledgeState(Value):
    """The numbers of the bundle in use and of the one before; None: the shipped profiles."""

    number: int | None = None
    previous: int | None = None


class TakenBundle(NamedTuple):
    """A bundle of the folder, and the folder of its profiles."""

    manifest: Manifest
    profiles: Path


class KnowledgeFolder:
    """Reads the folder. A damaged file counts as absent, so the shipped profiles are used."""

    def __init__(self, data: Path) -> None:
        self.path = data / FOLDER

    def state(self) -> KnowledgeState:
        """The numbers of the bundles; both None without a file."""
        try:
            return KnowledgeState.model_validate_json((self.path / STATE).read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as error:
            log.warning("the state of knowledge bundles cannot be read", error=str(error))
        return KnowledgeState()

    def bundle(self, number: int | None) -> TakenBundle | None:
        """The bundle of that number; None: there is none, or its manifest cannot be read."""
        if number is None:
            return None
        folder = self.path / str(number)
        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("a knowledge bundle cannot be read", number=number, error=str(error))
            return None
        return TakenBundle(manifest, folder / PROFILES)

    def profiles_in_use(self) -> Path | None:
        """The folder of profiles of the bundle in use; None: the shipped ones are used.

        A bundle for other versions of fitserve is not used, as after an upgrade.
        """
        if not (self.path / STATE).is_file():
            return None
        bundle = self.bundle(self.state().number)
        return bundle.profiles if bundle is not None and bundle.manifest.fits else None
