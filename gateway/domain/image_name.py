"""Names of container images: repositories, digests, and permission to start them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.domain.value import EngineRef

# Docker's form: an optional registry, parts in lower case, then a tag or a digest or both.
NAME_PATTERN = (
    r"^(?:[A-Za-z0-9][A-Za-z0-9.-]{0,99}(?::\d{1,5})?/)?"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*){0,8}"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)
_DIGEST = re.compile(r"(?:[^\s@]{1,400}@)?sha256:[0-9a-f]{64}")
_NAME = re.compile(NAME_PATTERN)
# Docker reads such a name as the id of a local image.
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{4,64}")
# Docker's own registry, which names mostly leave out.
_REGISTRIES = ("docker.io/", "index.docker.io/")


def repository(image: str) -> str:
    """The name without tag and digest, in its shortest form.

    `docker.io/vllm/vllm-openai:v1` gives `vllm/vllm-openai`.
    """
    if _ID.fullmatch(image):
        return image
    name = image.partition("@")[0]
    # A colon before the last part belongs to the registry's port.
    head, slash, last = name.rpartition("/")
    return _short_name(f"{head}{slash}{last.partition(':')[0]}")


def add_tag(image: str) -> str:
    """The name with a tag: `latest` where it has none, else Docker could read it as an id."""
    return image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"


def is_digest_of(digest: str, image: str) -> bool:
    """Whether a digest has the form of one of this image.

    Either of its repository, or the bare id of an image that was built on this machine.
    """
    name, separator, _ = digest.rpartition("@")
    return _DIGEST.fullmatch(digest) is not None and (
        not separator or repository(name) == repository(image)
    )


def exact(engine: EngineRef, pins: Mapping[str, str]) -> EngineRef:
    """The engine with the digest of its pinned image, where there is one."""
    return engine.evolve(digest=pins.get(engine.image or "", engine.digest))


class AllowedImages:
    """The images that engines may be started from.

    A pattern is a repository, with any tag or digest, or a name with its tag. `*` is any text.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(
            dict.fromkeys(_short_name(pattern.strip()) for pattern in patterns if pattern.strip())
        )
        self._expressions = [
            re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in self.patterns
        ]

    def allows(self, image: str) -> bool:
        if _ID.fullmatch(image):
            return image in self.patterns
        if not _NAME.fullmatch(image):
            return False
        names = {
            repository(image),
            _short_name(add_tag(image).partition("@")[0]),
            _short_name(image),
        }
        return any(expression.fullmatch(name) for expression in self._expressions for name in names)

    def refusal(self, image: str) -> tuple[str, str]:
        """Message and hint for an image that is not allowed."""
        listed_patterns = ", ".join(self.patterns[:8]) + (", ..." if len(self.patterns) > 8 else "")
        return (
            (
                f"The image {image[:200]!r} may not be started: its name is not one of those"
                f" allowed here ({listed_patterns or 'none'})."
            ),
            (
                "Add its repository to FITSERVE_ALLOWED_IMAGES, of the gateway and of its agent,"
                " and restart them."
            ),
        )


def _short_name(name: str) -> str:
    """The name without Docker's defaults: its registry, and the folder `library`."""
    name = next(
        (name.removeprefix(registry) for registry in _REGISTRIES if name.startswith(registry)), name
    )
    inner_name = name.removeprefix("library/")
    return name if "/" in inner_name else inner_name
