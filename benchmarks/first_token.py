"""From a clone to the first token, cold and warm: python -m benchmarks.first_token

Each step of README.md with its seconds and the load. The clone has its own HOME: no environment, no
engine, no cache of packages. A network or a package index is needed, and 3 GB of disk; all of it is
removed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PORT = 8377


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="first-token-") as folder:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FITSERVE_", "PYTHON", "VIRTUAL_ENV"))
        }
        environment = {**kept, "HOME": f"{folder}/home", "FITSERVE_PORT": str(_PORT)}
        Path(environment["HOME"]).mkdir()
        print(
            f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}"
        )
        checkout = f"{folder}/fitserve"
        began = time.monotonic()
        subprocess.run(
            ["git", "clone", "--quiet", str(ROOT), checkout], env=environment, check=True
        )
        cloned = time.monotonic() - began
        for name, before in (("cold", [("git clone", cloned)]), ("warm", [])):
            load = os.getloadavg()[0]
            steps = [*before, *_time_service(checkout, environment)]
            words = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in steps)
            print(
                f"{name}: {len(steps)} steps, {sum(seconds for _, seconds in steps):.1f} s (load"
                f" {load:.1f} as it began): {words}",
                flush=True,
            )


def _time_service(checkout: str, environment: dict[str, str]) -> list[tuple[str, float]]:
    """Steps and seconds: until the model serves, and until the printed line has answered."""
    began = time.monotonic()
    command = [f"{checkout}/scripts/serve"]
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        curl = next(
            (line.strip() for line in demo.stdout if line.strip().startswith("curl ")), None
        )
        if curl is None:
            raise SystemExit(
                "scripts/serve ended before the model served; run it by hand to see why."
            )
        served = time.monotonic() - began
        began = time.monotonic()
        subprocess.run(shlex.split(curl), env=environment, check=True, capture_output=True)
        answered = time.monotonic() - began
        demo.send_signal(signal.SIGINT)
    return [("scripts/serve", served), ("curl", answered)]


if __name__ == "__main__":
    main()
