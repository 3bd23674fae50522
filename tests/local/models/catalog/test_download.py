"""gateway.models.catalog.download: a repository on disk, whole or not called complete."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.errors import BadModel
from gateway.models.catalog.catalog import load
from gateway.models.catalog.download import download
from gateway.models.catalog.hub import Hub
from gateway.models.catalog.hub_cache import HubCache
from gateway.secret import Secret
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import layer, model, safetensors, sharded_model
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TOKEN = "hf_secret_of_the_test"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    with FakeHub({"org/name": FakeRepo(sharded_model())}) as hub:
        yield hub


async def fetch(
    server: FakeHub,
    tmp_path: Path,
    *,
    reports: list[str] | None = None,
    token: str | None = None,
    allow_remote_code: bool = False,
) -> Path:
    lines = [] if reports is None else reports
    return await download(
        hub_of(server, tmp_path, token),
        "org/name",
        COMMIT,
        lines.append,
        allow_remote_code=allow_remote_code,
    )


def hub_of(server: FakeHub, tmp_path: Path, token: str | None = None) -> Hub:
    return Hub(
        server.url(),
        Secret(token) if token else None,
        tmp_path / "notes",
        models=tmp_path / "cache",
    )


def snapshot(tmp_path: Path, commit: str = COMMIT) -> Path:
    return tmp_path / "cache" / "models--org--name" / "snapshots" / commit


def whole(tmp_path: Path, *, remote_code: bool = False) -> bool:
    return HubCache(tmp_path / "cache", tmp_path / "notes").is_whole(
        "org/name", COMMIT, remote_code=remote_code
    )


def present(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(hang_s()):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_download_is_a_folder_that_reads_as_the_repository_does(
    server: FakeHub, tmp_path: Path
) -> None:
    reports: list[str] = []
    folder = await fetch(server, tmp_path, reports=reports)
    assert folder == snapshot(tmp_path)
    hub = Hub(server.url(), None, tmp_path / "other")
    hub_model, folder_model = load("org/name", hub=hub), load(str(folder), hub=hub)
    assert folder_model.evolve(source=hub_model.source, revision=hub_model.revision) == hub_model
    assert reports[-1] == "Downloaded org/name: 0.1 MiB"


async def test_only_files_for_the_engine_are_fetched(server: FakeHub, tmp_path: Path) -> None:
    files = {
        "tokenizer.json": b"{}",
        "tokenizer.model": b"x",
        "tokenizer.model.v3": b"x",
        "merges.txt": b"x",
        "chat_template.jinja": b"x",
        "qwen.tiktoken": b"x",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": safetensors({"linear.weight": (2, 2)}),
    }
    other_files = {
        "README.md": b"x",
        "pytorch_model.bin": b"x",
        "tokenizer.pkl": b"x",
        "modeling_x.py": b"x",
        "onnx/config.json": b"{}",
        "original/consolidated.safetensors": safetensors(layer(0)),
    }
    server.repos["org/name"].files |= files | other_files
    folder = await fetch(server, tmp_path)
    names = files.keys() | {"config.json", "model.safetensors.index.json", *SHARDS}
    assert present(folder) == names
    # The code is fetched too where code is allowed; present files are not fetched again.
    server.requests.clear()
    await fetch(server, tmp_path, allow_remote_code=True)
    assert present(folder) == names | {"modeling_x.py"}
    assert not server.gets(SHARDS[0])


async def test_a_complete_model_is_not_asked_for_again(server: FakeHub, tmp_path: Path) -> None:
    folder = await fetch(server, tmp_path)
    server.requests.clear()
    assert await fetch(server, tmp_path) == folder
    assert server.requests == []


async def test_a_broken_connection_goes_on_where_it_broke(server: FakeHub, tmp_path: Path) -> None:
    server.repos["org/name"].files[SHARDS[1]] = safetensors(layer(1) | {"bulk": (8 * 1024, 1024)})
    server.break_off[SHARDS[1]] = [12 * 1024 * 1024]
    folder = await fetch(server, tmp_path)
    assert (folder / SHARDS[1]).read_bytes() == server.repos["org/name"].files[SHARDS[1]]
    ranges = [request.range for request in server.gets(SHARDS[1]) if request.server == "cdn"]
    # The library takes 10 MiB at a time.
    assert ranges == [None, "bytes=10485760-"]


async def test_a_cancelled_download_ends_at_once_and_keeps_whole_files(
    server: FakeHub, tmp_path: Path
) -> None:
    big = safetensors(layer(1) | {"bulk": (8 * 1024, 1024)})
    server.repos["org/name"].files[SHARDS[1]] = big
    server.stalls[SHARDS[1]] = 12 * 1024 * 1024
    reports: list[str] = []
    task = asyncio.create_task(fetch(server, tmp_path, reports=reports))
    folder = snapshot(tmp_path)
    await until(server.stalled.is_set)
    await until((folder / SHARDS[0]).exists)
    await until(lambda: any("name: 10." in report for report in reports))
    task.cancel()
    async with asyncio.timeout(hang_s()):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert children(os.getpid()) == []
    assert not whole(tmp_path)
    assert SHARDS[1] not in present(folder)
    assert list((tmp_path / "cache").rglob("*.incomplete")), "what the killed child left"
    server.resume.set()
    server.requests.clear()
    assert await fetch(server, tmp_path) == folder
    assert server.gets(SHARDS[0]) == []
    assert (folder / SHARDS[1]).read_bytes() == big
    assert list((tmp_path / "cache").rglob("*.incomplete")) == []


async def test_the_child_ends_when_the_gateway_dies(server: FakeHub, tmp_path: Path) -> None:
    server.repos["org/name"].files[SHARDS[1]] = safetensors(layer(1) | {"bulk": (8 * 1024, 1024)})
    server.stalls[SHARDS[1]] = 1024 * 1024
    gateway = (
        "import asyncio, sys; from pathlib import Path; from gateway.models.catalog.download"
        f" import download; from gateway.models.catalog.hub import Hub\nhub = Hub({server.url()!r},"
        f" None, Path({str(tmp_path / 'notes')!r}),"
        f" models=Path({str(tmp_path / 'cache')!r}))\nasyncio.run(download(hub, 'org/name',"
        f" {COMMIT!r}, print))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", gateway, stdout=subprocess.DEVNULL
    )
    try:
        await until(server.stalled.is_set)
        (child,) = children(process.pid)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await until(lambda: not runs(child))


async def test_a_child_that_crashes_is_reported_with_its_code(
    server: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BadModel, match="The download of org/name ended with exit code 1"):
        await fetch(server, tmp_path)


async def test_the_gateway_itself_reads_neither_listing_nor_index(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may be as large and deep as its limit allows, and would hold up every stream."""

    def never(*_: object) -> None:
        raise AssertionError("in the gateway")

    for name in ("resolve", "fetch", "part"):
        monkeypatch.setattr(Hub, name, never)
    assert SHARDS[0] in present(await fetch(server, tmp_path))


