"""`fitserve backup` and `fitserve restore`: the data of a gateway in one file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated

import typer

from gateway.cli.client import stream
from gateway.cli.options import Json
from gateway.cli.terminal import print_bytes, say
from gateway.cli.text_tables import print_paragraph
from gateway.domain.units import format_bytes, plural
from gateway.errors import BadRequest, NotReady, WriteFailedError
from gateway.version import __version__

_STANDARD_STREAM = Path("-")
_PIECE_BYTES = 1 << 20


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Output file, or - for the standard output; default: fitserve-TIME.tar.gz here."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write models, facts, measurements and key digests to one file. Weights and engines are not
    included. Without a running gateway, the data folder of this shell's settings is read."""
    if file == _STANDARD_STREAM:
        if sys.stdout.isatty():
            raise BadRequest(
                "A terminal cannot show a backup.",
                hint="Write it to a file: `fitserve backup - > fitserve.tar.gz`.",
            )
        if as_json:
            raise BadRequest(
                "The standard output can hold the backup or JSON, not both.",
                hint="Leave --json out, or name a file.",
            )
        _write_to_standard_output()
        return
    path = file or Path(f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    if path.exists():
        raise BadRequest(f"{path} exists already.", hint="Choose another name.")
    draft = path.with_name(f"{path.name}.part")
    try:
        # Other users may write in this folder too: an existing link must not be followed.
        draft.unlink(missing_ok=True)
        with draft.open("xb") as output:
            _write_backup(output)
        draft.replace(path)
    except OSError as error:
        raise WriteFailedError(
            f"{path} cannot be written: {error.strerror}.",
            hint="Choose another path, or `-` for the standard output.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    size_bytes = path.stat().st_size
    say(
        json.dumps({"file": str(path), "bytes": size_bytes}, indent=2)
        if as_json
        else f"{path}: {format_bytes(size_bytes)}"
    )


def _write_to_standard_output() -> None:
    """Write the backup once it is whole, so that a failed one leaves the output empty. Raises
    WriteFailedError."""
    with tempfile.TemporaryFile() as archive:
        try:
            _write_backup(archive)
            archive.seek(0)
            print_bytes(iter(lambda: archive.read(_PIECE_BYTES), b""), is_raw=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteFailedError(
                f"The backup cannot be written: {error.strerror}.",
                hint="Make room in the folder for temporary files and at the output.",
            ) from None


def _write_backup(output: IO[bytes]) -> None:
    """Write the backup of the running gateway, or of this shell's data folder without one. Raises
    NotReady, StoreError, OSError."""
    try:
        output.writelines(stream("/admin/backup", {}))
    except NotReady:
        if os.environ.get("FITSERVE_URL"):
            raise
        from gateway.settings import load_settings
        from gateway.store.backup import write_backup

        # A gateway that ended in between has left a part.
        output.seek(0)
        output.truncate()
        write_backup(load_settings().data, output, __version__)


def restore(
    file: Annotated[
        Path, typer.Argument(help="File written by `fitserve backup`, or - for the standard input.")
    ],
    is_confirmed: Annotated[
        bool, typer.Option("--yes", "-y", help="Replace existing data without asking.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore a backup into FITSERVE_DATA_DIR. Stop its gateway first. Existing data is kept next
    to it. Never run two gateways from one backup on one machine: they would stop each other's
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
        if is_confirmed or not (data / "fitserve.db").exists():
            return
        if file == _STANDARD_STREAM:
            raise BadRequest(
                f"There is data in {data}, and the standard input cannot be asked.",
                hint="Give --yes to replace it. The existing data is kept next to it.",
            )
        typer.confirm(f"Replace the data in {data}?", abort=True)

    try:
        with _archive_file(file) as archive:
            restored = restore_backup(data, archive, confirm_replacement)
    finally:
        os.close(lock_fd)
    if as_json:
        former_folder = str(restored.former_folder) if restored.former_folder else None
        say(
            json.dumps(
                {**restored._asdict(), "former_folder": former_folder, "data": str(data)}, indent=2
            )
        )
        return
    made_at = datetime.fromtimestamp(restored.made_at, tz=UTC).astimezone().strftime("%F %T")
    print_paragraph(
        f"{data}: {plural(restored.models, 'model')}, {plural(restored.keys, 'key')} and"
        f" {plural(restored.facts, 'fact')} from {made_at}, written by fitserve {restored.fitserve}"
    )
    if restored.former_folder is not None:
        print_paragraph(f"The earlier data is in {restored.former_folder}")


@contextlib.contextmanager
def _archive_file(file: Path) -> Iterator[Path]:
    """The path of the backup; of the standard input, a copy as long as the context lasts. Raises
    BadRequest, WriteFailedError."""
    if file != _STANDARD_STREAM:
        yield file
        return
    if sys.stdin.isatty():
        raise BadRequest(
            "A terminal cannot give a backup.",
            hint="Read it from a file: `fitserve restore - < fitserve.tar.gz`.",
        )
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as copy:
        try:
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.flush()
        except OSError as error:
            raise WriteFailedError(
                f"The standard input cannot be kept: {error.strerror}.",
                hint="Make room in the folder for temporary files.",
            ) from None
        yield Path(copy.name)
