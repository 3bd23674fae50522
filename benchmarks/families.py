"""How many published families plan: forecast from config.json alone, then the engine's own answer,
on 1, 2 and 4 GPUs.

    python benchmarks/families.py [--only llama4,whisper] [--engine vllm==0.33.0] [--json FILE]

The configs are those of published models that the package aiconfigurator-core carries, one of each
family, and the defaults of other families in transformers. The engine is asked as `--check` asks
it, from its wheel, with stated GPUs of 4 TiB, so that what does not fit says nothing here; several
families in one process. Prints one row a family: what the forecast was and what came of it for 1, 2
and 4 GPUs, and the forecast's weights and KV cache beside the engine's on one GPU;
benchmarks/family_bytes.py compares the weights with checkpoints. The last lines count. Downloads
what scripts/engine-answers does, into .cache/engines, and the package of configs, by hash.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.domain import Decision, Engine, EngineAnswer, Hardware, ModelSpec, Plan, Question, Wish  # noqa: E402
from gateway.engines.inquiry.document import StatedGpus, document, read_answers  # noqa: E402
from gateway.errors import FitserveError  # noqa: E402
from gateway.models.spec import read_model  # noqa: E402
from gateway.planner.asked import open_questions  # noqa: E402
from gateway.planner.service.checking import model_files  # noqa: E402
from gateway.planner.service.offline import decide_with  # noqa: E402
from gateway.profiles.profiles import Profiles  # noqa: E402
from tests.support.asked_python import asked_in  # noqa: E402

KEPT = ROOT / ".cache/engines"
CONFIGS = (
    "aiconfigurator-core==0.12.0"
    " --hash=sha256:aadc4aad0a00bf8a61c477c62bef43de479849c3aa0b1c3078068e08309eccc4"
)
# Families that no config of the package has: the defaults of transformers stand for them.
DEFAULTS = """apertus arcee aya_vision bamba bloom chameleon cohere cohere2 dbrx dots1 ernie4_5 ernie4_5_moe exaone4 falcon
falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3 gemma3n glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj granite
granitemoe granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe idefics3 internvl jais2 jamba lfm2 lfm2_moe lfm2_vl llava
llava_next llava_onevision longcat_flash mamba mamba2 minimax mistral3 mllama mpt nemotron olmo olmo2 olmo3 olmoe opt ovis2 paligemma
persimmon phi phi3 phimoe pixtral qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3_next qwen3_omni_moe seed_oss smollm3 smolvlm
solar_open stablelm starcoder2 step3p5 whisper youtu zamba2""".split()  # noqa: SIM905
# What published configs of a family have and transformers' defaults have not, or otherwise.
PUBLISHED: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
    },
    "idefics3": {"text_config": {"vocab_size": 128259}},
    "smolvlm": {"text_config": {"vocab_size": 49280, "pad_token_id": 2}},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "lfm2": {"block_dim": 2560},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "lfm2_moe": {"block_dim": 2048, "layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_vl": {"text_config": {"block_dim": 2560}},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {
        "thinker_config": {
            "vision_config": {"image_size": 768, "apply_vit_abs_pos_embed": True},
            "text_config": {"tie_word_embeddings": False},
        }
    },
    "step3p5": {
        "architectures": ["Step3p5ForCausalLM"],
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "num_attention_groups": 8,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
    },
}
# Families that are others put together: which one, and the parts of its config that are a family's
# defaults.
TOGETHER = {
    "pixtral": ("llava", {"vision_config": "pixtral", "text_config": "mistral"}),
    "internvl_chat": ("internvl", {"vision_config": "internvl_vision", "llm_config": "qwen2"}),
}
INTERNVL_CHAT = {
    "downsample_ratio": 0.5,
    "select_layer": -1,
    "force_image_size": 448,
    "use_thumbnail": True,
    "ps_version": "v2",
}
INTERNVL_CHAT |= {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12}
TENSOR_PARALLEL = (1, 2, 4)
# Families whose questions one process answers: its import is paid once, and what it loses when it
# dies is bounded.
AT_ONCE = 6
LIMIT_S = 540
TIB = 1 << 40


class Family(NamedTuple):
    name: str
    config: dict[str, Any]


class Row(NamedTuple):
    """weights: bytes on one GPU by the forecast, and by the engine; kv: bytes of one long
    request."""

    name: str
    forecast: tuple[str, ...]
    came: tuple[str, ...]
    weights: tuple[int | None, int | None]
    kv: tuple[int | None, int | None]
    words: str


def answers_tool() -> Any:
    loader = SourceFileLoader("engine_answers", str(ROOT / "scripts/engine-answers"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def published(tool: Any) -> list[Family]:
    """One model of each family: the first by name that is not a quantized copy."""
    folder = KEPT / "aiconfigurator-core-0.12.0"
    if not folder.is_dir():
        requirement = KEPT / "configs.txt"
        requirement.write_text(CONFIGS + "\n")
        tool.pip(sys.executable, "download", "--dest", str(KEPT), "--requirement", str(requirement))
        with zipfile.ZipFile(next(KEPT.glob("aiconfigurator_core-*.whl"))) as wheel:
            wheel.extractall(
                folder, [name for name in wheel.namelist() if name.endswith("_config.json")]
            )
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(
        folder.rglob("*_config.json"), key=lambda path: ("nvidia--" in path.name, path.name)
    ):
        config = json.loads(path.read_text())
        if config.get("model_type"):
            found.setdefault(config["model_type"], config)
    return [Family(name, config) for name, config in found.items()]


def counted(python: str, asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [python, str(ROOT / "benchmarks/count_parameters.py")],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        cwd="/",
    )
    return {said["name"]: said for said in map(json.loads, done.stdout.splitlines())}


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these changes, also of its parts."""
    parts = {
        name: merged(config[name], value)
        for name, value in changes.items()
        if isinstance(value, Mapping) and name in config
    }
    return {**config, **changes, **parts}


