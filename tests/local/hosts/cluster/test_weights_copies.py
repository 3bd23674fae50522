"""Weights that machines copy from each other, with node services and a link without Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from gateway.domain import Hardware
from gateway.errors import AgentAway, AgentRefusal, FitserveError, HostError
from gateway.hosts.agent.calls import (
    CHUNK_BYTES,
    MAX_BYTES_OF_CALL,
    ChunkAnswer,
    MissingCall,
    ReceiveCall,
    SendCall,
    WeightsCall,
    WeightsFile,
)
from gateway.hosts.cluster import node_service
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.cluster.node_host import NodeHost
from gateway.hosts.host import HubCommit
from gateway.hosts.nodes_host import NodesHost
from gateway.machine.environment import engine_dir
from gateway.machine.probe import probe
from gateway.models.catalog import commit_files
from gateway.models.catalog.hub_cache import HubCache
from tests.contract.memory_harness import MemoryHarness
from tests.support.cluster_nodes import install
from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.hub_commits import COMMIT, REPO, disk_of, put_commit
from tests.support.model_files import sharded_model
from tests.support.running import running

from .test_host import ScriptedLink, machine, two_machines

pytestmark = pytest.mark.anyio

WANTED = HubCommit(REPO, COMMIT)
FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(3 * CHUNK_BYTES + 77),
    "1_Pooling/config.json": b'{"word_embedding_dimension": 8}',
    "empty.txt": b"",
}


class Pair:
    """Two machines, of which `one` may have weights, and a gateway."""

    def __init__(self, root: Path, host: ClusterHost, link: ScriptedLink) -> None:
        self.host = host
        self.link = link
        self.disks: dict[str, HubCache] = {name: disk_of(root / name) for name in ("one", "two")}
        self.words: list[str] = []

    async def bring(self, commit: HubCommit = WANTED) -> None:
        """Start an engine of the model on `two`, up to its weights."""
        spec = MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",))
        await self.host.copy_weights(spec, [commit], self.words.append)

    def node(self, name: str, owner: str = "a") -> NodeHost:
        return NodeHost(self.link.root / "link.sock", name, owner)

    def content(self, name: str) -> Mapping[str, bytes]:
        """The files of the commit on a machine."""
        folder = self.disks[name].snapshot(REPO, COMMIT)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def is_whole(self, name: str) -> bool:
        return self.disks[name].is_whole(REPO, COMMIT, remote_code=False)

    def unfinished_files(self) -> list[Path]:
        return [*self.disks["two"].repository(REPO).rglob("*.fitserve-copy")]


@pytest.fixture
async def pair(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    monkeypatch.setattr(node_service, "probe", lambda data: machine(data.name))
    monkeypatch.setattr(commit_files, "MARGIN_BYTES", 0)
    async with two_machines(tmp_path) as (host, link):
        yield Pair(tmp_path, host, link)


def test_a_chunk_as_base64_is_shorter_than_a_call() -> None:
    answer = ChunkAnswer(data="=" * (4 * CHUNK_BYTES // 3 + 4))
    assert len(answer.model_dump_json()) < MAX_BYTES_OF_CALL


async def test_a_machine_copies_missing_weights(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES)
    assert await pair.host.has_weights(WANTED)
    await pair.bring()
    assert pair.content("two") == FILES
    assert pair.is_whole("two")
    assert pair.unfinished_files() == []
    assert f"Copying {REPO} from one to two" in pair.words[-1]
    assert "(100 %)" in pair.words[-1]
    # The library of the Hub finds blobs by their digests.
    path = pair.disks["two"].snapshot(REPO, COMMIT) / "1_Pooling/config.json"
    assert path.readlink().parts[:4] == ("..", "..", "..", "blobs")
    pair.link.send_calls.clear()
    await pair.bring()
    assert pair.link.send_calls == []


async def test_a_copy_that_broke_off_is_continued(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES)
    pair.link.passed_bytes = 2 * CHUNK_BYTES
    with pytest.raises(AgentAway, match="broke off while it sent weights"):
        await pair.bring()
    assert not pair.is_whole("two")
    (unfinished_file,) = pair.unfinished_files()
    assert unfinished_file.stat().st_size == CHUNK_BYTES
    pair.link.passed_bytes = None
    pair.link.send_calls.clear()
    await pair.bring()
    assert pair.content("two") == FILES
    offsets = {call["name"]: call["offset"] for call in pair.link.send_calls}
    assert offsets == {"model.safetensors": CHUNK_BYTES}


async def test_changed_bytes_are_no_weights(pair: Pair) -> None:
    folder = put_commit(pair.disks["one"], FILES)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(HostError, match=r"model\.safetensors does not match its digest"):
        await pair.bring()
    assert not pair.is_whole("two")
    assert "model.safetensors" not in pair.content("two")
    assert pair.unfinished_files() == []


async def test_a_changed_beginning_of_a_copy_is_no_part_of_weights(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES)
    pair.link.passed_bytes = 2 * CHUNK_BYTES
    with pytest.raises(AgentAway):
        await pair.bring()
    (unfinished_file,) = pair.unfinished_files()
    unfinished_file.write_bytes(bytes(unfinished_file.stat().st_size))
    pair.link.passed_bytes = None
    with pytest.raises(HostError, match="does not match its digest"):
        await pair.bring()
    # The next try begins anew.
    await pair.bring()
    assert pair.content("two") == FILES


async def test_files_that_are_on_the_disk_are_compared_and_not_copied(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES)
    put_commit(pair.disks["two"], FILES)
    pair.disks["two"].forget(REPO, COMMIT)
    (pair.disks["two"].snapshot(REPO, COMMIT) / "config.json").resolve().write_bytes(b"[]")
    await pair.bring()
    assert [call["name"] for call in pair.link.send_calls] == ["config.json"]
    assert pair.content("two") == FILES


async def test_nothing_happens_where_no_machine_has_the_weights(pair: Pair) -> None:
    assert not await pair.host.has_weights(WANTED)
    await pair.bring()
    assert pair.link.send_calls == []
    assert not pair.is_whole("two")


async def test_code_is_copied_only_where_it_may_run(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES | {"modeling.py": b"raise SystemExit"}, remote_code=True)
    await pair.bring()
    assert pair.content("two") == FILES
    await pair.bring(HubCommit(REPO, COMMIT, allows_remote_code=True))
    assert "modeling.py" in pair.content("two")


async def test_a_full_disk_is_named_before_the_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_commit(pair.disks["one"], FILES)
    monkeypatch.setattr(commit_files, "MARGIN_BYTES", 2**60)
    with pytest.raises(HostError, match="are free at"):
        await pair.bring()
    assert pair.link.send_calls == []


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "../../../../hub/engine-secret", "/etc/hostname", "link.json", "1_Pooling"],
)
async def test_a_machine_sends_only_files_of_a_checked_commit(pair: Pair, name: str) -> None:
    folder = put_commit(pair.disks["one"], FILES)
    (folder / "notes.txt").write_text("not of the commit")
    (folder / "link.json").symlink_to("/etc/hostname")
    call = SendCall(repo=REPO, commit=COMMIT, name=name)
    with pytest.raises(AgentRefusal, match="The machine one sends no"):
        await pair.node("one").final_answer(call, None)


async def test_a_link_out_of_the_cache_is_not_followed(pair: Pair, tmp_path: Path) -> None:
    folder = put_commit(pair.disks["one"], FILES)
    outside = tmp_path / "outside"
    outside.write_bytes(FILES["config.json"])
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)
    call = SendCall(repo=REPO, commit=COMMIT, name="config.json")
    with pytest.raises(AgentRefusal, match="is a link to a file outside"):
        await pair.node("one").final_answer(call, None)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside", "a//b"])
async def test_a_machine_writes_only_below_the_commit(pair: Pair, name: str) -> None:
    put_commit(pair.disks["one"], FILES)
    file = WeightsFile(name=name, size=2, digest="0" * 64)
    commit = {"repo": REPO, "commit": COMMIT}
    with pytest.raises(AgentRefusal, match="a path outside of it"):
        await pair.node("two").final_answer(MissingCall(**commit, files=(file,)), None)
    send = SendCall(**commit, name="config.json")
    with pytest.raises(AgentRefusal, match="a path outside of it"):
        async for _ in pair.node("two").receive(
            ReceiveCall(**commit, file=file), pair.node("one"), send
        ):
            pass


@pytest.mark.parametrize(("owner", "words"), [("", "names no gateway"), ("b", "Another gateway")])
async def test_weights_are_for_the_gateway_of_the_lease_alone(
    pair: Pair, owner: str, words: str
) -> None:
    put_commit(pair.disks["one"], FILES)
    commit = {"repo": REPO, "commit": COMMIT}
    await pair.bring()
    file = WeightsFile(name="config.json", size=2, digest="0" * 64)
    send = SendCall(**commit, name="config.json")
    for call in (WeightsCall(**commit), send, MissingCall(**commit, files=(file,))):
        with pytest.raises(AgentRefusal, match=words):
            await pair.node("one", owner).final_answer(call, None)
    with pytest.raises(FitserveError, match=words):
        async for _ in pair.node("two", owner).receive(
            ReceiveCall(**commit, file=file), pair.node("one", owner), send
        ):
            pass


async def test_the_planner_learns_which_machines_have_weights(pair: Pair) -> None:
    put_commit(pair.disks["one"], FILES)
    weights = {node.name: node.weights for node in (await pair.host.cluster()).nodes}
    assert weights == {"one": (f"{REPO}@{COMMIT}",), "two": ()}
    (pair.disks["one"].snapshot(REPO, COMMIT) / "model.safetensors").unlink()
    assert [node.weights for node in (await pair.host.cluster()).nodes] == [(), ()]


async def test_a_start_names_the_cache_of_its_machine(pair: Pair, tmp_path: Path) -> None:
    folder = put_commit(pair.disks["two"], FILES)
    gateway = disk_of(tmp_path / "gateway")
    host = ClusterHost(pair.link.root / "link.sock", "a")
    argument = f"--model={gateway.snapshot(REPO, COMMIT)}"
    spec = MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",))
    await host.start(spec.evolve(argv=("engine", argument, "--seed=1")))
    started_spec = pair.link.worlds["two"].engines["a1"].spec
    assert started_spec.argv == ("engine", f"--model={folder}", "--seed=1")


async def test_a_start_keeps_the_path_of_a_shared_cache(pair: Pair, tmp_path: Path) -> None:
    shared_disk = disk_of(tmp_path / "shared")
    shared_folder = put_commit(shared_disk, FILES)
    host = ClusterHost(pair.link.root / "link.sock", "a")
    spec = MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",))
    argv = (
        "engine",
        f"--model={shared_folder}",
        f'--speculative-config={{"model":"{shared_folder}","n":1}}',
    )
    await host.start(spec.evolve(argv=argv))
    assert pair.link.worlds["two"].engines["a1"].spec.argv == argv
    folder = put_commit(pair.disks["two"], FILES)
    await host.start(spec.evolve(name="a2", argv=argv))
    assert pair.link.worlds["two"].engines["a2"].spec.argv == tuple(
        argument.replace(str(shared_folder), str(folder)) for argument in argv
    )


async def test_only_a_path_from_its_beginning_is_of_another_machine(pair: Pair) -> None:
    data = Path("/data")
    spec = MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",))
    environment = engine_dir(data, spec.engine)
    argv = (f"{environment}/bin/python", f"/srv{environment}/bin/python", f"{environment}-copy")
    host = ClusterHost(pair.link.root / "link.sock", "a", data=data)
    await host.start(spec.evolve(argv=argv))
    started_spec = pair.link.worlds["two"].engines["a1"].spec
    node_environment = engine_dir(pair.link.root / "two", spec.engine)
    assert started_spec.argv == (f"{node_environment}/bin/python", *argv[1:])


async def test_files_with_equal_bytes_are_copied_once(pair: Pair) -> None:
    files = sharded_model()
    assert len(set(files.values())) == len(files) - 1
    put_commit(pair.disks["one"], files)
    await pair.bring()
    assert pair.content("two") == files
    assert pair.is_whole("two")
    assert len(pair.link.send_calls) == len(files) - 1


async def test_a_gateway_asks_no_hub_for_weights_that_a_machine_has(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = sharded_model()
    put_commit(pair.disks["one"], files)
    cache = tmp_path / "gateway"
    host = NodesHost(ClusterHost(pair.link.root / "link.sock", "a"))
    monkeypatch.setattr(node_service, "probe", lambda _: cpu_machine())
    install(tmp_path / "data", "vllm-cpu-99.0.0")
    for world in pair.link.worlds.values():
        world.installed = None
    with FakeHub({REPO: FakeRepo(files)}) as hub:
        async with running(
            tmp_path,
            lambda _: None,  # type: ignore[arg-type, return-value]
            host=host,
            hf_endpoint=hub.url(),
            models_dir=cache,
            host_kind="cluster",
        ) as gateway:
            for model in ("m1", "m2"):
                await gateway.add(model, Path(REPO))
                await gateway.until(model, "ready")
    downloads = [row.path for row in hub.requests if row.server == "cdn" and row.range is None]
    assert downloads == []
    assert not cache.exists()
    assert pair.content("two") == files
    folders = {
        argument
        for world in pair.link.worlds.values()
        for started_engine in world.engines.values()
        for argument in started_engine.spec.argv
        if argument.startswith("--model=")
    }
    assert folders == {f"--model={disk.snapshot(REPO, COMMIT)}" for disk in pair.disks.values()}


def cpu_machine() -> Hardware:
    """This machine without GPUs."""
    return probe().evolve(gpus=(), links=())
