"""The container of an engine in another program's file: its image and its folders of the host.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# A variable of a models file has a colon too.
_SHORT_VOLUME = re.compile(r"((?:\$\{[^}]*\}|[^:])+):(/[^:]*)(?::.*)?")
_FOLDER_PREFIXES = ("/", ".", "~", "$")
_TAG_VERSION = re.compile(r"v?(\d+\.\d+(?:\.\d+)*(?:\.?(?:post|rc)\d+)?)(?:[-_+].*)?")
_FILE_REFERENCE = re.compile(r"(\$\{file:)(.*)(\})", re.DOTALL)


class VolumeMount(NamedTuple):
    """A folder in a container.

    source: a folder of the host, or the name of a volume.
    target: the path in the container.
    """

    source: str
    target: str

    @property
    def is_folder(self) -> bool:
        """Whether the source is a folder of the host."""
        return self.source.startswith(_FOLDER_PREFIXES)


def image_version(image: str, published: str | None) -> tuple[str, str]:
    """The engine version in an image's tag, and a notice; "": there is none.

    published: the image of the engine's profile. An image of another repository, a digest and a tag
    without a version have a notice. `latest` and no tag stand for the newest version.
    """
    name, _, digest = image.partition("@")
    repository, tag = _split_tag(name)
    published_repository, _ = _split_tag(published or "")
    match = _TAG_VERSION.fullmatch(tag)
    # A mirror has its host before the name.
    is_published = bool(published_repository) and f"/{repository}".endswith(
        f"/{published_repository}"
    )
    if is_published and match:
        return match[1], ""
    if is_published and tag in ("", "latest") and not digest:
        return "", ""
    reason = "its tag names no version" if is_published else "its publisher is not the engine's"
    return "", (
        f"image {image[:200]}: {reason}. `image` keeps it, if FITSERVE_ALLOWED_IMAGES names it."
    )


def _split_tag(name: str) -> tuple[str, str]:
    """The repository and the tag of an image's name."""
    head, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{head}{slash}{last}", tag


def volume_mounts(entries: Iterable[object]) -> list[VolumeMount]:
    """The mounts of `SOURCE:TARGET` texts, of `docker run --mount`, and of Compose's long form."""
    mounts: list[VolumeMount] = []
    for entry in entries:
        text = str(entry)
        if isinstance(entry, Mapping):
            fields: Mapping[Any, Any] = entry
        elif "=" in text and "," in text:
            fields = dict(part.partition("=")[::2] for part in text.split(","))
        elif match := _SHORT_VOLUME.fullmatch(text):
            fields = {"source": match[1], "target": match[2]}
        else:
            continue
        source = fields.get("source", fields.get("src"))
        target = fields.get("target", fields.get("destination", fields.get("dst")))
        if source and target and str(target).strip("/"):
            mounts.append(VolumeMount(str(source), str(target).rstrip("/")))
    return mounts


class HostPaths:
    """Translates paths of a container into those of the host.

    used_mounts: the mounts of the translated paths.
    notices: about paths that the host does not have.
    """

    def __init__(self, mounts: Iterable[VolumeMount]) -> None:
        self._mounts = sorted(mounts, key=lambda mount: -len(mount.target))
        self.used_mounts: set[VolumeMount] = set()
        self.notices: list[str] = []

    def translate(self, fields: dict[str, Any]) -> None:
        """Replace the paths in these fields of a wish."""
        for field in ("source", "drafter"):
            if field in fields:
                fields[field] = self._host_path(field, fields[field])
        if loras := fields.get("loras"):
            fields["loras"] = {name: self._host_path("loras", path) for name, path in loras.items()}
        if template := fields.get("chat_template"):
            match = _FILE_REFERENCE.fullmatch(template["text"])
            if match:
                path = self._host_path("chat_template", match[2])
                fields["chat_template"] = {"text": f"{match[1]}{path}{match[3]}"}

    def _host_path(self, field: str, path: str) -> str:
        if not path.startswith("/"):
            return path
        for mount in self._mounts:
            if path == mount.target or path.startswith(f"{mount.target}/"):
                self.used_mounts.add(mount)
                if mount.is_folder:
                    return f"{mount.source.rstrip('/')}{path[len(mount.target) :]}"
                location = f"the volume {mount.source[:100]}"
                break
        else:
            location = "the container"
        self.notices.append(
            f"{field}: {path[:200]} is a path in {location}. Write the host's path."
        )
        return path
