"""Measurements, the speed model and the estimates of aiconfigurator-core.

    python benchmarks/speed/compare.py

--results FILE...    output of run.py; of a setting in several files the best pass counts
--estimates FILE     output of aiconfigurator_estimates.py
--fit                then also parts and times with the best fit, as a speed.yaml
--without MODEL      with --fit: fit all other models, so that this one is a forecast
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.engines.common.speed.machine import SpeedTable
from speed import models
from speed.clocks import PROFILES, Timed, time_kernels
from speed.grid import LOADS

RESULTS = [
    Path(__file__).parent / "results" / f"vllm-0.26.0-h200{part}.jsonl"
    for part in ("", "-unseen", "-twice", "-uniform", "-passes")
]
ESTIMATES = Path(__file__).parent / "results" / "aiconfigurator-0.12.0-h200.jsonl"
# The time of a stream's first token besides the engine's work: HTTP, JSON.
VLLM = "vllm==0.26.0"  # of lines that name no engine
LOAD = {one.name: one for one in LOADS}


class Point(NamedTuple):
    """A figure: seconds, or tokens/s."""

    model: str
    setting: str
    load: str
    what: str
    measured: float
    timed: Timed
    most: int

    def expected_figure(self, table: SpeedTable) -> float:
        clock, load = self.timed.clock(table), LOAD[self.load]
        if self.what == "ttft":
            return clock.first_token_s(load.tokens_in, self.most)
        if self.what == "tpot":
            return clock.decode_s(load.concurrency, load.tokens_in + load.tokens_out / 2)
        at_once = min(load.concurrency, self.timed.plan.max_num_seqs.value)
        return clock.total_per_s(at_once, load.tokens_in, load.tokens_out, self.most)


def args_of(flags: list[str]) -> dict[str, Any]:
    named = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name: value or "true" for name, _, value in named}


def lines(*results: Path) -> list[dict[str, Any]]:
    read = (json.loads(line) for file in results for line in file.read_text().splitlines())
    return [row for row in read if "loads" in row]


def by_setting(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The lines of each setting of a model."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["setting"]), []).append(row)
    return list(groups.values())


def best_passes(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The best pass of each figure over all lines of a setting. In the others single
    requests waited for kernels that were built
    meanwhile, or for a CPU core that had other work."""
    found: dict[tuple[str, str], float] = {}
    for one in [
        measured_figures(passed)
        for row in rows
        for passed in (row.get("first", {}), *row.get("passes", ()), row["loads"])
    ]:
        for key, value in one.items():
            found[key] = (max if key[1] == "tokens_s" else min)(found.get(key, value), value)
    return found


def measured_figures(loads: dict[str, Any]) -> dict[tuple[str, str], float]:
    """By load and figure what was measured: seconds, or tokens/s."""
    found: dict[tuple[str, str], float] = {}
    for name, figures in loads.items():
        if figures.get("errors"):
            continue
        if name.startswith("ttft"):
            found |= {(name, "ttft"): figures["ttft_ms"] / 1e3} if "ttft_ms" in figures else {}
        elif "tokens_s" in figures:
            found[name, "tokens_s"] = figures["tokens_s"]
        if name == "1" and "tpot_ms" in figures:
            found[name, "tpot"] = figures["tpot_ms"] / 1e3
    return found


def points(rows: list[dict[str, Any]]) -> list[Point]:
    hardware = PROFILES.hardware("8xh200")
    found = []
    for group in by_setting(rows):
        row = group[-1]
        args = args_of(row["flags"])
        tp = int(args.pop("tensor-parallel-size", 1))
        pp = int(args.pop("pipeline-parallel-size", 1))
        made = time_kernels(
            models.config(row["model"]), hardware, row.get("engine", VLLM), tp, pp, args
        )
        if made is None or "data-parallel-size" in args:
            print("no plan:", row["model"], row["setting"])
            continue
        most = made.plan.max_num_batched_tokens.value
        figures = best_passes(group).items()
        found += [
            Point(row["model"], row["setting"], name, what, value, made, most)
            for (name, what), value in figures
        ]
    return found


