"""`fitserve demo`: an engine, a gateway, a model and a curl command, without Docker.

Each step is a command that users can type, run as a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway import health
from gateway.cli.demo.checkpoint import make_model
from gateway.cli.port import port_problem
from gateway.errors import FitserveError, listen_error
from gateway.settings import Settings, load_settings
from gateway.store.data_folder import is_in_use

NAME = "demo"
_PROGRAM = (sys.executable, "-m", "gateway.__main__")
_POLL_S = 0.2
_REFUSAL_CODE = FitserveError.exit_code
"""The exit code of a `fitserve add` that did not add the model, such as for a taken name."""
# Its one engine starts once.
_DEFAULTS = {"FITSERVE_HOST_KIND": "process", "FITSERVE_PREPARED_ENGINES": "0"}
"""Settings of the demo where the environment has none."""


@dataclass(frozen=True)
class _Commands:
    """Commands of this program, run with an environment."""

    environment: Mapping[str, str]

    def run(self, *arguments: str, output: int | None = None) -> int:
        """The exit code. output: the descriptor of both outputs; None for those of this process."""
        return subprocess.run(
            [*_PROGRAM, *arguments],
            check=False,
            env=self.environment,
            stdout=output,
            stderr=output,
        ).returncode

    def run_silently(self, *arguments: str) -> int:
        return self.run(*arguments, output=subprocess.DEVNULL)


def serve_demo(model_arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Serve a model until Ctrl-C. Returns the exit code.

    model_arguments: the arguments of `fitserve add`, name and source first; empty: the tiny model.
    Raises SettingsError, and FitserveError if a gateway already runs on the data folder.
    """
    environment = {**_DEFAULTS, **os.environ}
    settings = load_settings(environment)
    commands = _Commands(environment)
    _check_alone(settings, model_arguments)
    if commands.run("engine", "install"):
        return 1
    # Another demo may have begun to serve meanwhile: an installation takes minutes.
    _check_alone(settings, model_arguments)
    if not model_arguments:
        folder = settings.data / "demo-model"
        make_model(folder, stop=True)
        model_arguments = (NAME, str(folder))
    name = model_arguments[0]
    # The gateway gets a new session because Ctrl-C must reach only this program, which stops the
    # model first.
    gateway = subprocess.Popen([*_PROGRAM, "serve"], start_new_session=True, env=environment)
    is_added = False
    try:
        with _interrupt_on_signals():
            # Another program may answer at the port: the gateway of this command has the folder.
            while not (_is_healthy(settings) and is_in_use(settings.data)):
                if gateway.poll() is not None:
                    return gateway.returncode or 1
                time.sleep(_POLL_S)
            if name == NAME:
                commands.run_silently("rm", name, "--wait")  # left by a killed run
            elif commands.run_silently("show", name) != 1:
                raise FitserveError(
                    f"The data folder {settings.data} already has a model {name}.",
                    hint=(
                        "Run `fitserve serve` for the existing models, or choose another name or"
                        " FITSERVE_DATA_DIR."
                    ),
                )
            # An interrupted command may have added the model.
            is_added = True
            code = commands.run("add", *model_arguments, "--wait")
            is_added = code != _REFUSAL_CODE
            if code:
                return code
            say(_curl_text(settings, name))
            code = gateway.wait()
            say(_exit_text(code))
            return code
    except KeyboardInterrupt:
        return 130
    finally:
        if is_added and gateway.poll() is None:
            commands.run_silently("rm", name, "--wait")
        with contextlib.suppress(ProcessLookupError):
            gateway.terminate()
        gateway.wait()


def _exit_text(code: int) -> str:
    """The end of a gateway that nobody stopped by Ctrl-C, and the next step."""
    return (
        f"The gateway has ended with exit code {code}. The next one adopts the engines that run on:"
        " `fitserve serve`."
    )


def _is_healthy(settings: Settings) -> bool:
    return health.is_healthy(settings.host, settings.port, tls=bool(settings.tls_cert))


def _check_alone(settings: Settings, model_arguments: Sequence[str]) -> None:
    """Check that port and data folder are free. Raises SettingsError, FitserveError."""
    if not is_in_use(settings.data):
        problem = port_problem(settings)
        if problem:
            raise listen_error(settings.host, settings.port, problem)
        return
    source = shlex.join(model_arguments) if model_arguments else "NAME SOURCE"
    busy = FitserveError(
        f"A gateway already runs on the data folder {settings.data}{_process_text(settings.data)}."
        " Its models stay unchanged.",
        hint=(
            f"`fitserve add {source}` adds a model to it, `fitserve ps` lists its models. For a"
            " second gateway set another FITSERVE_DATA_DIR and FITSERVE_PORT."
        ),
    )
    busy.exit_code = 3
    raise busy


def _process_text(data: Path) -> str:
    with contextlib.suppress(OSError):
        if number := re.sub(r"\D", "", (data / "gateway.lock").read_text(errors="replace")[:32]):
            return f" (process {number})"
    return ""


def _curl_text(settings: Settings, name: str) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = ' -H "authorization: Bearer $KEY"' if settings.admin_key or settings.api_key else ""
    return (
        f"\nAsk it:\n\n  curl {settings.own_url}/v1/chat/completions -H 'content-type:"
        f" application/json'{key} -d {shlex.quote(body)}\n\nPage: {settings.own_url}/\nAny OpenAI"
        f" client: {settings.own_url}/v1\nCommands: {_command_text()} --help\n\nCtrl-C stops"
        f" {name} and the gateway. Models that were added meanwhile go on.\n"
    )


def _command_text() -> str:
    """The program as this shell finds it: by its name, or by its path in an environment."""
    program = Path(sys.executable).parent / "fitserve"
    is_found = shutil.which("fitserve") is not None or not program.is_file()
    return "fitserve" if is_found else shlex.quote(str(program))


@contextlib.contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, and Ctrl-C acts even if a shell started this in the background."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handlers = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
