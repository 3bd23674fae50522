"""The shipped machines: their fields, and a plan of a small model on each."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import pytest

from gateway.domain import Decision, Hardware
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.fake_nvml import MIB
from tests.support.makers import spec, wish
from tests.support.paths import ROOT
from tests.support.planning import decide
from tests.support.versions import NEWEST_VLLM

FOLDER = shipped_profiles() / "hardware"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
WITH_GPUS = [name for name in NAMES if name != "cpu"]
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}

# name: (cards, memory of each in MiB as nvidia-smi prints it, capability)
EXPECTED = {
    "3090": (1, 24576, "8.6"),
    "2x3090": (2, 24576, "8.6"),
    "4x3090": (4, 24576, "8.6"),
    "4090": (1, 24564, "8.9"),
    "2x4090": (2, 24564, "8.9"),
    "5090": (1, 32607, "12.0"),
    "8xa100-80g": (8, 81920, "8.0"),
    "2xa100-40g": (2, 40960, "8.0"),
    "a10g": (1, 23028, "8.6"),
    "4xl4": (4, 23034, "8.9"),
    "l40s": (1, 46068, "8.9"),
    "t4": (1, 15360, "7.5"),
    "v100": (1, 16384, "7.0"),
    "8xh100": (8, 81559, "9.0"),
    "h200": (1, 143771, "9.0"),
    "8xb200": (8, 183359, "10.0"),
    "rtx-pro-6000": (1, 97887, "12.0"),
    "3060": (1, 12288, "8.6"),
    "3x3090": (3, 24576, "8.6"),
    "8x3090": (8, 24576, "8.6"),
    "4060ti-16g": (1, 16380, "8.9"),
    "4070ti-super": (1, 16376, "8.9"),
    "4080": (1, 16376, "8.9"),
    "4x4090": (4, 24564, "8.9"),
    "5060ti-16g": (1, 16311, "12.0"),
    "5070ti": (1, 16303, "12.0"),
    "5080": (1, 16303, "12.0"),
    "2x5090": (2, 32607, "12.0"),
    "a6000": (1, 49140, "8.6"),
    "rtx-6000-ada": (1, 49140, "8.9"),
    "a40": (1, 46068, "8.6"),
    "a10": (1, 23028, "8.6"),
    "h20": (1, 97871, "9.0"),
    "8xh20": (8, 97871, "9.0"),
    "2xh100": (2, 81559, "9.0"),
    "4xh100": (4, 81559, "9.0"),
    "8xh200": (8, 143771, "9.0"),
    "2xrtx-pro-6000": (2, 97887, "12.0"),
    "4xrtx-pro-6000": (4, 97887, "12.0"),
}
# The same of machines whose cards differ.
MIXED = {
    "3090+4090": [
        ("NVIDIA GeForce RTX 3090", 24576, "8.6"),
        ("NVIDIA GeForce RTX 4090", 24564, "8.9"),
    ],
    "5090+3090": [
        ("NVIDIA GeForce RTX 5090", 32607, "12.0"),
        ("NVIDIA GeForce RTX 3090", 24576, "8.6"),
    ],
}


def machine(name: str) -> Hardware:
    return Profiles().hardware(name)


def make_decision(name: str, version: str = NEWEST_VLLM) -> Decision:
    """Llama 3.2 1B in its config's bfloat16."""
    return decide(spec(**SMALL), machine(name), [Profiles().engine(f"vllm=={version}")], wish())


