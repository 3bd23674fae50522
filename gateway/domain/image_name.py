"""Names of container images: their repositories, their digests, and which of them may be started.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.domain.value import EngineRef

# As Docker takes them: a registry or none, parts in lower case, then a tag or a digest or both.
NAME_PATTERN = (
    r"^(?:[A-Za-z0-9][A-Za-z0-9.-]{0,99}(?::\d{1,5})?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*){0,8}"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)
_DIGEST = re.compile(r"(?:[^\s@]{1,400}@)?sha256:[0-9a-f]{64}")
_NAME = re.compile(NAME_PATTERN)
# What Docker reads as the id of any image that is here, whatever its name.
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{4,64}")
# Docker's own registry, which names mostly leave out.
_REGISTRIES = ("docker.io/", "index.docker.io/")


def repository(image: str) -> str:
    """The name without tag and digest, as it is written shortest: of
    `docker.io/vllm/vllm-openai:v1` it is `vllm/vllm-openai`."""
    if _ID.fullmatch(image):
        return image
    name = image.partition("@")[0]
    # A colon before the last part is that of a registry's port.
    head, slash, last = name.rpartition("/")
    return _short(f"{head}{slash}{last.partition(':')[0]}")


def tagged(image: str) -> str:
    """The name with the tag that it means where it has none. A name without one could be read as
    the beginning of an image's id."""
    return image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"


def is_digest_of(digest: str, image: str) -> bool:
    """Whether it has the form of a digest of this image: of its repository, or the bare id of one
    that was built on this machine."""
    name, at, _ = digest.rpartition("@")
    return _DIGEST.fullmatch(digest) is not None and (
        not at or repository(name) == repository(image)
    )


def exact(engine: EngineRef, pins: Mapping[str, str]) -> EngineRef:
    """The engine with the digest at which its image is pinned, where that is so."""
    return engine.evolve(digest=pins.get(engine.image or "", engine.digest))


class AllowedImages:
    """Names of images that engines may be started from. A pattern is a repository, of which every
    tag and digest may be, or a name with its
    tag; `*` stands for any text."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(dict.fromkeys(_short(one.strip()) for one in patterns if one.strip()))
        self._expressions = [
            re.compile(".*".join(map(re.escape, one.split("*")))) for one in self.patterns
        ]

    def allows(self, image: str) -> bool:
        if _ID.fullmatch(image):
            return image in self.patterns
        if not _NAME.fullmatch(image):
            return False
        names = {repository(image), _short(tagged(image).partition("@")[0]), _short(image)}
        return any(one.fullmatch(name) for one in self._expressions for name in names)

    def refusal(self, image: str) -> tuple[str, str]:
        """What is wrong with an image that is not among them, and what to do, in words."""
        listed = ", ".join(self.patterns[:8]) + (", ..." if len(self.patterns) > 8 else "")
        return (
            (
                f"The image {image[:200]!r} may not be started: its name is not one of those"
                f" allowed here ({listed or 'none'})."
            ),
            (
                "Add its repository to FITSERVE_ALLOWED_IMAGES, of the gateway and of its agent,"
                " and restart them."
            ),
        )


def _short(name: str) -> str:
    """Without what Docker adds itself: its registry, and there the folder of images that nobody's
    name stands before."""
    name = next((name.removeprefix(one) for one in _REGISTRIES if name.startswith(one)), name)
    inner = name.removeprefix("library/")
    return name if "/" in inner else inner
