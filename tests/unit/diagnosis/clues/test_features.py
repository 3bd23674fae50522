"""The feature whose code failed, and the switch that its engine's version takes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.clues.features import FailureCode, Features, VersionSettings
from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.signature import Feature, FeatureSwitch
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles
from tests.support.engine_logs import log_of_row

SIGNATURES = Profiles().signatures
CURES = SIGNATURES.cures
ROWS = CURES.rows.features
BOOL = {"type": "bool"}


def options(**values: str) -> StartOptions:
    read = StartOptions()
    read.read(f"(APIServer pid=1) INFO 08-12 [utils.py:1] non-default args: {values!r}")
    return read


def locate(
    *frames: str,
    rows: tuple[Feature, ...] = (),
    flags: dict[str, dict[str, Any]] | None = None,
    variables: tuple[str, ...] = (),
    start: StartOptions | None = None,
    is_fault: bool = False,
) -> dict[str, Any]:
    settings = VersionSettings("0.33.0", flags or {}, frozenset(variables))
    code = FailureCode("vllm", frames, is_fault, settings, start or options(model="/m/frob"))
    return Features(rows).locate(code)


def row(name: str, frames: str, *switches: str, **fields: Any) -> Feature:
    return Feature(name=name, frames=frames, switches=switches, source="x", **fields)


def failure_of(engine: str, *frames: str, args: str = "'model': '/m/frob'") -> Failure:
    line = f"(APIServer pid=1) INFO 08-12 08:00:00 [utils.py:233] non-default args: {{{args}}}"
    if engine.startswith("sglang"):
        line = "[2026-08-12 08:00:00] server_args=ServerArgs(model_path='/m/frob', tp_size=1)"
    log = log_of_row(
        {
            "engine": engine,
            "phase": "graphs",
            "before": [line],
            "frames": frames,
            "raises": "RuntimeError: frob is lost",
        }
    )
    failure, _ = diagnose([log], SIGNATURES, engine)
    return failure


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.5.13", "--disable-piecewise-cuda-graph"),
        ("0.5.21", "--disable-prefill-cuda-graph"),
    ],
)
def test_the_switch_is_that_of_the_engines_version(version: str, flag: str) -> None:
    frame = "sglang/srt/model_executor/piecewise_cuda_graph_runner.py:capture"
    steps = failure_of(f"sglang=={version}", frame).steps
    assert flag in steps[0]
    assert f"Use another engine version than sglang {version}" in steps[1]


@pytest.mark.parametrize(
    ("args", "first_words"),
    [
        ("'kv_offloading_size': 8.0", "Start without the cache in RAM (omit --kv-offloading-size)"),
        ("'model': '/m/frob'", ""),
    ],
)
def test_a_part_is_omitted_only_from_a_start_that_asked_for_it(args: str, first_words: str) -> None:
    frames = (
        "vllm/v1/worker/gpu_model_runner.py:execute_model",
        "vllm/v1/kv_offload/cpu_gpu.py:transfer_frob",
    )
    steps = failure_of("vllm==0.33.0", *frames, args=args).steps
    if first_words:
        assert steps[0].startswith(first_words)
    else:
        assert not any("--kv-offloading-size" in step for step in steps)


def test_a_start_that_tells_no_options_may_have_given_the_flag() -> None:
    offload = row("frob", "/frob/", "omit --frob-size")
    start = StartOptions()
    values = locate("vllm/frob/x.py:run", rows=(offload,), flags={"frob-size": {}}, start=start)
    assert values == {"feature": "frob", "feature_switch": "omit --frob-size"}


def test_no_switch_is_named_that_the_version_has_not() -> None:
    switches = ("--no-enable-frob", "VLLM_USE_FROB=0", "--frob-backend slow")
    frob = row("frob", "frob", *switches)
    frame = "vllm/frob.py:run"
    assert locate(frame, rows=(frob,)) == {}
    choices = {"frob-backend": {"choices": ["fast"]}}
    assert locate(frame, rows=(frob,), flags=choices) == {}
    several: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"frob-backend": {"choices": ["fast", "slow"]}}, (), "--frob-backend slow"),
        ({}, ("VLLM_USE_FROB",), "VLLM_USE_FROB=0"),
        ({"enable-frob": BOOL}, ("VLLM_USE_FROB",), "--no-enable-frob"),
        # A flag with values has no form that begins with no.
        ({"enable-frob": BOOL | {"choices": ["a"]}}, ("VLLM_USE_FROB",), "VLLM_USE_FROB=0"),
    ]
    for flags, variables, setting in several:
        values = locate(frame, rows=(frob,), flags=flags, variables=variables)
        assert values.get("feature_switch") == setting


def test_a_key_of_a_flag_has_a_first_version() -> None:
    switch = FeatureSwitch(setting="--frob-config.fuse=false", first_version="0.26.0")
    for version, is_taken in (("0.25.1", False), ("0.26.0", True), ("0.33.0", True)):
        settings = VersionSettings(version, {"frob-config": {}}, frozenset())
        assert settings.has_effective_switch(switch, StartOptions()) is is_taken


def test_a_switch_that_the_start_has_is_not_named_again() -> None:
    frob = row("frob", "frob", "--disable-frob", "VLLM_USE_FROB=0")
    settings: dict[str, Any] = {"flags": {"disable-frob": BOOL}, "variables": ("VLLM_USE_FROB",)}
    start = StartOptions()
    start.read("non-default args: {'model': '/m/frob', 'disable_frob': True}")
    values = locate("vllm/frob.py:run", rows=(frob,), start=start, **settings)
    assert values["feature_switch"] == "VLLM_USE_FROB=0"
    start.read("export VLLM_USE_FROB=0")
    assert locate("vllm/frob.py:run", rows=(frob,), start=start, **settings) == {}


@pytest.mark.parametrize(
    ("frame", "setting"),
    [
        ("vllm/v1/worker/two_frob_overlap.py:run", "--disable-two-frob-overlap"),
        ("vllm/v1/worker/x.py:_run_two_frob_overlap", "--disable-two-frob-overlap"),
        ("other/two_frob_overlap.py:run", None),
        # It is off unless a start asks for it.
        ("vllm/v1/worker/grob_cache.py:run", None),
        ("vllm/v1/worker/frob_tuning.py:run", "--no-enable-frob-tuning"),
        # Graphs hold every kernel.
        ("vllm/v1/worker/cuda_graph.py:run", None),
    ],
)
def test_a_part_with_the_name_of_its_flag_needs_no_row(frame: str, setting: str | None) -> None:
    flags = {
        "disable-two-frob-overlap": BOOL | {"default": False},
        "enable-grob-cache": BOOL | {"default": False},
        "enable-frob-tuning": BOOL | {"default": True},
        "disable-cuda-graph": BOOL | {"default": False},
    }
    assert locate(frame, flags=flags).get("feature_switch") == setting


def test_a_name_of_one_word_is_a_part_that_the_start_set() -> None:
    flags = {"enable-frob": BOOL | {"default": False}}
    frame = "vllm/frob/layers.py:run"
    assert locate(frame, flags=flags) == {}
    start = StartOptions()
    start.read("non-default args: {'model': '/m/x', 'enable_frob': True}")
    assert locate(frame, flags=flags, start=start)["feature_switch"] == "omit --enable-frob"
    assert locate("vllm/frobs/x.py:run", flags=flags, start=start) == {}


@pytest.mark.parametrize(
    ("frame", "start_values", "switch"),
    [
        ("vllm/frobquant_attn.py:run", {"frob_cache_dtype": "frobquant_4bit"}, "frob-cache-dtype"),
        ("vllm/frobquant_attn.py:run", {"frob_cache_dtype": "fp8"}, None),
        # It is the version's own choice.
        ("vllm/frobquant_attn.py:run", {"frob_backend": "frobquant"}, None),
        # Kernels of this library are of many parts.
        ("vllm/flashinfer_frob.py:run", {"frob_cache_dtype": "flashinfer"}, None),
        # A model of few bits is no other one without the option.
        ("vllm/frobquant_attn.py:run", {"quantization": "frobquant"}, None),
    ],
)
def test_a_part_with_the_name_of_a_value_is_of_the_option(
    frame: str, start_values: dict[str, str], switch: str | None
) -> None:
    flags: dict[str, dict[str, Any]] = {
        "frob-cache-dtype": {},
        "frob-backend": {"default": "frobquant"},
        "quantization": {},
    }
    values = locate(frame, flags=flags, start=options(**start_values))
    assert values.get("feature_switch") == (f"omit --{switch}" if switch else None)


def test_the_part_that_the_start_asked_for_is_meant_before_others() -> None:
    flags: dict[str, dict[str, Any]] = {
        "disable-radix-frob": BOOL | {"default": False},
        "enable-frob": BOOL,
    }
    frame = "vllm/cache/frob/radix_frob.py:run"
    start = StartOptions()
    start.read("non-default args: {'model': '/m/x', 'enable_frob': True}")
    assert locate(frame, flags=flags)["feature_switch"] == "--disable-radix-frob"
    assert locate(frame, flags=flags, start=start)["feature_switch"] == "omit --enable-frob"


def test_the_innermost_part_is_meant_and_one_beside_the_model_before_it() -> None:
    kernel = row("kernel", "kernel", "--kernel slow")
    drafter = row("drafter", "/spec/", "--drafter off")
    flags: dict[str, dict[str, Any]] = {"kernel": {}, "drafter": {}}
    frames = ("vllm/spec/draft.py:run", "vllm/model.py:run", "vllm/kernel.py:run")
    assert locate(*frames, rows=(drafter, kernel), flags=flags)["feature"] == "kernel"
    standalone = drafter.evolve(is_standalone=True)
    assert locate(*frames, rows=(kernel, standalone), flags=flags)["feature"] == "drafter"


def test_a_part_ends_at_its_reach_without_frames_of_every_call() -> None:
    near = row("frob", "frob", "--frob slow", reach=1)
    way = ("torch/nn/modules/module.py:_call_impl", "contextlib.py:inner")
    flags: dict[str, dict[str, Any]] = {"frob": {}}
    assert locate("vllm/frob.py:run", *way, "vllm/x.py:f", rows=(near,), flags=flags)
    assert not locate("vllm/frob.py:run", "vllm/x.py:f", "vllm/x.py:g", rows=(near,), flags=flags)


def test_code_of_every_start_needs_a_fault_or_an_option() -> None:
    flags: dict[str, dict[str, Any]] = {"frob": {}}
    fault = (row("frob", "frob", "--frob slow", faults=True),)
    assert not locate("vllm/frob.py:run", rows=fault, flags=flags)
    assert locate("vllm/frob.py:run", rows=fault, flags=flags, is_fault=True)
    of_option = (row("frob", "frob", "--frob slow", options=("frob-size",)),)
    assert not locate("vllm/frob.py:run", rows=of_option, flags=flags)
    assert locate("vllm/frob.py:run", rows=of_option, flags=flags, start=options(frob_size="8"))


def test_a_flag_that_fitserve_gives_itself_has_another_way_through_it() -> None:
    frob = row("frob", "frob", "--frob-config.fuse=false", "--enforce-frob")
    flags: dict[str, dict[str, Any]] = {"frob-config": {"ours": True}, "enforce-frob": BOOL}
    assert locate("vllm/frob.py:run", rows=(frob,), flags=flags)["feature_switch"] == (
        "--frob-config.fuse=false; through fitserve --enforce-frob"
    )
    del flags["enforce-frob"]
    values = locate("vllm/frob.py:run", rows=(frob,), flags=flags)
    assert values["feature_switch"] == "--frob-config.fuse=false"


@pytest.mark.parametrize("feature", ROWS, ids=lambda feature: feature.name)
def test_some_described_version_takes_each_switch_of_a_row(feature: Feature) -> None:
    engines = feature.engines or ("vllm", "sglang")
    versions = [
        CURES.version_settings(engine, version)
        for engine in engines
        for version in CURES.rows.versions[engine]
    ]
    for switch in feature.switches:
        assert any(
            settings.has_effective_switch(switch, StartOptions())
            or settings.may_omit(switch, StartOptions())
            for settings in versions
            if settings
        ), switch.setting


def test_a_version_that_is_not_described_has_the_settings_of_its_neighbour() -> None:
    neighbours = {"0.17.0": "0.18.0", "0.19.5": "0.19.1", "0.99.0": "0.33.0", "": "0.33.0"}
    for version, described in neighbours.items():
        settings = CURES.version_settings("vllm", version)
        assert settings is not None
        assert settings.version == described
    assert CURES.version_settings("frob", "1.0") is None
    assert CURES.version_settings(None, "1.0") is None


def test_flags_of_other_versions_are_foreign_and_none_before_all_described_ones() -> None:
    assert "disable-piecewise-cuda-graph" in CURES.foreign_flags("sglang", "0.5.21")
    assert "disable-prefill-cuda-graph" in CURES.foreign_flags("sglang", "0.5.13")
    assert "disable-piecewise-cuda-graph" not in CURES.foreign_flags("sglang", "0.5.13")
    for version in ("0.4.0", ""):
        assert CURES.foreign_flags("sglang", version) == frozenset()
