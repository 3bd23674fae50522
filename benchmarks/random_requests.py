"""Requests at random times for one of several models, and how long each waits for its first token.

The same seed gives the same times, so that several sides are asked the same.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.support.quantiles import quantile_s

WAIT_S = 600

Reach = Callable[[str], AbstractContextManager[tuple[str, str]]]
"""From a model's name to the base URL that serves it and its name there. Entering it may wait."""


class Clients:
    """Requests with an exponential pause for each model.

    is_loaded: whether a model serves right now.
    """

    def __init__(
        self,
        names: Sequence[str],
        is_loaded: Callable[[str], bool],
        reach: Reach,
        each_s: float,
        seed: int,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._names, self._is_loaded, self._reach = names, is_loaded, reach
        self._each_s, self._chance = each_s, random.Random(seed)
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        times = []
        for name in self._names:
            at = 0.0
            while (at := at + self._chance.expovariate(1 / self._each_s)) < seconds:
                times.append((at, name))
        began, threads = time.monotonic(), []
        for at, name in sorted(times):
            time.sleep(max(0.0, began + at - time.monotonic()))
            threads.append(threading.Thread(target=self._ask, args=(name, at), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(WAIT_S)

    def write(self, file: Path, **about: object) -> None:
        """Add a line of JSON for each answered request."""
        with file.open("a") as results, self._lock:
            results.writelines(json.dumps({**about, **row}) + "\n" for row in self.rows)

    def __str__(self) -> str:
        good = [row for row in self.rows if not row["error"]]
        kinds = (
            ("not loaded", [row["first_s"] for row in good if not row["loaded"]]),
            ("all", [row["first_s"] for row in good]),
        )
        lines = [
            f"{words}: {len(waits)} requests, median {median(waits):.2f} s,"
            f" p95 {quantile_s(waits, 0.95):.2f} s, longest {max(waits):.2f} s"
            for words, waits in kinds
            if waits
        ]
        failed = [row["error"] for row in self.rows if row["error"]]
        return "\n".join([*lines, f"{len(failed)} failed {failed[:2]}"])

    def _ask(self, name: str, at: float) -> None:
        loaded, first, error = False, None, ""
        try:
            loaded = self._is_loaded(name)
            began = time.monotonic()
            with self._reach(name) as (url, model):
                first = first_token_at(url, model) - began
        except (httpx.HTTPError, OSError, RuntimeError) as fault:
            error = repr(fault)[:300]
        row = {"at": round(at, 2), "model": name, "loaded": loaded, "first_s": first}
        with self._lock:
            self.rows.append({**row, "error": error})


def first_token_at(url: str, model: str) -> float:
    """By time.monotonic(). Raises RuntimeError where no token came."""
    body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 10, "stream": True}
    first = 0.0
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if not answer.is_success:
            raise RuntimeError(f"{answer.status_code} {answer.read()[:200]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if '"error"' in line:
                    raise RuntimeError(line[:200])
                first = first or time.monotonic()
    if not first:
        raise RuntimeError("the stream had no token")
    return first
