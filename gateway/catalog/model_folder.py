"""How far a model folder reaches: its files, and an engine's view of them, end there.

A folder is all of itself. A snapshot in a cache of the Hugging Face Hub is links into the blobs of its repository:

    models--ORG--NAME/blobs/HASH
    models--ORG--NAME/snapshots/COMMIT/config.json -> ../../blobs/HASH

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

from pathlib import Path

from gateway.catalog.hub import COMMIT
from gateway.errors import BadModel


def reach(folder: Path) -> Path:
    """The folder that holds all that the model's files may be: for a snapshot of a Hub's cache its repository, else itself."""
    repository = folder.parent.parent
    layout = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) and repository.name.startswith("models--")
    return repository if layout and _is_own(repository / "blobs") else folder


def _is_own(blobs: Path) -> bool:
    return blobs.is_dir() and not blobs.is_symlink()


def check_opened(descriptor: int, folder: Path, where: str) -> None:
    """The file that was opened in the model folder is within its reach. Raises BadModel.

    The kernel is asked where the file is that was opened: a link that is changed meanwhile changes nothing.
    """
    root = reach(folder)
    if not Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(root):
        raise BadModel(
            f"{where} is a link to a file outside of {root}, which an engine does not see.", hint="Put the file itself there."
        )


def check_unmoved(folder: Path) -> None:
    """The folder is the one that was planned: no part of its path has become a link since. Raises BadModel."""
    try:
        moved = folder.resolve(strict=True) != folder
    except (OSError, RuntimeError):
        moved = True
    if moved or not folder.is_dir():
        raise BadModel(
            f"{folder} is not the folder any more that was planned.", hint="Put it back, or remove the model and add it again."
        )
