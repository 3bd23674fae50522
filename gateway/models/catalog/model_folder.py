"""How far a model folder reaches: its files, and an engine's view of them, end there.

A folder is all of itself. A snapshot in a cache of the Hugging Face Hub is links into the blobs of
its repository:

    models--ORG--NAME/blobs/HASH
    models--ORG--NAME/snapshots/COMMIT/config.json -> ../../blobs/HASH
    blobs/XX/HASH                                     where several repositories share a blob, theirs are links to this one

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache;
    huggingface_hub/utils/_shared_blobs.py of 2.4.0
"""

from __future__ import annotations

from pathlib import Path

from gateway.errors import BadModel
from gateway.models.catalog.hub_cache import COMMIT

_SHARED = ".huggingface-shared-blobs"


def reach(folder: Path) -> Path:
    """The folder that holds all that the model's files may be: for a snapshot of a Hub's cache its
    repository, else itself."""
    repository = folder.parent.parent
    layout = (
        folder.parent.name == "snapshots"
        and COMMIT.fullmatch(folder.name)
        and repository.name.startswith("models--")
    )
    return repository if layout and _is_own(repository / "blobs") else folder


def shared_blobs(folder: Path) -> Path | None:
    """The blobs that the repositories of the same cache share, where there are any."""
    repository = reach(folder)
    shared = repository.parent / "blobs"
    return (
        shared
        if repository != folder and _is_own(shared) and (shared / _SHARED).is_file()
        else None
    )


def _is_own(blobs: Path) -> bool:
    return blobs.is_dir() and not blobs.is_symlink()


def check_opened(descriptor: int, folder: Path, where: str) -> None:
    """The file that was opened in the model folder is within its reach. Raises BadModel.

    The kernel is asked where the file is that was opened: a link that is changed meanwhile changes
    nothing.
    """
    root, shared = reach(folder), shared_blobs(folder)
    opened = Path(f"/proc/self/fd/{descriptor}").readlink()
    if not (opened.is_relative_to(root) or (shared is not None and opened.is_relative_to(shared))):
        raise BadModel(
            f"{where} is a link to a file outside of {root}, which an engine does not see.",
            hint="Put the file itself there.",
        )


def check_unmoved(folder: Path) -> None:
    """The folder is the one that was planned: no part of its path has become a link since. Raises
    BadModel."""
    try:
        moved = folder.resolve(strict=True) != folder
    except (OSError, RuntimeError):
        moved = True
    if moved or not folder.is_dir():
        raise BadModel(
            f"{folder} is not the folder any more that was planned.",
            hint="Put it back, or remove the model and add it again.",
        )
