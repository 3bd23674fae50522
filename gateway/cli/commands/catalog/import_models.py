"""`fitserve import`: a models file from the file of another program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import print_message, say
from gateway.domain.units import format_bytes, plural
from gateway.errors import BadRequest, WriteFailedError
from gateway.visible import visible_line

_MAX_FILE_BYTES = 1024 * 1024


def import_models(
    file: Annotated[
        Path, typer.Argument(help="llama-swap's config, a Modelfile, or a compose file.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; default: the standard output."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a models file from FILE of llama-swap, Ollama or Docker Compose. Lines without an
    equal here are printed on the standard error. Exit code 3 when no model can be taken over."""
    imported = _read_models(file)
    for notice in imported.notices:
        print_message(visible_line(f"{file}:{notice.line}: {notice.text}"))
    if as_json:
        notices = [notice._asdict() for notice in imported.notices]
        say(json.dumps({"models": imported.models, "notices": notices}, indent=2))
    elif imported.models:
        _write(file, output, imported.models)
    if not imported.models:
        print_message(f"fitserve: {file} has no model that can be taken over.")
        raise typer.Exit(3)


def _read_models(file: Path) -> Any:
    """The models and notices of the file. Raises BadRequest."""
    from gateway.engines.common.open_flags import closing_reason
    from gateway.file_reading import read_file as read_bytes
    from gateway.machine.probe import probe
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings
    from gateway.wishes.imported.readers import EngineKnowledge, read_file

    try:
        content = read_bytes(file, _MAX_FILE_BYTES + 1)
        is_whole = len(content) <= _MAX_FILE_BYTES
        text = content.decode("utf-8-sig") if is_whole else ""
        reason = "" if is_whole else f"it has more than {format_bytes(_MAX_FILE_BYTES)}"
    except (OSError, UnicodeDecodeError) as error:
        text = ""
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
    if reason:
        raise BadRequest(f"{file} cannot be read: {reason}.", hint="Name a readable text file.")
    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    engines = {engine.kind: engine for engine in reversed(profiles.engines(device="cuda"))}
    name = file.stem if file.stem.lower() != "modelfile" else file.absolute().parent.name
    has_gpu = any(gpu.reservation_reason is None for gpu in probe(settings.data).gpus)
    knowledge = EngineKnowledge(engines, closing_reason, profiles.engine, has_gpu)
    imported = read_file(text, name, knowledge)
    if imported is None:
        raise BadRequest(
            f"{file} is neither a config of llama-swap, nor a Modelfile, nor a compose file.",
            hint="llama-swap's has `models` with `cmd`, a compose file `services`, a Modelfile"
            " FROM.",
        )
    return imported


def _write(file: Path, output: Path | None, models: dict[str, Any]) -> None:
    """Write the models file. Raises BadRequest for an existing file, WriteFailedError."""
    import yaml

    text = yaml.safe_dump({"models": models}, sort_keys=False, allow_unicode=True, width=100)
    text = f"# Written by `fitserve import {visible_line(file.name)}`.\n{text}"
    if output is None:
        say(text.rstrip())
        return
    try:
        with output.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise BadRequest(f"{output} exists already.", hint="Choose another name.") from None
    except OSError as error:
        raise WriteFailedError(
            f"{output} cannot be written: {error.strerror}.",
            hint="Choose a path in a folder that you can write.",
        ) from None
    print_message(
        f"{plural(len(models), 'model')} written to {output}. `fitserve config check {output}`"
        f" checks the file, `fitserve apply {output}` serves it."
    )