def defaults(python: str) -> list[Family]:
    """The families of DEFAULTS, and those of TOGETHER."""
    parts = {part for _, of in TOGETHER.values() for part in of.values()}
    said = counted(python, {"defaults": sorted({*DEFAULTS, *parts})})
    configs = {
        name: merged(one["config"], PUBLISHED.get(name, {}))
        for name, one in said.items()
        if "config" in one
    }
    for name, (like, of) in TOGETHER.items():
        whole = {field: value for field, value in configs[like].items() if field != "text_config"}
        configs[name] = {**whole, **{field: configs[part] for field, part in of.items()}}
    configs["internvl_chat"] |= {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
    } | INTERNVL_CHAT
    for name in {*DEFAULTS} - configs.keys():
        print(f"# {name}: {said[name].get('refused')}", file=sys.stderr)
    found = [
        Family(name, configs[name]) for name in sorted({*DEFAULTS, *TOGETHER} & configs.keys())
    ]
    return [family for family in found if family.config["architectures"][0]]


def all_of(tool: Any, python: str, only: str = "") -> list[Family]:
    """Published models, and the defaults of families that none of them is of; those of `only`, with
    commas between them."""
    families = published(tool)
    have = {family.name for family in families}
    families += [family for family in defaults(python) if family.name not in have]
    wanted = set(filter(None, only.split(",")))
    return [family for family in families if not wanted or family.name in wanted]


def machine(profiles: Profiles) -> Hardware:
    found = profiles.hardware("8xh100")
    gpus = tuple(gpu.evolve(total_bytes=4 * TIB, free_bytes=4 * TIB) for gpu in found.gpus)
    return found.evolve(gpus=gpus, ram_total_bytes=8 * TIB)


class Planned(NamedTuple):
    spec: ModelSpec
    decisions: list[Decision]  # one for each of TENSOR_PARALLEL


class Planner:
    def __init__(self, engine: str) -> None:
        self.profiles = Profiles()
        self.machine = machine(self.profiles)
        self.engines: list[Engine] = self.profiles.engines_for(self.machine, (engine,))

    def plan(self, family: Family, answers: Mapping[Question, EngineAnswer]) -> Planned:
        spec = read_model(
            family.name,
            None,
            family.config,
            None,
            None,
            ("auto_map in config.json",) if family.config.get("auto_map") else (),
            None,
        )
        wishes = [
            Wish(name="plan", source=family.name, tensor_parallel=tp, speculative="off")
            for tp in TENSOR_PARALLEL
        ]
        return Planned(
            spec,
            [
                decide_with(
                    self.profiles, self.engines, spec, None, self.machine, wish, answers=answers
                )
                for wish in wishes
            ],
        )


def ask(
    python: str, sources: str, gpus: StatedGpus, batch: Sequence[tuple[Family, list[Question]]]
) -> list[dict[Question, EngineAnswer]]:
    """What the engine said of each family's questions: what it did not come to is missing."""
    whole: dict[str, Any] = {"sources": sources, "models": []}
    for family, questions in batch:
        one = json.loads(
            document("vllm", gpus, model=model_files(family.config, None), questions=questions)
        )
        whole = {**one, **whole, "models": whole["models"] + one["models"]}
    env = {"PATH": os.environ["PATH"], "HOME": tempfile.gettempdir(), "PYTHONHASHSEED": "0"}
    lines, ended = asked_in(python, json.dumps(whole).encode(), env, LIMIT_S)
    if ended:
        print(f"# {', '.join(family.name for family, _ in batch)}: {ended}", file=sys.stderr)
    said = [(json.loads(line).get("model"), line) for line in lines if line.startswith(b"{")]
    return [
        read_answers([line for model, line in said if model == index], questions, "the engine")
        for index, (_, questions) in enumerate(batch)
    ]


