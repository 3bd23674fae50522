"""Published measurements (benchmarks/published.yaml) and the speed model.

    python benchmarks/speed/published.py

    --configs FOLDER     model_configs of aiconfigurator-core, for rows that name them
    --worst N            then the rows with the largest errors

Only the figures named in profiles/speed.yaml were used for its fit.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.domain import Gpu, Hardware, Link
from gateway.engines.common.layers.build import build
from gateway.errors import FitserveError
from gateway.models.spec import read_model
from speed.clocks import PROFILES, Timed, time_kernels
from tests.conformance.layer_cases import QUANTS
from tests.support.outside import Figure, Measured, published_figures
from tests.support.paths import MODELS

# How the quantizations of the table are written in a config.json; of others the config itself says
# it.
BLOCKS = {
    "fp8": "fp8-dynamic",
    "fp8_block": "fp8-block",
    "awq_int4": "awq",
    "gptq_int4": "gptq",
    "int4": "w4a16",
    "int4_g32": "w4a16",
    "autoround_int4": "auto-round",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}
# max_running_requests where nobody sets it, at the least:
# srt/model_executor/model_runner_kv_cache_mixin.py of SGLang 0.5.9.
UNSAID = {"sglang": 2048}
LATEST = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}


class Row(NamedTuple):
    """A figure and its forecast; larger is faster."""

    measured: Measured
    figure: Figure
    what: str
    seen: float
    expected: float

    @property
    def error(self) -> float:
        return self.expected / self.seen - 1


def machine(gpu: str, count: int) -> Hardware:
    """So many of one card, linked as a snapshot with this card says, else by PCIe without
    peer-to-peer access."""
    card = next(each_card for each_card in PROFILES.card_table.cards if each_card.name == gpu)
    total = (card.memory_mib or 122_000) * 2**20
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name=gpu,
            capability=card.capability,
            total_bytes=total,
            free_bytes=total - 2**29,
        )
        for index in range(count)
    )
    server = bool(card.nvlinks and card.nvlinks >= 12)
    links = tuple(
        Link(a=a, b=b, nvlinks=(card.nvlinks or 0) if server else 0, p2p=server)
        for a, b in combinations(range(count), 2)
    )
    return Hardware(
        arch="x86_64",
        cpu_cores=32,
        ram_total_bytes=2**40,
        ram_available_bytes=2**40,
        driver="580.95.05",
        cuda_driver="13.0",
        gpus=gpus,
        links=links,
    )


# Layers that who quantizes a checkpoint leaves as they are: those that see, and small gates. Of
# Qwen's own: modules_to_not_convert of
# https://huggingface.co/Qwen/Qwen3-235B-A22B-FP8/blob/main/config.json, and unquantized_modules,
# which repeats those of Qwen3.5, in
# https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/models/qwen3.5-397b-a17b-fp8.yml
_LEFT = re.compile(r"^visual|vision|in_proj_ba|in_proj_a|in_proj_b|mlp\.gate$|shared_expert_gate$")


def _ignored_layers(read: dict[str, Any]) -> list[str]:
    """Those layers by their names in checkpoints."""
    built = build(read_model("m", None, read, None, None, (), None), frozenset())
    linears = [layer for layer in built.linears if _LEFT.search(layer.name)]
    counted = max([128, *(layer.count for layer in linears)])
    plain = []
    for layer in linears:
        inner = layer.name.removeprefix("language_model.model.")
        whole = f"model.{inner}" if inner.startswith("visual") else layer.name
        plain.append(f"model.language_model.{inner}" if inner != layer.name else whole)
    plain += [
        name.replace("in_proj_ba", part)
        for name in plain
        if "in_proj_ba" in name
        for part in ("in_proj_a", "in_proj_b")
    ]
    return sorted({name.replace("*", str(number)) for name in plain for number in range(counted)})


def model_config(
    named: str, quantization: str, configs: Path | None, fields: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """A config.json by what a table calls it, with its quantization; None: it is not here. fields:
    those that differ from the file's."""
    place, _, name = named.partition(":")
    path = (
        MODELS / f"{name}.json"
        if place == "tests"
        else (configs / f"{name}_config.json" if configs else None)
    )
    if path is None or not path.is_file():
        return None
    read: dict[str, Any] = json.loads(path.read_text()) | dict(fields or {})
    stated = read.get("quantization_config") or {}
    if fields and (plain := stated.get("modules_to_not_convert")):
        numbers = range(read["num_hidden_layers"])
        named_each = [
            name.replace("*", str(number))
            for name in plain
            for number in (numbers if "*" in name else (0,))
        ]
        read["quantization_config"] = {**stated, "modules_to_not_convert": named_each}
    block = BLOCKS.get(quantization)
    if block and "quantization_config" not in read:
        left = (
            _ignored_layers(read) if block in ("fp8-block", "awq", "w4a16", "fp8-dynamic") else []
        )
        names = {"fp8-block": "modules_to_not_convert", "awq": "modules_to_not_convert"}.get(
            block, "ignore"
        )
        # An engine that finds `ignored_layers` does not look at the other name.
        quant = {name: value for name, value in QUANTS[block].items() if name != "ignored_layers"}
        if quantization == "int4_g32":
            weights = quant["config_groups"]["group_0"]["weights"] | {"group_size": 32}
            quant = quant | {
                "config_groups": {
                    "group_0": quant["config_groups"]["group_0"] | {"weights": weights}
                }
            }
        read["quantization_config"] = quant | ({names: ["lm_head", *left]} if left else {})
    return read


