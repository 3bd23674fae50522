"""Whether an engine holds as many bytes of a published family as its checkpoint has, and why not,
on 1, 2 and 4 GPUs.

    python benchmarks/family_bytes.py [--only llama4,whisper] [--json FILE]

The families are those of benchmarks/families.py. Three sides, each apart from the others: the
parameters of vLLM 0.33.0's own model, by name (engine_parameters.py); the tensors that
transformers' own class would save, under the names of published checkpoints, packed as the config's
quantization defines it (count_parameters.py, checkpoint.py); and the forecast from config.json, and
from a folder with these tensors' header in a file of their length. `equal` is: the checkpoint's
bytes, and those of differences that follow from names and shapes (checkpoint.reasons), are together
the engine's. On 2 and 4 GPUs each tensor of an unquantized checkpoint is cut as its name says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import families  # noqa: E402
from families import TENSOR_PARALLEL, TIB, Family  # noqa: E402

from gateway.domain import ModelSpec, Question  # noqa: E402
from gateway.engines.common.layers.build import build  # noqa: E402
from gateway.engines.common.layers.weights import weights_bytes  # noqa: E402
from gateway.engines.inquiry.document import StatedGpus, document  # noqa: E402
from gateway.errors import FitserveError  # noqa: E402
from gateway.models.catalog.catalog import load  # noqa: E402
from gateway.models.catalog.hub import Hub  # noqa: E402
from gateway.models.rank import Rank  # noqa: E402
from gateway.models.spec import Tensor, read_model  # noqa: E402
from gateway.planner.asked import open_questions  # noqa: E402
from gateway.planner.service.checking import model_files  # noqa: E402
from tests.conformance.layer_cases import QUANTS  # noqa: E402

VERSION = "0.33.0"
# Models of which the tests' blocks of quantization make more formats than were published: each is
# one more row.
COPIES = {
    "Qwen--Qwen3-0.6B": (
        "gptq",
        "awq",
        "w4a16",
        "int8",
        "fp8-dynamic",
        "fp8-block",
        "nvfp4",
        "modelopt-nvfp4",
    ),
    "Qwen--Qwen3-30B-A3B": ("awq", "w4a16", "fp8-block", "modelopt-nvfp4"),
}
AT_ONCE = 12
_LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert")


class Row(NamedTuple):
    """engine: bytes on 1, 2 and 4 GPUs; scales: of which attention's. left: what no reason tells of
        the difference on one GPU. ranks, config,
    headers: bytes that the names of tensors, the forecast from config.json and that from headers
        tell for each.
    """

    name: str
    engine: tuple[int | None, ...]
    scales: tuple[int, ...] = (0,) * 3
    stored: int | None = None
    why: Mapping[str, int] = {}
    left: int | None = None
    ranks: tuple[int | None, ...] = (None,) * 3
    config: tuple[int | None, ...] = (None,) * 3
    headers: tuple[int | None, ...] = (None,) * 3
    guessed: bool = False
    words: str = ""


def questions(planner: families.Planner, family: Family) -> list[tuple[int, Question]]:
    try:
        decisions = planner.plan(family, {}).decisions
    except FitserveError:
        return []
    found = [
        (tp, open_questions(decision))
        for tp, decision in zip(TENSOR_PARALLEL, decisions, strict=True)
    ]
    return [(tp, open_[0].questions[0]) for tp, open_ in found if open_]


def copies(only: str) -> list[Family]:
    names = set(filter(None, only.split(",")))
    found = []
    for model, formats in COPIES.items():
        config = json.loads(next(families.KEPT.rglob(f"{model}_config.json")).read_text())
        routers = (
            [f"model.layers.{number}.mlp.gate" for number in range(config["num_hidden_layers"])]
            if "num_experts" in config
            else []
        )
        for form in formats:
            name = f"{model.partition('--')[2]} {form}"
            if not names or name in names:
                block = {
                    what: [*given, *routers] if what in _LEFT_OUT else given
                    for what, given in QUANTS[form].items()
                }
                found.append(Family(name, {**config, "quantization_config": block}))
    return found


def both(
    python: str, sources: str, planner: families.Planner, wanted: list[Family]
) -> Iterator[Row]:
    """The rows of the families: of several at a time one process of the engine is asked, and one of
    transformers."""
    gpu = planner.machine.gpus[0]
    gpus = StatedGpus(str(gpu.capability), 4 * TIB, len(planner.machine.gpus), gpu.name)
    for start in range(0, len(wanted), AT_ONCE):
        batch = [(family, questions(planner, family)) for family in wanted[start : start + AT_ONCE]]
        documents = [
            json.loads(
                document(
                    "vllm",
                    gpus,
                    model=model_files(family.config, None),
                    questions=[one for _, one in asked],
                )
            )
            for family, asked in batch
        ]
        whole = {
            **documents[0],
            "sources": sources,
            "models": [one["models"][0] for one in documents],
        }
        said = run(python, "engine_parameters.py", whole)
        built = {batch[one["model"]][0].name for one in said if "parameters" in one}
        configs = {family.name: family.config for family, _ in batch if family.name in built}
        saved = {
            one["name"]: one for one in run(python, "count_parameters.py", {"configs": configs})
        }
        for index, (family, asked) in enumerate(batch):
            found: dict[int, checkpoint.Held] = {}
            words = ""
            for one in (one for one in said if one["model"] == index):
                if "refused" in one:
                    words = words or one["refused"]
                else:
                    tensors = checkpoint.tensors_of(one["parameters"])
                    found[asked[one["question"]][0]] = checkpoint.Held(
                        tensors, one["rows"], frozenset(one["buffers"])
                    )
            yield row(planner, family, found, words, saved.get(family.name, {}))


def run(python: str, program: str, asked: Any) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / program)],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        cwd="/",
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def from_headers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelSpec:
    """The model as a folder of config.json and headers says: the file is as long as they say, and
    empty."""
    with tempfile.TemporaryDirectory() as folder:
        plain = {name: value for name, value in config.items() if name != "auto_map"}
        Path(folder, "config.json").write_text(json.dumps(plain))
        header, length = checkpoint.header(tensors)
        with Path(folder, "model.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(length)
        return load(folder, hub=Hub(None, None, Path(folder)))


def forecast(planner: families.Planner, spec: ModelSpec) -> tuple[int | None, ...]:
    traits = frozenset(
        next(engine for engine in planner.engines if engine.version == VERSION).traits
    )
    built = build(spec, traits)
    capability = str(planner.machine.gpus[0].capability)
    return tuple(
        weights_bytes(built, Rank(tp=tp, capability=capability), traits) for tp in TENSOR_PARALLEL
    )


def row(
    planner: families.Planner,
    family: Family,
    engine: dict[int, checkpoint.Held],
    words: str,
    said: dict[str, Any],
) -> Row:
    held = [engine.get(tp) for tp in TENSOR_PARALLEL]
    found = Row(
        family.name,
        tuple(checkpoint.total(one.tensors) if one else None for one in held),
        tuple(checkpoint.scales(one) if one else 0 for one in held),
    )
    try:
        spec = read_model(family.name, None, family.config, None, None, (), None)
        found = found._replace(config=forecast(planner, spec), guessed=bool(spec.guessed))
    except FitserveError as error:
        words = words or error.message
    if 1 not in engine or "stored" not in said:
        return found._replace(words=words or said.get("refused", ""))
    made = checkpoint.Made(checkpoint.tensors_of(said["stored"]), frozenset(said["linear"]))
    stored = checkpoint.quantized(family.config, made)
    if stored is None:
        return found._replace(words="a format of weights that is not written here")
    why = checkpoint.reasons(engine[1], stored)
    total = checkpoint.total(stored)
    found = found._replace(
        stored=total,
        why=why,
        left=checkpoint.total(engine[1].tensors) - total - sum(why.values()),
        words=words,
    )
    try:
        spec = from_headers(family.config, stored)
        found = found._replace(headers=forecast(planner, spec))
        attending = [
            one.kv_heads
            for one in spec.attention
            if one.kv_heads and one.kind not in ("recurrent", "vision")
        ]
    except FitserveError as error:
        return found._replace(words=error.message)
    if stored is made.tensors:
        ranks = tuple(
            (
                checkpoint.on_rank(engine[tp], stored, tp, min(attending, default=1))
                if tp in engine
                else None
            )
            for tp in TENSOR_PARALLEL
        )
        found = found._replace(ranks=ranks)
    return found


def apart(said: tuple[int | None, ...], engine: tuple[int | None, ...]) -> str:
    shown = []
    for one, own in zip(said, engine, strict=True):
        shown.append(
            "-"
            if one is None or own is None
            else "equal"
            if one == own
            else f"{100 * (one / own - 1):+.2f} %"
        )
    return " ".join(shown)


def reason(why: Mapping[str, int]) -> str:
    lost = sum(count for what, count in why.items() if what.startswith("not held"))
    names = [what.removeprefix("not held: ") for what in why if what.startswith("not held")]
    said = [f"{what} {count:+d}" for what, count in why.items() if not what.startswith("not held")]
    return ", ".join(
        [*said, *([f"not held ({names[0]}, {len(names)} names) {lost:+d}"] if names else [])]
    )


def told(row: Row, number: int) -> bool:
    """Whether one of the reckonings apart from the engine is its bytes on so many GPUs, but for
    attention's scales."""
    own = row.engine[number]
    return own is not None and own - row.scales[number] in (
        row.ranks[number],
        row.config[number],
        row.headers[number],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    tool = families.answers_tool()
    kept = tool.Kept(families.KEPT)
    python, sources = kept.environment(), str(kept.sources("vllm", VERSION))
    planner = families.Planner(f"vllm=={VERSION}")
    wanted = [*families.all_of(tool, python, options.only), *copies(options.only)]
    rows: list[Row] = []
    print(
        "family | engine GB | checkpoint GB | equal | why not at once | by names of tensors TP 1 2"
        " 4 | config | headers | words"
    )
    for found in both(python, sources, planner, wanted):
        rows.append(found)
        equal = "-" if found.left is None else "equal" if found.left == 0 else f"{found.left:+d}"
        print(
            f"{found.name} | {families.shown(found.engine[0])} | {families.shown(found.stored)} |"
            f" {equal} | {reason(found.why)} | {apart(found.ranks, found.engine)} |"
            f" {apart(found.config, found.engine)} | {apart(found.headers, found.engine)} |"
            f" {' '.join(found.words.split())[:200]}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([one._asdict() for one in rows], indent=1) + "\n")
    summary(rows)


def summary(rows: list[Row]) -> None:
    built = [row for row in rows if any(row.engine)]
    compared = [row for row in built if row.left is not None]
    equal = [row for row in compared if row.left == 0]
    everywhere = [
        row
        for row in equal
        if all(told(row, n) for n, own in enumerate(row.engine) if own is not None)
    ]
    print(
        f"{len(rows)} rows, {len(built)} built by the engine, {len(compared)} with a checkpoint to"
        f" compare: {len(equal)} equal, {sum(not row.why for row in equal)} of them at once; on 2"
        f" and 4 GPUs too {len(everywhere)}"
    )
    for what in ("ranks", "config", "headers"):
        known = [
            [
                one == own
                for one, own in zip(getattr(row, what), row.engine, strict=True)
                if one and own
            ]
            for row in built
        ]
        known = [one for one in known if one]
        print(
            f"{what}: {sum(one[0] for one in known)} of {len(known)} equal on one GPU,"
            f" {sum(map(all, known))} on all that were built"
        )


if __name__ == "__main__":
    main()