async def test_a_file_without_end_does_not_fill_the_disk(server: FakeHub, tmp_path: Path) -> None:
    server.endless.add(SHARDS[1])
    with pytest.raises(
        BadModel, match=r"sends more of org/name than it lists|is not complete|the connection broke"
    ):
        await fetch(server, tmp_path)
    assert not whole(tmp_path)
    assert (
        sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
        < 2**27
    )


def test_neither_planning_nor_downloading_loads_the_library_before_it_is_needed() -> None:
    loads = (
        "import sys, gateway.models.catalog.catalog, gateway.models.catalog.download;"
        " print(sorted({'huggingface_hub', 'httpx2'} & sys.modules.keys()))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", loads], check=True, capture_output=True, text=True
        ).stdout
        == "[]\n"
    )


async def test_two_concurrent_downloads_of_one_model_share_the_work(
    server: FakeHub, tmp_path: Path
) -> None:
    first, second = await asyncio.gather(fetch(server, tmp_path), fetch(server, tmp_path))
    assert first == second
    assert len([request for request in server.gets(SHARDS[0]) if request.server == "cdn"]) == 1


async def test_a_file_of_a_wrong_size_on_disk_is_fetched_again(
    server: FakeHub, tmp_path: Path
) -> None:
    folder = await fetch(server, tmp_path)
    assert whole(tmp_path)
    (folder / SHARDS[0]).write_bytes(b"cut off")
    assert not whole(tmp_path)
    await fetch(server, tmp_path)
    assert (folder / SHARDS[0]).read_bytes() == server.repos["org/name"].files[SHARDS[0]]


async def test_a_note_that_says_nothing_counts_as_none(server: FakeHub, tmp_path: Path) -> None:
    await fetch(server, tmp_path)
    (note,) = (tmp_path / "notes" / "whole").rglob("*.json")
    for text in ("", "{}"):
        note.write_text(text)
        assert not whole(tmp_path)
        await fetch(server, tmp_path)
        assert whole(tmp_path)
        assert not whole(tmp_path, remote_code=True)