def clock_of(one: Measured, configs: Path | None) -> Timed | None:
    read = model_config(one.config, one.quantization, configs)
    if read is None:
        return None
    args: dict[str, Any] = (
        {"enable-expert-parallel": True} if one.expert_parallel and one.engine == "vllm" else {}
    )
    args |= (
        {"kv-cache-dtype": one.kv_dtype if one.engine == "vllm" else "fp8_e4m3"}
        if one.kv_dtype != "auto"
        else {}
    )
    return time_kernels(
        read,
        machine(one.gpu, one.count),
        LATEST[one.engine],
        one.tensor_parallel,
        one.pipeline_parallel,
        args,
    )


def rows(configs: Path | None) -> Iterator[Row | str]:
    """Figures with what is expected; of setups that cannot be planned why."""
    for bench_row in published_figures():
        try:
            made = clock_of(bench_row, configs)
        except FitserveError as error:
            yield f"{bench_row.model} on {bench_row.count} x {bench_row.gpu}: {error}"
            continue
        if made is None:
            yield (
                f"{bench_row.model} {bench_row.quantization} on {bench_row.count} x"
                f" {bench_row.gpu} TP {bench_row.tensor_parallel}: no plan, or no config"
            )
            continue
        clock = made.clock(PROFILES.speed_knowledge.table, bench_row.version)
        most = made.plan.max_num_batched_tokens.value
        for figure in bench_row.figures:
            if figure.input_tokens is None and figure.concurrency > 2:
                continue
            read, written = figure.input_tokens or 0, figure.output_tokens or 256
            kept = (
                made.plan.memory.kv_tokens // max(1, read + written)
                if made.plan.memory.kv_bytes_per_token
                else 10**6
            )
            seqs = bench_row.max_sequences or UNSAID.get(
                bench_row.engine, made.plan.max_num_seqs.value
            )
            at_once = max(1.0, min(figure.concurrency, seqs, kept))
            all_per_s = clock.mixed_tokens_per_s if unlike(figure) else clock.total_per_s
            if figure.tpot_ms or figure.decode_tokens_s:
                seen = 1000 / figure.tpot_ms if figure.tpot_ms else figure.decode_tokens_s or 0.0
                expected = 1 / clock.decode_s(at_once, read + written / 2)
                if figure.concurrency > 2 and read:
                    # Steps between two tokens also compute the prompts of others.
                    expected = all_per_s(at_once, read, written, most) / at_once
                yield Row(bench_row, figure, "tokens/s of one", seen, expected)
            elif figure.output_tokens_s:
                expected = all_per_s(at_once, max(1, read), written, most)
                yield Row(bench_row, figure, "tokens/s of all", figure.output_tokens_s, expected)


def unlike(figure: Figure) -> bool:
    """Whether its requests were of many lengths: then the table has their mean, which is not a
    round number."""
    read = figure.input_tokens or 0
    return (read % 64 > 0 and read % 10 > 0) or figure.concurrency != int(figure.concurrency)


def count_ordered_pairs(found: list[Row]) -> tuple[int, int]:
    """Pairs of setups with the same load whose figures differ by more than 10 %: how many are in
    the right order."""
    right = pairs = 0
    for a, b in combinations(found, 2):
        same = (a.what, a.figure.input_tokens, a.figure.output_tokens, a.figure.concurrency) == (
            b.what,
            b.figure.input_tokens,
            b.figure.output_tokens,
            b.figure.concurrency,
        )
        if same and a.measured is not b.measured and abs(a.seen / b.seen - 1) > 0.1:
            pairs += 1
            right += (a.seen < b.seen) == (a.expected < b.expected)
    return right, pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--worst", type=int, default=0)
    args = parser.parse_args()
    every = list(rows(args.configs))
    found = [one for one in every if isinstance(one, Row)]
    for text in (one for one in every if isinstance(one, str)):
        print("left out:", text)
    groups: dict[str, list[float]] = {}
    for one in found:
        many = "one or two" if one.figure.concurrency <= 2 else "many"
        for name in (
            f"{one.measured.gpu}",
            f"{one.measured.engine}, {many}",
            f"{one.measured.quantization}",
            "all",
        ):
            groups.setdefault(name, []).append(one.error)
    for name, offs in sorted(groups.items()):
        sizes = [abs(off) for off in offs]
        print(
            f"{name:45} {len(offs):4} figures  median off {statistics.median(sizes):6.1%}  middle"
            f" {statistics.median(offs):+7.1%}  worst {max(sizes):7.1%}"
        )
    for few, name in ((True, "one or two concurrent"), (False, "more")):
        some = [one for one in found if (one.figure.concurrency <= 2) == few]
        band = PROFILES.speed_knowledge.table.band
        inside = sum(1 / (1 + band) <= one.seen / one.expected <= 1 + band for one in some)
        print(f"within the band of {band:.0%}, {name}: {inside} of {len(some)}")
    print(
        "setups with one load in the right order, of pairs that differ by more than 10 %:",
        *count_ordered_pairs(found),
    )
    for one in sorted(found, key=lambda row: -abs(row.error))[: args.worst]:
        at = one.measured
        print(
            f"{one.error:+7.0%} seen {one.seen:9.1f} expected {one.expected:9.1f} {one.what:15} at"
            f" {one.figure.concurrency:g} {at.model} {at.quantization} {at.count} x {at.gpu} TP"
            f" {at.tensor_parallel} {at.engine} {at.version} {at.note[:60]}"
        )


if __name__ == "__main__":
    main()
