"""`fitserve demo`: everything from nothing, without Docker: an engine, a gateway, a model, and how
to ask it. Ends with Ctrl-C.

What it runs are the commands that a user would type, as processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gateway import health
from gateway.cli.demo.checkpoint import make_model
from gateway.errors import FitserveError
from gateway.settings import Settings, load_settings
from gateway.store.data_folder import in_use

NAME = "demo"
_PROGRAM = (sys.executable, "-m", "gateway.__main__")
_LOOK_S = 0.2


def serve_demo(wanted: Sequence[str], say: Callable[[str], None]) -> int:
    """Until Ctrl-C; the exit code. wanted: what `fitserve add` takes, a name and a source first;
    empty: the tiny model. Raises SettingsError, and
    FitserveError where a gateway runs on the data folder already: that one and its models stay as
    they are.
    """
    os.environ.setdefault("FITSERVE_HOST_KIND", "process")
    settings = load_settings()
    # For `health`, which reads the environment alone.
    os.environ |= {"FITSERVE_HOST": settings.host, "FITSERVE_PORT": str(settings.port)}
    _check_alone(settings, wanted)
    if subprocess.run([*_PROGRAM, "engine", "install"], check=False).returncode:
        return 1
    if not wanted:
        folder = settings.data / "demo-model"
        make_model(folder, stop=True)
        wanted = (NAME, str(folder))
    name = wanted[0]
    # A session of its own: Ctrl-C must reach this program first, which takes the model down before
    # the gateway.
    gateway = subprocess.Popen([*_PROGRAM, "serve"], start_new_session=True)
    added = False
    try:
        with _ended_by_signals():
            while health.main():
                if gateway.poll() is not None:
                    return gateway.returncode or 1
                time.sleep(_LOOK_S)
            if name == NAME:
                _quietly("rm", name, "--wait")  # of a run that was killed
            elif _quietly("show", name) != 1:
                raise FitserveError(
                    f"The data folder {settings.data} has a model {name} already.",
                    hint=(
                        "`fitserve serve` serves what it has; another name, or another"
                        " FITSERVE_DATA_DIR, is for this one."
                    ),
                )
            added = True
            code = subprocess.run([*_PROGRAM, "add", *wanted, "--wait"], check=False).returncode
            if code:
                return code
            say(_how_to_ask(settings, name))
            return gateway.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        if added and gateway.poll() is None:
            _quietly("rm", name, "--wait")
        with contextlib.suppress(ProcessLookupError):
            gateway.terminate()
        gateway.wait()


def _check_alone(settings: Settings, wanted: Sequence[str]) -> None:
    if not in_use(settings.data):
        return
    source = shlex.join(wanted) if wanted else "NAME SOURCE"
    busy = FitserveError(
        f"A gateway runs on the data folder {settings.data} already{_process(settings.data)}; it"
        " and its models stay as they are.",
        hint=(
            f"`fitserve add {source}` adds a model to it, `fitserve ps` lists them. For a second"
            " gateway set another FITSERVE_DATA_DIR and FITSERVE_PORT."
        ),
    )
    busy.exit_code = 3
    raise busy


def _process(data: Path) -> str:
    with contextlib.suppress(OSError):
        if number := re.sub(r"\D", "", (data / "gateway.lock").read_text(errors="replace")[:32]):
            return f" (process {number})"
    return ""


def _how_to_ask(settings: Settings, name: str) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = ' -H "authorization: Bearer $KEY"' if settings.admin_key or settings.api_key else ""
    return (
        f"\nAsk it:\n\n  curl {settings.own_url}/v1/chat/completions -H 'content-type:"
        f" application/json'{key} -d {shlex.quote(body)}\n\nCtrl-C stops it.\n"
    )


def _quietly(*arguments: str) -> int:
    return subprocess.run(
        [*_PROGRAM, *arguments], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM as Ctrl-C; and Ctrl-C also where a shell that started this in its background has it
    ignored."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