def best(decision: Decision) -> Plan | None:
    return decision.plans[0] if decision.plans else None


def outcome(decision: Decision) -> str:
    plan = best(decision)
    if plan is not None:
        return str(plan.grade)
    return decision.rejected[0].verdict if decision.rejected else "nothing"


def long_request(plan: Plan | None) -> int | None:
    return plan.memory.kv_bytes_per_token if plan else None


def check(
    planner: Planner, families: Sequence[Family], python: str, sources: str
) -> tuple[list[Row], float]:
    gpus = StatedGpus(
        str(planner.machine.gpus[0].capability),
        4 * TIB,
        len(planner.machine.gpus),
        planner.machine.gpus[0].name,
    )
    before: dict[str, Planned] = {}
    rows: dict[str, Row] = {}
    for family in families:
        try:
            before[family.name] = planner.plan(family, {})
        except FitserveError as error:
            rows[family.name] = Row(
                family.name, ("refused",) * 3, ("",) * 3, (None, None), (None, None), error.message
            )
    began = time.monotonic()
    answers: dict[str, dict[Question, EngineAnswer]] = {name: {} for name in before}
    after = dict(before)
    waiting = [family for family in families if family.name in before]
    for _ in range(3):  # what an answer changes may be asked about in turn
        asked = []
        for family in waiting:
            found = [open_questions(decision) for decision in after[family.name].decisions]
            questions = list(dict.fromkeys(one[0].questions[0] for one in found if one))
            if questions := [
                question for question in questions if question not in answers[family.name]
            ]:
                asked.append((family, questions))
        for start in range(0, len(asked), AT_ONCE):
            batch = asked[start : start + AT_ONCE]
            for (family, _), fresh in zip(batch, ask(python, sources, gpus, batch), strict=True):
                answers[family.name] |= fresh
                after[family.name] = planner.plan(family, answers[family.name])
                print(
                    f"# {family.name}: {[outcome(one) for one in after[family.name].decisions]}",
                    file=sys.stderr,
                )
        waiting = [family for family, _ in asked]
    took = time.monotonic() - began
    for name, planned in after.items():
        first, last = best(before[name].decisions[0]), best(planned.decisions[0])
        checked = last is not None and last.grade == "checked"
        words = "; ".join(
            dict.fromkeys(
                one.reasons[0]
                for decision in planned.decisions
                if not decision.plans
                for one in decision.rejected[:1]
            )
        )
        rows[name] = Row(
            name,
            tuple(outcome(one) for one in before[name].decisions),
            tuple(outcome(one) for one in planned.decisions),
            (
                first.memory.weights_bytes if first else None,
                last.memory.weights_bytes if last and checked else None,
            ),
            (long_request(first), long_request(last) if checked else None),
            words,
        )
    return [rows[family.name] for family in families], took


def shown(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def apart(one: int | None, other: int | None) -> str:
    if not one or not other:
        return "-"
    return "equal" if one == other else f"{100 * (one - other) / other:+.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm==0.33.0")
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    tool = answers_tool()
    kept = tool.Kept(KEPT)
    kind, _, version = options.engine.partition("==")
    python, sources = kept.environment(), str(kept.sources(kind, version))
    families = all_of(tool, python, options.only)
    rows, took = check(Planner(options.engine), families, python, sources)
    print(
        "family | forecast TP 1 2 4 | with the engine | weights GB forecast/engine |"
        " forecast-engine | KV"
    )
    for row in rows:
        forecast, engine = row.weights
        print(
            f"{row.name} | {' '.join(row.forecast)} | {' '.join(row.came)} | {shown(forecast)}"
            f" {shown(engine)} | {apart(forecast, engine)} | {apart(*row.kv)} | {row.words[:300]}"
        )
    checked = [row for row in rows if row.came and all(one == "checked" for one in row.came)]
    some = [row for row in rows if "checked" in row.came and row not in checked]
    exact = [row for row in rows if row.weights[0] and row.weights[0] == row.weights[1]]
    print(
        f"{len(rows)} families: {len(checked)} checked on 1, 2 and 4 GPUs, {len(some)} on some;"
        f" {took:.0f} s of asking, {took / max(1, len(rows)):.1f} s a family"
    )
    print(
        f"forecast planned {sum(row.forecast[0] in ('predicted', 'guess') for row in rows)}; its"
        f" weights are the engine's own bytes in {len(exact)}"
    )
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
