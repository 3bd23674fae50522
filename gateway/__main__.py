"""The program `fitserve`. `fitserve serve` runs without the memory of the command line."""

from __future__ import annotations

import gc
import os
import resource
import sys

# A command creates a few hundred thousand objects and ends. A garbage collection after every 700
# objects would cost a seventh of its time, after every 100,000 a tenth.
_OBJECTS = 300_000


# Only this user can read new files (`gateway.store.data_folder`), also those of child processes.
_UMASK = 0o077


# The gateway needs this much for its modules and a request body of the largest size.
_MIN_MIB = 256


# Commands that need no pydantic for right input (`gateway/domain/base.py`).
_LEAN = (["plan"], ["matrix"])
_PYDANTIC_VARIABLE = "_FITSERVE_WITH_PYDANTIC"


def main() -> None:
    os.umask(_UMASK)
    if sys.argv[1:2] == ["serve"]:
        _require_memory()
    if sys.argv[1:] in (["serve"], ["serve", "--take-over"]):
        serve(take_over="--take-over" in sys.argv)
    else:
        gc.set_threshold(_OBJECTS)
        from gateway.domain.base import NeedsPydantic, become_lean, is_lean

        if sys.argv[1:2] in _LEAN and os.environ.pop(_PYDANTIC_VARIABLE, None) is None:
            become_lean()
        from gateway.cli.main import app
        from gateway.cli.main import main as cli
        from gateway.cli.registry import add_commands

        add_commands(app, *sys.argv[1:2])
        try:
            cli()
        except (NeedsPydantic, Exception):
            if not is_lean():
                raise
            # A lean process reads right input only, and its values lack methods of models. So any
            # error may be its own. With pydantic the command gives its answer, or an error that
            # names the wrong input.
            _restart_with_pydantic()
        finally:
            # Otherwise the end of the process searches all objects for cycles, twice.
            gc.freeze()


def _restart_with_pydantic() -> None:
    """Run the same command with pydantic."""
    sys.stdout.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(command[0], command, {**os.environ, _PYDANTIC_VARIABLE: "1"})  # noqa: S606


def _require_memory() -> None:
    """Exit with a message before any import, where an import would fail with a traceback."""
    address_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_limit != resource.RLIM_INFINITY and address_limit < _MIN_MIB * 1024**2:
        sys.stderr.write(
            f"fitserve: This process may use {address_limit // 1024**2} MiB of address space"
            f" (`ulimit -v`), and needs {_MIN_MIB} MiB. Raise the limit. Engine processes inherit"
            " it and need far more.\n"
        )
        sys.exit(2)


def serve(*, take_over: bool = False) -> None:
    """Run the gateway. Expected errors end with two sentences and their exit code."""
    from gateway.errors import FitserveError
    from gateway.settings import load_settings

    try:
        settings = load_settings()
        from gateway.logging import configure_logging
        from gateway.server.server import serve as run

        configure_logging(settings.log_level)
        run(settings, take_over=take_over)
    except FitserveError as error:
        from gateway.cli.terminal import print_message

        print_message(f"fitserve: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
