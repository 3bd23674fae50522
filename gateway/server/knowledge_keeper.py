"""Takes knowledge bundles into the data folder, and brings the running gateway to their profiles.

A bundle is unpacked next to the one in use, and read whole by a process of its own. One write of
`state.json` brings it into use. The bundle before is kept for a rollback, older ones are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.domain import Value
from gateway.domain.facts import Event
from gateway.errors import BadRequest, Conflict, NotReady, SettingsError, StoreError
from gateway.logging import Logger
from gateway.profiles.knowledge_folder import (
    MANIFEST,
    PROFILES,
    STATE,
    KnowledgeFolder,
    KnowledgeState,
    Manifest,
    TakenBundle,
)
from gateway.profiles.profile_tables import shipped_profiles
from gateway.settings import Settings
from gateway.store.atomic_file import sync_folder, write
from gateway.version import __version__
from gateway.worker_process import kill, spawn

if TYPE_CHECKING:
    from joserfc.jwk import OKPKey

log = Logger("fitserve.knowledge")

_CHECK_PROGRAM = "gateway.profiles.profile_check"
_CHECK_S = 120.0
_DRAFT = "draft"
_SHIPPED_KEYS = "keys"


class BundleView(Value):
    """A knowledge bundle. fits: whether this version of fitserve can read it."""

    number: int
    date: str
    versions: str
    note: str
    files: int
    fits: bool


class KnowledgeView(Value):
    """The knowledge of this gateway.

    bundle: the bundle in use; None: the profiles that were shipped with fitserve.
    previous: the bundle of a rollback; None: a rollback returns to the shipped profiles.
    keys: names of the trusted keys.
    problem: a sentence on a bundle that is not used, or on keys that cannot be read; empty: none.
    """

    bundle: BundleView | None
    previous: BundleView | None
    keys: tuple[str, ...]
    problem: str = ""


class KnowledgeKeeper:
    """The one writer of the folder of bundles.

    on_change: called in the event loop after each change of the profiles, with its event.
    """

    def __init__(self, settings: Settings, on_change: Callable[[Event], None]) -> None:
        self._folder = KnowledgeFolder(settings.data)
        self._key_folders = (
            shipped_profiles() / _SHIPPED_KEYS,
            *([settings.knowledge_keys.expanduser()] if settings.knowledge_keys else []),
        )
        self._on_change = on_change
        self._turn = asyncio.Lock()

    async def view(self) -> KnowledgeView:
        """The bundles and keys now."""
        return await asyncio.to_thread(self._read_view)

    async def update(self, content: bytes) -> KnowledgeView:
        """Take the bundle. Raises BadRequest, Forbidden, Conflict, SettingsError, StoreError."""
        async with self._turn:
            manifest, signer = await asyncio.to_thread(self._unpack, content)
            try:
                await self._check(self._draft / PROFILES, manifest)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, self._draft, ignore_errors=True)
                raise
            await asyncio.to_thread(self._adopt_draft, manifest.number)
            self._report(
                f"Knowledge bundle {manifest.number} of {manifest.date}, signed by {signer}, is in"
                " use.",
                manifest.number,
            )
        return await self.view()

    async def roll_back(self) -> KnowledgeView:
        """Return to the bundle before, or to the shipped profiles. Raises Conflict, StoreError."""
        async with self._turn:
            state = await asyncio.to_thread(self._folder.state)
            if state.number is None:
                raise Conflict(
                    "No knowledge bundle is in use: the shipped profiles are.",
                    hint="`fitserve knowledge update FILE` takes a bundle.",
                )
            number = state.previous
            await asyncio.to_thread(self._write_state, KnowledgeState(number=number))
            text = f"knowledge bundle {number} is" if number else "the shipped profiles are"
            self._report(f"Bundle {state.number} was left: {text} in use.", number)
        return await self.view()

    @property
    def _draft(self) -> Path:
        return self._folder.path / _DRAFT

    def _report(self, words: str, number: int | None) -> None:
        log.info("profiles changed", number=number)
        self._on_change(
            Event(at=time.time(), kind="knowledge.changed", words=words, data={"number": number})
        )

    def _read_view(self) -> KnowledgeView:
        state = self._folder.state()
        bundle = self._folder.bundle(state.number)
        problem = ""
        if state.number is not None and bundle is None:
            problem = f"Bundle {state.number} cannot be read: the shipped profiles are used."
        elif bundle is not None and not bundle.manifest.fits:
            problem = (
                f"Bundle {state.number} is for fitserve {bundle.manifest.versions}, and this is"
                f" {__version__}: the shipped profiles are used."
            )
        try:
            keys = tuple(sorted(self._trusted_keys()))
        except SettingsError as error:
            keys = ()
            problem = f"{problem} {error}".strip()
        return KnowledgeView(
            bundle=_bundle_view(bundle),
            previous=_bundle_view(self._folder.bundle(state.previous)),
            keys=keys,
            problem=problem,
        )

    def _trusted_keys(self) -> dict[str, OKPKey]:
        try:
            # joserfc is in an extra, and not every gateway has it.
            from gateway.profiles.knowledge_bundle import trusted_keys
        except ImportError as error:
            raise _missing_package_error(error) from None
        return trusted_keys(self._key_folders)

    def _unpack(self, content: bytes) -> tuple[Manifest, str]:
        """Write the files of the bundle into the draft. Returns its manifest and its signer."""
        keys = self._trusted_keys()
        from gateway.profiles.knowledge_bundle import read_bundle

        bundle = read_bundle(content, keys)
        manifest = bundle.manifest
        if not manifest.fits:
            raise Conflict(
                f"The knowledge bundle {manifest.number} is for fitserve {manifest.versions}, and"
                f" this is {__version__}.",
                hint="Get the bundle for this version, or upgrade fitserve.",
            )
        newest_number = self._folder.state().number
        if newest_number is not None and manifest.number <= newest_number:
            raise Conflict(
                f"The knowledge bundle {manifest.number} is not newer than bundle {newest_number},"
                " which is in use.",
                hint="`fitserve knowledge rollback` returns to the bundle before.",
            )
        try:
            shutil.rmtree(self._draft, ignore_errors=True)
            _write_files(self._draft / PROFILES, bundle.files)
            write(self._draft / MANIFEST, manifest.model_dump_json().encode())
        except OSError as error:
            shutil.rmtree(self._draft, ignore_errors=True)
            raise self._write_error(error) from None
        return manifest, bundle.signer

    async def _check(self, folder: Path, manifest: Manifest) -> None:
        """Refuse profiles that this version cannot read. Raises BadRequest, NotReady."""
        try:
            child = await spawn(_CHECK_PROGRAM, {})
        except OSError as error:
            raise NotReady(
                f"The knowledge bundle cannot be checked: {error.strerror}.",
                hint="The machine is short of memory or processes. Free some, then try again.",
            ) from None
        try:
            async with asyncio.timeout(_CHECK_S):
                output, _ = await child.communicate(str(folder).encode())
            report = json.loads(output)
        except (TimeoutError, ValueError):
            report = {"problem": "reading them took too long, or ended the program that reads them"}
        finally:
            await kill(child)
        if problem := report["problem"]:
            raise BadRequest(
                f"fitserve {__version__} cannot read the profiles of bundle {manifest.number}:"
                f" {problem[:1000].replace(f'{folder}/', '')}",
                hint="The profiles stay as they were. Upgrade fitserve, or get another bundle.",
            )

    def _adopt_draft(self, number: int) -> None:
        """Make the draft the bundle in use, and remove bundles before the last one."""
        state = self._folder.state()
        place = self._folder.path / str(number)
        try:
            # A bundle that was left by a rollback.
            shutil.rmtree(place, ignore_errors=True)
            self._draft.rename(place)
            sync_folder(self._folder.path)
        except OSError as error:
            raise self._write_error(error) from None
        self._write_state(KnowledgeState(number=number, previous=state.number))

    def _write_state(self, state: KnowledgeState) -> None:
        try:
            write(self._folder.path / STATE, state.model_dump_json().encode(), is_durable=True)
        except OSError as error:
            raise self._write_error(error) from None
        kept_names = {STATE, *(str(number) for number in (state.number, state.previous) if number)}
        for path in self._folder.path.iterdir():
            if path.name not in kept_names:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write_error(self, error: OSError) -> StoreError:
        return StoreError(
            f"The knowledge bundle cannot be written to {self._folder.path}: {error.strerror}.",
            hint="Free space there, or let the gateway write there, then try again.",
        )


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files, and bring them to the disk together, which takes a fraction of the time of
    one after the other. Raises OSError."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in files:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def _bundle_view(bundle: TakenBundle | None) -> BundleView | None:
    if bundle is None:
        return None
    manifest = bundle.manifest
    return BundleView(
        number=manifest.number,
        date=manifest.date,
        versions=manifest.versions,
        note=manifest.note,
        files=len(manifest.files),
        fits=manifest.fits,
    )


def _missing_package_error(error: ImportError) -> SettingsError:
    return SettingsError(
        f"Signatures of knowledge bundles need the package {error.name or 'joserfc'}.",
        hint="Run `pip install '.[knowledge]'` in a clone of the repository.",
    )
