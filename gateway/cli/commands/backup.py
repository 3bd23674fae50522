"""`fitserve backup` and `fitserve restore`: what a gateway knows, in one file."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.client import stream
from gateway.cli.options import Json
from gateway.cli.present import print_paragraph
from gateway.cli.terminal import say
from gateway.domain.units import words as size
from gateway.errors import BadRequest, NotReady
from gateway.version import __version__


def backup(
    file: Annotated[
        Path | None, typer.Argument(help="Where to write; default: fitserve-TIME.tar.gz here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write models, facts, measurements and digests of keys to one file, while the gateway works.
    Weights and engines are not in it. Without a gateway that
    runs, of the data folder of this shell's settings."""
    path = file or Path(f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    if path.exists():
        raise BadRequest(f"{path} exists already.", hint="Give another name.")
    draft = path.with_name(f"{path.name}.part")
    try:
        try:
            # Perhaps in a folder where others write too: never through what stands there.
            draft.unlink(missing_ok=True)
            with draft.open("xb") as into:
                into.writelines(stream("/admin/backup", {}))
        except NotReady:
            if os.environ.get("FITSERVE_URL"):
                raise
            from gateway.settings import load_settings
            from gateway.store.backup import write_backup

            with draft.open("wb") as into:
                write_backup(load_settings().data, into, __version__)
        draft.replace(path)
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be written: {error.strerror}.", hint="Give another path."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    written = path.stat().st_size
    say(
        json.dumps({"file": str(path), "bytes": written}, indent=2)
        if as_json
        else f"{path}: {size(written)}"
    )


def restore(
    file: Annotated[Path, typer.Argument(help="What `fitserve backup` wrote.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Put a backup into this shell's data folder (FITSERVE_DATA_DIR), which no gateway may use
    meanwhile. What is there is kept beside it. Two gateways of one
    backup on one machine would end each other's engines."""
    from gateway.logging import configure_logging
    from gateway.settings import load_settings
    from gateway.store.backup import restore_backup
    from gateway.store.data_folder import lock

    settings = load_settings()
    configure_logging(settings.log_level)
    data = settings.data
    held = lock(data)

    def ask() -> None:
        if (data / "fitserve.db").exists() and not yes:
            typer.confirm(f"Replace what {data} has?", abort=True)

    try:
        back = restore_backup(data, file, ask)
    finally:
        os.close(held)
    if as_json:
        aside = str(back.aside) if back.aside else None
        say(json.dumps({**back._asdict(), "aside": aside, "data": str(data)}, indent=2))
        return
    made = datetime.fromtimestamp(back.made_at, tz=UTC).astimezone().strftime("%F %T")
    print_paragraph(
        f"{data}: {back.models} models, {back.keys} keys and {back.facts} facts of {made}, by"
        f" fitserve {back.fitserve}"
    )
    if back.aside is not None:
        print_paragraph(f"What was there is in {back.aside}")