def noise(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """By model, load and figure how far nine of ten measurements of the same setting are apart:
    logarithms. Of models that were measured again, in
    another start or in the same one; where it is the same one asked for the first time, medians
    alone, for rates have kernels in them that are built.
    """
    apart: dict[tuple[str, str, str], list[float]] = {}
    for group in by_setting(rows):
        again = [
            {
                key: value
                for key, value in measured_figures(row["first"]).items()
                if key[1] != "tokens_s"
            }
            for row in group
            if "first" in row
        ]
        again += [measured_figures(row["loads"]) for row in group]
        # The last pass is `loads`.
        again += [measured_figures(one) for row in group for one in row.get("passes", ())[:-1]]
        for one, other in combinations(again, 2):
            for load, what in one.keys() & other.keys():
                apart.setdefault((group[0]["model"], load, what), []).append(
                    log_error(one[load, what], other[load, what])
                )
    return {
        key: sorted(values)[math.ceil(0.9 * len(values)) - 1]
        for key, values in apart.items()
        if len(values) >= 3
    }


def log_error(expected: float, measured: float) -> float:
    return abs(math.log(expected / measured))


def show(
    all_points: list[Point],
    table: SpeedTable,
    estimates: dict[tuple[str, str], Any],
    chance: dict[tuple[str, str, str], float],
) -> None:
    errors: dict[str, list[float]] = {}
    others: list[float] = []
    ours_there: list[float] = []
    print(
        f"{'model':18} {'setting':11} {'load':9} {'figure':8} {'measured':>10} {'expected':>10}"
        f" {'':>7} {'aiconf.':>10} {'':>7}"
    )
    for one in all_points:
        expected = one.expected_figure(table)
        ratio = expected / one.measured - 1
        errors.setdefault(f"{one.load} {one.what}", []).append(abs(ratio))
        said = estimates.get((one.model, one.setting), {}).get("loads", {}).get(one.load, {})
        other = (
            said.get("tokens_s")
            if one.what == "tokens_s"
            else said.get(f"{one.what}_ms", 0) / 1e3 or None
        )
        shown = f"{other:10.4g} {other / one.measured - 1:+7.1%}" if other else f"{'-':>10} {'':7}"
        if other:
            others.append(abs(other / one.measured - 1))
            ours_there.append(abs(ratio))
        print(
            f"{one.model:18} {one.setting:11} {one.load:9} {one.what:8} {one.measured:10.4g}"
            f" {expected:10.4g} {ratio:+7.1%} {shown}"
        )
    print()
    for name, values in errors.items():
        print(
            f"{name:18} median {statistics.median(values):6.1%}  worst {max(values):6.1%}  of"
            f" {len(values)}"
        )
    whole = [value for values in errors.values() for value in values]
    print(
        f"{'all':18} median {statistics.median(whole):6.1%}  worst {max(whole):6.1%}  of"
        f" {len(whole)}"
    )
    if others:
        print(
            f"where both say something: ours median {statistics.median(ours_there):.1%},"
            f" aiconfigurator's {statistics.median(others):.1%}, of {len(others)}"
        )
    far = [one for one in all_points if abs(one.expected_figure(table) / one.measured - 1) > 0.25]
    known = sum(
        log_error(one.expected_figure(table), one.measured)
        <= chance.get((one.model, one.load, one.what), 0.0)
        for one in far
    )
    print(
        f"off by more than 25 %: {len(far)}, of which {known} by less than the same setting"
        " measured again"
    )
    for (model, load, what), size in sorted(chance.items()):
        print(
            f"the same setting of {model} measured again, {load} {what}: nine of ten are within"
            f" {math.expm1(size):.1%}"
        )
    told = "settings of one model in the right order, of pairs that differ by more than 5 %"
    print(f"{told}:", *count_ordered_pairs(all_points, table))
    print(
        f"{told}, and by more than the same setting measured again:",
        *count_ordered_pairs(all_points, table, chance=chance),
    )
    print(
        f"{told}, and are expected to differ by 2 % or more:",
        *count_ordered_pairs(all_points, table, 0.02),
    )
    best(all_points, table, chance)


def count_ordered_pairs(
    all_points: list[Point],
    table: SpeedTable,
    least: float = 0.0,
    chance: Mapping[tuple[str, str, str], float] | None = None,
) -> tuple[int, int]:
    """How many pairs of settings of one model the model puts in the right order, and of how many:
    whose figures differ by more than 5 %. least: by how
    much they have to differ as expected: what does the same work differs by chance. chance: how
    much more than 5 % they have to differ as measured, by model, load and figure."""
    right = pairs = 0
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for one in all_points:
        groups.setdefault((one.model, one.load, one.what), []).append(one)
    for group in groups.values():
        for a, b in combinations(group, 2):
            mine, other = a.expected_figure(table), b.expected_figure(table)
            more = (chance or {}).get((a.model, a.load, a.what), 0.0)
            if (
                abs(a.measured / b.measured - 1) > 0.05
                and log_error(a.measured, b.measured) > more
                and abs(mine / other - 1) >= least
            ):
                pairs += 1
                right += (a.measured < b.measured) == (mine < other)
    return right, pairs


def best(
    all_points: list[Point], table: SpeedTable, chance: Mapping[tuple[str, str, str], float]
) -> None:
    """What the flags that are planned for one GPU give, as a part of the best setting that was
    measured on one, and of what is expected of that one: where
    as much is expected, both do the same work, and nothing that is known of them would choose one.
    """
    print()
    parts: list[tuple[float, float, bool]] = []
    for model in dict.fromkeys(one.model for one in all_points):
        planned = time_kernels(models.config(model), PROFILES.hardware("8xh200"), VLLM, 1, 1, {})
        here = [one for one in all_points if one.model == model and len(one.timed.plan.gpus) == 1]
        if planned is None or len({one.setting for one in here}) < 2:
            continue
        shown = []
        for load in ("1", "8", "64", "256"):
            rates = {
                one.setting: one for one in here if one.load == load and one.what == "tokens_s"
            }
            mine = next(
                rate for rate in rates.values() if rate.timed.plan.argv == planned.plan.argv
            )
            first = max(rates.values(), key=lambda one: one.measured)
            alike = log_error(mine.measured, first.measured) <= chance.get(
                (model, load, "tokens_s"), 0.0
            )
            parts.append(
                (
                    mine.measured / first.measured,
                    mine.expected_figure(table) / first.expected_figure(table),
                    alike,
                )
            )
            shown.append(f"{load}: {parts[-1][0]:.3f} of {first.setting} ({parts[-1][1]:.3f})")
        print(
            f"{model:18} {len({one.setting for one in here})} settings; planned, by"
            f" concurrent requests (as expected): {', '.join(shown)}"
        )
    less = [(expected, alike) for part, expected, alike in parts if part < 0.95]
    same = sum(abs(expected - 1) < 0.01 for expected, _ in less)
    print(
        f"planned flags give 0.95 of the best or more in {len(parts) - len(less)} of {len(parts)}"
        " (model, load)"
    )
    print(
        f"of the other {len(less)} the best setting is expected to give the same, within 1 %, in"
        f" {same}",
        end="; ",
    )
    print(
        f"in {sum(alike for _, alike in less)} it differs by less than the same setting measured"
        " again"
    )


# --- fit ---

_FITTED = (
    "dense.memory", "dense.flops", "dense.least_s", "experts.memory", "experts.flops",
    "experts.least_s", "attention.flops", "narrow", "small_cache.flops", "layer_s", "eager_layer_s",
    "step_s", "request_s", "first_s", "admit_s", "experts.launch_s", "nvlink.part",
    "nvlink.latency_s", "stage_s", "stage_wait",
)  # fmt: skip


def fit(all_points: list[Point], table: SpeedTable) -> SpeedTable:
    """Coordinates changed one after the other while the sum of the logarithms' sizes falls; the
    same numbers every time."""
    numbers = random.Random(0)
    values = table.model_dump()
    names = [*_FITTED]
    for group in ("kernels", "expert_kernels"):
        names += [
            f"{group}.{name}.{part}"
            for name in values[group]
            for part in ("memory", "flops", "least_s")
        ]
    names += [f"expert_kernels.{name}.launch_s" for name in values["expert_kernels"]]

    def cost(tried: dict[str, Any]) -> float:
        made = SpeedTable.model_validate(tried)
        return sum(
            min(1.0, log_error(one.expected_figure(made), one.measured)) for one in all_points
        )

    best = cost(values)
    width = 0.4
    while width > 0.005:
        before = best
        numbers.shuffle(names)
        for name in names:
            place, key = values, name
            *path, last = key.split(".")
            for part in path:
                place = place[part]
            kept = place[last]
            for factor in (1 + width, 1 / (1 + width)):
                value = kept * factor
                if (
                    "memory" in last or "flops" in last or last in ("part", "narrow")
                ) and value > 1:
                    value = 1.0
                place[last] = value
                now = cost(values)
                if now < best - 1e-9:
                    best, kept = now, value
                    break
            place[last] = kept
        if before - best < 1e-3 * before:
            width /= 2
    return SpeedTable.model_validate(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, nargs="+", default=RESULTS)
    parser.add_argument("--estimates", type=Path, default=ESTIMATES)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--without")
    args = parser.parse_args()
    rows = lines(*args.results)
    found_points = points(rows)
    estimates = {(row["model"], row["setting"]): row for row in lines(args.estimates)}
    table = PROFILES.speed_knowledge.table
    if args.fit:
        table = fit(
            [
                found_point
                for found_point in found_points
                if args.without is None or not found_point.model.startswith(args.without)
            ],
            table,
        )
    show(
        [
            each_found_point
            for each_found_point in found_points
            if args.without is None or each_found_point.model.startswith(args.without)
        ],
        table,
        estimates,
        noise(rows),
    )
    if args.fit:
        print(yaml.safe_dump(json.loads(json.dumps(table.model_dump())), sort_keys=False))


if __name__ == "__main__":
    main()
