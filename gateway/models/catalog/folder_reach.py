"""The reach of a model folder: the folder that holds all files a model may use.

An ordinary folder is its own reach. A snapshot in a cache of the Hugging Face Hub consists of links
into the blobs of its repository:

    models--ORG--NAME/blobs/HASH
    models--ORG--NAME/snapshots/COMMIT/config.json -> ../../blobs/HASH
    blobs/XX/HASH                                     a blob that several repositories link to

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache;
    huggingface_hub/utils/_shared_blobs.py of 2.4.0
"""

from __future__ import annotations

from pathlib import Path

from gateway.errors import BadModel
from gateway.models.catalog.hub_cache import COMMIT

_SHARED_MARK = ".huggingface-shared-blobs"


def reach(folder: Path) -> Path:
    """The repository's folder for a snapshot of a Hub's cache, else the folder itself."""
    repository = folder.parent.parent
    layout = (
        folder.parent.name == "snapshots"
        and COMMIT.fullmatch(folder.name)
        and repository.name.startswith("models--")
    )
    return repository if layout and _is_folder(repository / "blobs") else folder


def is_readable(name: str) -> bool:
    """Whether people can read the name of a folder: it has no control characters, and no bytes that
    are not text. No request can name another one."""
    return name.isprintable()


def shared_blobs(folder: Path) -> Path | None:
    """The folder of blobs that the repositories of the cache share; None: there is none."""
    repository = reach(folder)
    shared_folder = repository.parent / "blobs"
    return (
        shared_folder
        if repository != folder
        and _is_folder(shared_folder)
        and (shared_folder / _SHARED_MARK).is_file()
        else None
    )


def _is_folder(blobs: Path) -> bool:
    return blobs.is_dir() and not blobs.is_symlink()


def check_reach(descriptor: int, folder: Path, location: str) -> None:
    """Check that a file opened in the model folder is within the folder's reach. Raises BadModel.

    The kernel knows the path of the open file, so a link that changes in between has no effect.
    """
    root = reach(folder)
    shared_folder = shared_blobs(folder)
    open_path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if not (
        open_path.is_relative_to(root)
        or (shared_folder is not None and open_path.is_relative_to(shared_folder))
    ):
        raise BadModel(
            f"{location} is a link to a file outside of {root}, which an engine cannot read.",
            hint="Replace the link by the file itself.",
        )


def check_links(folder: Path) -> None:
    """Check that no part of the planned folder's path has become a link. Raises BadModel."""
    try:
        has_moved = folder.resolve(strict=True) != folder
    except (OSError, RuntimeError):
        has_moved = True
    if has_moved or not folder.is_dir():
        raise BadModel(
            f"{folder} was replaced after the model was planned.",
            hint="Put it back, or remove the model and add it again.",
        )
