"""Gateway and engine are killed at random moments of a batch. `python -m tests.e2e.batch_kills
--kills 100 --lines 10000` prints the figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.support.batch_calls import batch_input
from tests.support.patience import HANG_S
from tests.support.running import model_folder

ENDPOINT = "/v1/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
TARGETS = ("gateway", "engine", "both")
# The part of the kills that come while no line has been answered since the kill before.
_EARLY = 0.25


def _kill_engines(gateway: Gateway) -> None:
    for pids in engines(gateway).values():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill(gateway: Gateway, target: str) -> None:
    if target != "engine":
        gateway.kill()
    if target != "gateway":
        _kill_engines(gateway)
    if target != "engine":
        gateway.start()
    # This many deaths of an engine would end its starts.
    gateway.client.post("/admin/models/m/retry")


def _make_batch(gateway: Gateway, lines: int) -> str:
    content = batch_input(lines, ENDPOINT, model="m", max_tokens=4)
    file = gateway.client.post(
        "/v1/files", files={"purpose": (None, "batch"), "file": ("input.jsonl", content)}
    )
    assert file.status_code == 200, file.text
    batch = gateway.client.post(
        "/v1/batches",
        json={
            "input_file_id": file.json()["id"],
            "endpoint": ENDPOINT,
            "completion_window": "24h",
        },
    )
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


def _batch(gateway: Gateway, id_: str) -> Any:
    return gateway.client.get(f"/v1/batches/{id_}").json()


def _results(gateway: Gateway, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    content = gateway.client.get(f"/v1/files/{file_id}/content").content
    return [json.loads(line) for line in content.splitlines()]


def _figures(gateway: Gateway, id_: str, lines: int) -> Counter[str]:
    """Counts of a batch that has ended."""
    batch = _batch(gateway, id_)
    answers = Counter(row["custom_id"] for row in _results(gateway, batch["output_file_id"]))
    errors = Counter(row["custom_id"] for row in _results(gateway, batch["error_file_id"]))
    expected_ids = {f"line-{number}" for number in range(lines)}
    results = answers + errors
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {
        "total": lines,
        "completed": answers.total(),
        "failed": errors.total(),
    }
    return Counter(
        lines=lines,
        lost=len(expected_ids - results.keys()),
        foreign=len(results.keys() - expected_ids),
        twice=sum(count > 1 for count in results.values()),
        errors=errors.total(),
    )


def _wait_for_answers(gateway: Gateway, id_: str) -> None:
    """Wait until more lines of a batch are answered, or it has ended."""
    former_count = _answer_count(gateway, id_)
    wait_for(
        "lines are answered",
        lambda: (
            _answer_count(gateway, id_) > former_count or _batch(gateway, id_)["status"] in ENDS
        ),
        5 * HANG_S,
    )


def _answer_count(gateway: Gateway, id_: str) -> int:
    return int(_batch(gateway, id_)["request_counts"]["completed"])


def kills(
    folder: Path, lines: int, count: int, seed: int, pause_s: float, limit_s: float = math.inf
) -> Counter[str]:
    """The counts of batches of so many lines, of which the last ends after `count` kills.

    pause_s: the longest time from an answer to the next kill.
    limit_s: no kill comes after this time.
    """
    end_s = time.monotonic() + limit_s
    chance = random.Random(seed)
    figures: Counter[str] = Counter()
    settings = {"FITSERVE_BACKOFF_S": "0.1", "FITSERVE_BACKOFF_MAX_S": "0.2"}
    new_gateway = scripted_gateway(folder, ["--tokens-per-second", "40"], **settings)
    with contextlib.closing(new_gateway) as gateway:
        gateway.start()
        body = {"name": "m", "source": str(model_folder(folder / "model")), "engines": [ENGINE]}
        answer = gateway.client.post(
            "/admin/models", json=body | {"policy": {"max_attempts": 50, "wait_s": 600}}
        )
        assert answer.status_code == 202, answer.text
        gateway.until("m", "ready")
        id_ = ""
        while figures["kills"] < count and time.monotonic() < end_s:
            if not id_:
                id_ = _make_batch(gateway, lines)
            if chance.random() > _EARLY:
                _wait_for_answers(gateway, id_)
            time.sleep(chance.uniform(0.0, pause_s))
            _kill(gateway, chance.choice(TARGETS))
            figures["kills"] += 1
            sys.stderr.write(f"{figures['kills']} kills, {_answer_count(gateway, id_)} lines\n")
            if _batch(gateway, id_)["status"] in ENDS:
                figures += _figures(gateway, id_, lines)
                figures["batches"] += 1
                id_ = ""
        if id_:
            wait_for(
                "the batch ends", lambda: _batch(gateway, id_)["status"] in ENDS, 10 * HANG_S, 0.5
            )
            figures += _figures(gateway, id_, lines)
            figures["batches"] += 1
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = kills(Path(folder), args.lines, args.kills, args.seed, args.pause_s, args.limit_s)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
