"""`fitserve backup` and `fitserve restore`: the data of a gateway in one file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.client import stream
from gateway.cli.options import Json
from gateway.cli.tables import print_paragraph
from gateway.cli.terminal import say
from gateway.domain.units import plural
from gateway.domain.units import words as size
from gateway.errors import BadRequest, NotReady
from gateway.version import __version__


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(help="Output file; default: fitserve-TIME.tar.gz in this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write models, facts, measurements and key digests to one file. Weights and engines are not
    included. Without a running gateway, the data folder of this shell's settings is read."""
    path = file or Path(f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    if path.exists():
        raise BadRequest(f"{path} exists already.", hint="Choose another name.")
    draft = path.with_name(f"{path.name}.part")
    try:
        try:
            # Other users may write in this folder too: an existing link must not be followed.
            draft.unlink(missing_ok=True)
            with draft.open("xb") as output:
                output.writelines(stream("/admin/backup", {}))
        except NotReady:
            if os.environ.get("FITSERVE_URL"):
                raise
            from gateway.settings import load_settings
            from gateway.store.backup import write_backup

            with draft.open("wb") as output:
                write_backup(load_settings().data, output, __version__)
        draft.replace(path)
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be written: {error.strerror}.", hint="Choose another path."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    size_bytes = path.stat().st_size
    say(
        json.dumps({"file": str(path), "bytes": size_bytes}, indent=2)
        if as_json
        else f"{path}: {size(size_bytes)}"
    )


def restore(
    file: Annotated[Path, typer.Argument(help="File written by `fitserve backup`.")],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Replace existing data without asking.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore a backup into FITSERVE_DATA_DIR. Stop its gateway first. Existing data is kept beside
    it. Never run two gateways from one backup on one machine: they would stop each other's
    engines."""
    from gateway.logging import configure_logging
    from gateway.settings import load_settings
    from gateway.store.backup import restore_backup
    from gateway.store.data_folder import lock

    settings = load_settings()
    configure_logging(settings.log_level)
    data = settings.data
    lock_fd = lock(data)

    def confirm_replacement() -> None:
        if (data / "fitserve.db").exists() and not yes:
            typer.confirm(f"Replace the data in {data}?", abort=True)

    try:
        restored = restore_backup(data, file, confirm_replacement)
    finally:
        os.close(lock_fd)
    if as_json:
        former_folder = str(restored.aside) if restored.aside else None
        say(json.dumps({**restored._asdict(), "aside": former_folder, "data": str(data)}, indent=2))
        return
    made_at = datetime.fromtimestamp(restored.made_at, tz=UTC).astimezone().strftime("%F %T")
    print_paragraph(
        f"{data}: {plural(restored.models, 'model')}, {plural(restored.keys, 'key')} and"
        f" {plural(restored.facts, 'fact')} from {made_at}, written by fitserve {restored.fitserve}"
    )
    if restored.aside is not None:
        print_paragraph(f"The earlier data is in {restored.aside}")
