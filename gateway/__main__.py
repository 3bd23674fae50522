"""The program `fitserve`. `fitserve serve` does not load the command line: a server lives for
months and must not keep its memory."""

from __future__ import annotations

import gc
import os
import resource
import sys

# A command makes a few hundred thousand objects and ends: a search for cycles after every 700 would
# cost a seventh of its time, and one of 100,000 a tenth.
_OBJECTS = 300_000


# What we make is for this user alone (`gateway.store.data_folder`), and so is what the processes
# make that we start.
_UMASK = 0o077


# With less the gateway could not even load its parts, or a body of the largest size.
_LEAST_MIB = 256


def main() -> None:
    os.umask(_UMASK)
    if sys.argv[1:2] == ["serve"]:
        _require_memory()
    if sys.argv[1:] in (["serve"], ["serve", "--take-over"]):
        serve(take_over="--take-over" in sys.argv)
    else:
        gc.set_threshold(_OBJECTS)
        from gateway.cli.commands.registry import add_to, keep_only
        from gateway.cli.main import app
        from gateway.cli.main import main as cli

        add_to(app)
        keep_only(app, *sys.argv[1:2])
        cli()


def _require_memory() -> None:
    """Before anything is loaded: what cannot be loaded ends in a traceback of an import."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < _LEAST_MIB * 1024**2:
        sys.stderr.write(
            f"fitserve: This process may use {allowed // 1024**2} MiB of address space (`ulimit"
            f" -v`), and needs {_LEAST_MIB} MiB at least. Raise the limit; engines that are"
            " processes of this machine have the same one, and need far more.\n"
        )
        sys.exit(2)


def serve(*, take_over: bool = False) -> None:
    """Run the gateway; our own errors end with their exit code and two sentences."""
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
