"""gateway.models.catalog.hub_cache: the cache is that of huggingface_hub itself, shared both ways,
and its content needs no Hub."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import BadModel
from gateway.models.catalog.catalog import load
from gateway.models.catalog.download import download
from gateway.models.catalog.hub import Hub
from gateway.settings import load_settings
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import sharded_model

pytestmark = pytest.mark.anyio

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MOVED = "f" * 40


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub({"org/name": FakeRepo(sharded_model())}) as hub:
        yield hub


def hub_of(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.url(), None, tmp_path / "notes", models=tmp_path / "cache")


def snapshot(tmp_path: Path, commit: str = COMMIT) -> Path:
    return tmp_path / "cache" / "models--org--name" / "snapshots" / commit


def bring_with_the_library(server: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("org/name", cache_dir=tmp_path / "cache", endpoint=server.url(), token=False)


async def test_the_library_finds_downloads_of_the_gateway(server: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder = await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    scan = scan_cache_dir(tmp_path / "cache")
    assert not scan.warnings
    (repo,), sizes = (scan.repos, sum(map(len, set(server.repos["org/name"].files.values()))))
    (revision,) = repo.revisions
    assert (repo.repo_id, revision.commit_hash, revision.snapshot_path, revision.size_on_disk) == (
        "org/name",
        COMMIT,
        folder,
        sizes,
    )
    # `hf cache prune` removes revisions without a name.
    assert revision.refs == {f"fitserve/{COMMIT}"}
    engines, cache = ["*.json", "model-*"], tmp_path / "cache"
    library_folder = snapshot_download(
        "org/name", revision=COMMIT, cache_dir=cache, allow_patterns=engines, local_files_only=True
    )
    assert Path(library_folder) == folder


async def test_files_that_another_program_brought_are_not_fetched_again(
    server: FakeHub, tmp_path: Path
) -> None:
    bring_with_the_library(server, tmp_path)
    server.requests.clear()
    hub = hub_of(server, tmp_path)
    spec = load("org/name", hub=hub)
    reports: list[str] = []
    assert await download(hub, "org/name", COMMIT, reports.append) == snapshot(tmp_path)
    assert spec.revision == COMMIT
    assert [request.path for request in server.requests] == ["/api/models/org/name"]
    assert reports[0].startswith("Checking org/name: ")


@pytest.mark.parametrize("fault", ["refused", "500", "a page of another server"])
async def test_files_that_another_program_brought_need_no_hub(
    server: FakeHub, tmp_path: Path, fault: str
) -> None:
    bring_with_the_library(server, tmp_path)
    server.answers = {"500": 500, "a page of another server": 200}.get(fault)
    url = "http://127.0.0.1:9" if fault == "refused" else server.url()
    hub = Hub(url, None, tmp_path / "notes", models=tmp_path / "cache")
    assert load("org/name", hub=hub).revision == COMMIT
    assert hub.unconfirmed_repos == {"org/name"}
    assert await download(hub, "org/name", COMMIT, print) == snapshot(tmp_path)
    # A commit that is known and here is nobody's question.
    server.requests.clear()
    pinned_hub = hub.pin_commits({"org/name": COMMIT})
    assert load("org/name", hub=pinned_hub).revision == COMMIT
    assert await download(pinned_hub, "org/name", COMMIT, print) == snapshot(tmp_path)
    assert (server.requests, pinned_hub.unconfirmed_repos) == ([], set())


async def test_a_part_of_a_model_is_no_model_where_the_hub_is_away(
    server: FakeHub, tmp_path: Path
) -> None:
    bring_with_the_library(server, tmp_path)
    (snapshot(tmp_path) / SHARDS[1]).unlink()
    server.answers = 500
    with pytest.raises(BadModel, match="answered 500 for org/name"):
        await download(hub_of(server, tmp_path), "org/name", COMMIT, print)


async def test_only_the_changed_files_of_another_commit_are_fetched(
    server: FakeHub, tmp_path: Path
) -> None:
    await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    repo = server.repos["org/name"]
    repo.commit, repo.files["tokenizer_config.json"] = MOVED, b"{}"
    server.requests.clear()
    hub = hub_of(server, tmp_path)
    assert load("org/name", hub=hub).revision == MOVED
    folder = await download(hub, "org/name", MOVED, print)
    assert folder == snapshot(tmp_path, MOVED)
    assert len(server.gets("tokenizer_config.json")) >= 1
    # Planning reads headers, and no request is for a whole file.
    assert all(request.range is not None for name in SHARDS for request in server.gets(name))
    assert all((folder / name).samefile(snapshot(tmp_path) / name) for name in SHARDS)


async def test_weights_that_are_not_those_of_the_listing_are_removed(
    server: FakeHub, tmp_path: Path
) -> None:
    right = server.repos["org/name"].files[SHARDS[1]]
    server.repos["org/name"].served[SHARDS[1]] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(BadModel, match=f"org/name/{SHARDS[1]} does not match its digest"):
        await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    assert not (snapshot(tmp_path) / SHARDS[1]).exists()
    server.repos["org/name"].served.clear()
    folder = await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    assert (folder / SHARDS[1]).read_bytes() == right


async def test_a_blob_that_changed_on_the_disk_is_fetched_again(
    server: FakeHub, tmp_path: Path
) -> None:
    bring_with_the_library(server, tmp_path)
    right = (snapshot(tmp_path) / SHARDS[0]).read_bytes()
    (snapshot(tmp_path) / SHARDS[0]).write_bytes(b"\1" + right[1:])
    with pytest.raises(BadModel, match="bytes changed during the download or on the disk"):
        await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    assert (
        (await download(hub_of(server, tmp_path), "org/name", COMMIT, print)) / SHARDS[0]
    ).read_bytes() == right


async def test_a_file_that_another_program_is_writing_stays(
    server: FakeHub, tmp_path: Path
) -> None:
    blobs, locks = (tmp_path / "cache" / place / "models--org--name" for place in ("", ".locks"))
    (blobs / "blobs").mkdir(parents=True)
    locks.mkdir(parents=True)
    old_file, locked_file = (
        blobs / "blobs" / f"{digest * 64}.01234567.incomplete" for digest in "ab"
    )
    for path in (old_file, locked_file):
        path.write_bytes(b"x")
    with (locks / f"{'b' * 64}.lock").open("w") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        await download(hub_of(server, tmp_path), "org/name", COMMIT, print)
    assert (old_file.exists(), locked_file.exists()) == (False, True)


async def test_blobs_that_repositories_share_are_read(server: FakeHub, tmp_path: Path) -> None:
    bring_with_the_library(server, tmp_path)
    blob_folder = tmp_path / "cache" / "blobs"
    (blob_folder / "ab").mkdir(parents=True)
    blob = (snapshot(tmp_path) / SHARDS[0]).resolve()
    blob.rename(blob_folder / "ab" / "one")
    blob.symlink_to(Path("../../blobs/ab/one"))
    with pytest.raises(BadModel, match="is a link to a file outside"):
        load("org/name", hub=hub_of(server, tmp_path))
    (blob_folder / ".huggingface-shared-blobs").write_text("1")
    hub = hub_of(server, tmp_path)
    assert load("org/name", hub=hub).revision == COMMIT
    assert await download(hub, "org/name", COMMIT, print)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/somewhere/hf"},
        {"HF_HUB_CACHE": "~/models/hub"},
        {"HF_HUB_CACHE": "$HOME/x", "HF_HOME": "/other"},
        {"XDG_CACHE_HOME": "/var/cache/me"},
        {"HUGGINGFACE_HUB_CACHE": "/old/name"},
    ],
    ids=str,
)
def test_the_cache_is_where_the_library_has_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert str(load_settings().models) == result


def test_git_names_a_small_file_by_its_own_digest(tmp_path: Path) -> None:
    from gateway.models.catalog.commit_files import matches_digest

    (tmp_path / "file").write_bytes(b"words\n")
    git = subprocess.run(
        ["git", "hash-object", str(tmp_path / "file")], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert matches_digest(tmp_path / "file", git)
    assert matches_digest(tmp_path / "file", hashlib.sha256(b"words\n").hexdigest())
    assert not matches_digest(tmp_path / "file", "0" * 40)
    assert not matches_digest(tmp_path / "file", "0" * 64)
    assert matches_digest(tmp_path / "file", None), "nobody knows"