# --- snapshots ---


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_is_written_as_the_probe_writes_it(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text()
    hardware = Hardware.model_validate_json(text)
    assert hardware.model_dump_json(indent=2) + "\n" == text
    assert hardware.notes[0].startswith("Snapshot of a typical machine")


def test_every_machine_but_the_unified_and_the_cpu_only_one_has_an_expected_memory() -> None:
    assert set(EXPECTED) | set(MIXED) | {"gb10", "cpu"} == set(NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_cards_are_as_nvidia_smi_prints_them(name: str) -> None:
    count, mebibytes, capability = EXPECTED[name]
    gpus = machine(name).gpus
    assert [(gpu.index, gpu.total_bytes, gpu.capability) for gpu in gpus] == [
        (index, mebibytes * MIB, capability) for index in range(count)
    ]
    assert {gpu.memory_kind for gpu in gpus} == {"dedicated"}


@pytest.mark.parametrize("name", MIXED)
def test_unlike_cards_are_as_nvidia_smi_prints_them(name: str) -> None:
    gpus = machine(name).gpus
    assert [(gpu.name, (gpu.total_bytes or 0) // MIB, gpu.capability) for gpu in gpus] == MIXED[
        name
    ]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/snapshots as a module."""
    loader = SourceFileLoader("snapshots", str(ROOT / "scripts/snapshots"))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    loader.exec_module(module)
    return module


def test_the_script_writes_the_kept_snapshots(script: ModuleType) -> None:
    """scripts/snapshots was run since profiles/cards.yaml and machines.yaml were changed."""
    texts = script.snapshots()
    assert len(texts) > 20
    assert {name: (FOLDER / f"{name}.json").read_text() for name in texts} == texts


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NVIDIA GeForce RTX 4080]]", "NVIDIA GeForce RTX 4O80]]", "NVIDIA GeForce RTX 4080"),
        ("host: threadripper,", "host: treadripper,", "Similar names: threadripper"),
        ("links: geforce-3090", "links: geforce-309", "Similar names: geforce-3090"),
        ("cores: 64, ", "", "hosts.threadripper.cores: Field required"),
    ],
)
def test_the_script_names_the_mistake(script: ModuleType, old: str, new: str, message: str) -> None:
    text = (FOLDER / "machines.yaml").read_text()
    assert old in text
    with pytest.raises(SystemExit) as refusal:
        script.snapshots(script.read_machines(text.replace(old, new, 1)))
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", WITH_GPUS)
def test_an_idle_driver_takes_some_memory_and_less_than_a_tenth(name: str) -> None:
    for gpu in machine(name).gpus:
        assert gpu.total_bytes
        assert gpu.free_bytes
        assert 0.9 * gpu.total_bytes < gpu.free_bytes < gpu.total_bytes


@pytest.mark.parametrize("name", WITH_GPUS)
def test_every_pair_of_cards_has_one_link_and_no_uuid_comes_twice(name: str) -> None:
    hardware = machine(name)
    count = len(hardware.gpus)
    pairs = [(link.a, link.b) for link in hardware.links]
    assert pairs == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert len({gpu.uuid for gpu in hardware.gpus}) == count


def test_no_two_machines_share_a_card() -> None:
    uuids = [gpu.uuid for name in WITH_GPUS for gpu in machine(name).gpus]
    assert len(uuids) == len(set(uuids))


@pytest.mark.parametrize(
    ("name", "nvlinks"),
    [
        ("2xa100-40g", 12),
        ("8xa100-80g", 12),
        ("8xh100", 18),
        ("8xb200", 18),
        ("2xh100", 18),
        ("4xh100", 18),
        ("8xh200", 18),
        ("8xh20", 18),
    ],
)
def test_boards_with_switches_join_every_pair(name: str, nvlinks: int) -> None:
    assert {(link.nvlinks, link.p2p) for link in machine(name).links} == {(nvlinks, True)}


@pytest.mark.parametrize(
    "name", [name for name in WITH_GPUS if "GeForce" in machine(name).gpus[0].name]
)
def test_geforce_cards_reach_each_other_only_through_the_host(name: str) -> None:
    assert {(link.nvlinks or 0, link.p2p) for link in machine(name).links} <= {(0, False)}


def test_gb10_shares_the_hosts_memory() -> None:
    hardware = machine("gb10")
    (gpu,) = hardware.gpus
    assert (hardware.arch, gpu.capability, gpu.memory_kind) == ("aarch64", "12.1", "unified")
    assert (gpu.total_bytes, gpu.free_bytes) == (
        hardware.ram_total_bytes,
        hardware.ram_available_bytes,
    )


# --- plans on them ---


@pytest.mark.parametrize("name", [name for name in WITH_GPUS if name != "v100"])
def test_a_small_model_is_planned_on_every_machine(name: str) -> None:
    best = make_decision(name).plans[0]
    (gpu,) = [gpu for gpu in machine(name).gpus if gpu.uuid in best.gpus]
    assert best.verdict == "ok"
    assert best.memory.gpu_bytes == gpu.total_bytes
    assert best.memory.budget_bytes <= (gpu.free_bytes or 0)


def test_turing_computes_bfloat16_weights_in_float16() -> None:
    dtype = make_decision("t4").plans[0].dtype
    assert dtype.value == "float16"
    assert "7.5" in dtype.reason


def test_an_engine_without_kernels_for_volta_is_refused_with_the_reason() -> None:
    decision = make_decision("v100")
    assert not decision.plans
    assert {rejection.verdict for rejection in decision.rejected} == {"no_kernel"}
    assert decision.rejected[0].reasons == (
        (
            f"vllm=={NEWEST_VLLM} is compiled for compute capability 7.5, 8.0, 8.6, 8.9, 9.0, 10.0,"
            " 12.0;"
            " Tesla V100-SXM2-16GB has 7.0"
        ),
    )
