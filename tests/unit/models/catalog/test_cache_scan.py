"""A Hub's cache in which something was deleted by hand: listed with its bytes, and removable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.models.catalog.cache_scan import scan_cache
from gateway.models.catalog.disk import DiskJob
from gateway.models.catalog.disk_program import disk_usage, remove_weights

OLD, NEW = "a" * 40, "b" * 40
SHARED, ONLY_OLD, ONLY_NEW = b"s" * 1000, b"o" * 300, b"n" * 70


def repository(cache: Path, name: str = "org/model") -> Path:
    """Two commits that share one file; each has a file of its own, the newer one in a folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{OLD}", f"snapshots/{NEW}/text"):
        (folder / part).mkdir(parents=True)
    for blob, data in (("s", SHARED), ("o", ONLY_OLD), ("n", ONLY_NEW)):
        (folder / "blobs" / blob).write_bytes(data)
    for link, blob in (
        (f"{OLD}/model.safetensors", "../../blobs/s"),
        (f"{OLD}/config.json", "../../blobs/o"),
        (f"{NEW}/model.safetensors", "../../blobs/s"),
        (f"{NEW}/text/config.json", "../../../blobs/n"),
    ):
        (folder / "snapshots" / link).symlink_to(blob)
    (folder / "refs" / "main").write_text(NEW)
    return folder


def job(cache: Path, *remove: tuple[str, str]) -> DiskJob:
    return DiskJob(str(cache), str(cache.parent / "notes"), str(cache.parent / "data"), remove)


def loses_a_blob(folder: Path) -> None:
    (folder / "blobs" / "n").unlink()


def has_a_branch_without_a_commit(folder: Path) -> None:
    (folder / "refs" / "gone").write_text("c" * 40)


def has_a_stray_file(folder: Path) -> None:
    (folder / "snapshots" / "notes.txt").write_text("mine")


def has_an_unfinished_snapshot(folder: Path) -> None:
    loses_a_blob(folder)
    (folder / "snapshots" / ("d" * 40)).mkdir()


@pytest.mark.parametrize(
    ("damage", "lost_files"),
    [
        (loses_a_blob, ("text/config.json",)),
        (has_a_branch_without_a_commit, ()),
        (has_a_stray_file, ()),
        (has_an_unfinished_snapshot, ("text/config.json",)),
    ],
)
def test_a_damaged_repository_is_listed_with_its_bytes_and_can_be_removed(
    tmp_path: Path, damage: Callable[[Path], None], lost_files: tuple[str, ...]
) -> None:
    cache = tmp_path / "hub"
    whole, folder = repository(cache, "org/whole"), repository(cache)
    damage(folder)
    usage = disk_usage(job(cache))
    rows = {(row["repo"], row["commit"]): row for row in usage["revisions"]}
    newest = rows["org/model", NEW]
    rest = 0 if lost_files else len(ONLY_NEW)
    assert newest["bytes"] == len(SHARED) + rest
    assert newest["missing"] == lost_files
    assert newest["names"] == ["main"]
    assert rows["org/model", OLD]["bytes"] == len(SHARED) + len(ONLY_OLD)
    assert rows["org/whole", NEW]["missing"] == ()
    files = len(SHARED) + len(ONLY_OLD)
    assert usage["cache_bytes"] == 2 * files + len(ONLY_NEW) + rest

    report = remove_weights(job(cache, ("org/model", NEW)))
    assert report == {"freed_bytes": rest, "removed": [["org/model", NEW]]}
    assert (folder / "snapshots" / OLD / "model.safetensors").read_bytes() == SHARED
    assert not (folder / "snapshots" / NEW).exists()
    report = remove_weights(job(cache, ("org/model", OLD)))
    assert report == {"freed_bytes": files, "removed": [["org/model", OLD]]}
    assert (whole / "snapshots" / NEW / "model.safetensors").read_bytes() == SHARED


def test_the_library_reads_a_whole_cache(tmp_path: Path) -> None:
    repository(tmp_path)
    (tmp_path / "models--org--empty").mkdir()
    info, missing = scan_cache(tmp_path)
    assert info is not None
    assert {repo.repo_id for repo in info.repos} == {"org/model"}
    assert missing == {}
    assert scan_cache(tmp_path / "absent") == (None, {})