async def test_too_little_room_is_said_before_anything_is_fetched(
    server: FakeHub, tmp_path: Path
) -> None:
    server.repos["org/name"].sizes[SHARDS[1]] = 2**60
    with pytest.raises(BadModel) as error:
        await fetch(server, tmp_path)
    assert (
        "The download needs 1073741825.0 GiB (1 GiB of it as a margin), and " in error.value.message
    )
    assert f" GiB are free at {tmp_path / 'cache'}." in error.value.message
    assert "FITSERVE_MODELS_DIR" in error.value.hint
    assert server.gets(SHARDS[0]) == []


INODES = 3
"""The first folders fit, and the first files do not."""
OPTIONS = {"no room for files": (f"nr_inodes={INODES}", "nr_inodes=0"), "read-only": ("ro", "rw")}
CAUSES = {"no room for files": "no space is left in", "read-only": "is read-only"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of its own")
@pytest.mark.parametrize("place", ["cache", "notes"])
@pytest.mark.parametrize("fault", OPTIONS)
async def test_a_disk_that_refuses_a_download_is_named_and_the_next_try_succeeds(
    server: FakeHub, tmp_path: Path, fault: str, place: str
) -> None:
    disk = tmp_path / place
    disk.mkdir()
    option, cure = OPTIONS[fault]
    command = ["mount", "-t", "tmpfs", "-o", f"size=2g,{option}", "tmpfs", str(disk)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    try:
        with pytest.raises(BadModel) as error:
            await fetch(server, tmp_path)
        assert CAUSES[fault] in error.value.message
        assert str(disk) in error.value.message
        assert error.value.hint
        assert not whole(tmp_path)
        remount = ["mount", "-o", f"remount,{cure}", str(disk)]
        await asyncio.to_thread(subprocess.run, remount, check=True)
        folder = await fetch(server, tmp_path)
        assert present(folder) >= {*SHARDS}
        assert whole(tmp_path)
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)


async def test_a_folder_that_cannot_be_made_is_named(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(BadModel, match="cannot be made: File exists"):
        await fetch(server, tmp_path)


async def test_a_repository_without_weights_is_refused(server: FakeHub, tmp_path: Path) -> None:
    server.repos["org/name"].files = {"config.json": model()["config.json"]}
    with pytest.raises(BadModel, match="org/name holds no weights"):
        await fetch(server, tmp_path)


@pytest.mark.parametrize(
    ("repo", "commit"), [("org/name", "main"), ("org/name", "../" * 13 + "x"), ("name", COMMIT)]
)
async def test_only_a_repository_at_a_commit_can_be_downloaded(
    tmp_path: Path, repo: str, commit: str
) -> None:
    with pytest.raises(BadModel, match="cannot be downloaded"):
        await download(Hub(None, None, tmp_path, models=tmp_path), repo, commit, print)
    assert present(tmp_path) == set()


async def test_the_token_reaches_the_hub_alone_and_no_word_of_ours(
    server: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.repos["org/name"].gated = True
    with pytest.raises(BadModel, match="is gated"):
        await fetch(server, tmp_path)
    assert {request.token for request in server.requests} == {None}
    server.requests.clear()
    reports: list[str] = []
    folder = await fetch(server, tmp_path, reports=reports, token=TOKEN)
    assert {(request.server, request.token) for request in server.requests} == {
        ("hub", f"Bearer {TOKEN}"),
        ("cdn", None),
    }
    out, err = capfd.readouterr()
    assert TOKEN not in "".join((out, err, *reports))
    assert not any(
        TOKEN.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("fault", ["gone", "short"])
async def test_a_repository_that_is_not_served_as_listed_is_not_complete(
    server: FakeHub, tmp_path: Path, fault: str
) -> None:
    repo = server.repos["org/name"]
    repo.served = {SHARDS[1]: None if fault == "gone" else repo.files[SHARDS[1]][:-1]}
    with pytest.raises(BadModel) as error:
        await fetch(server, tmp_path)
    words_by_fault = {
        "gone": "A file of org/name was removed",
        "short": f"is not complete: {SHARDS[1]} has 33",
    }
    assert words_by_fault[fault] in error.value.message
    folder = snapshot(tmp_path)
    assert not whole(tmp_path)
    assert SHARDS[1] not in present(folder)
