"""`fitserve search` and `fitserve fits`: models of the Hub, judged for one machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import Json, usage_error
from gateway.cli.terminal import print_message, say, status
from gateway.cli.text_tables import drop_column, print_paragraph, print_table
from gateway.domain.units import format_bytes, plural
from gateway.errors import near_name_hint

Use = Annotated[
    str | None, typer.Option("--for", help="What the model is for: chat, code, vision or embed.")
]
Machine = Annotated[
    str | None,
    typer.Option(help="Cards (h100, 6x4090) or a file, instead of this machine."),
]
Limit = Annotated[int, typer.Option(min=1, max=50, help="Models to read and plan.")]
SuggestionLimit = Annotated[
    int | None,
    typer.Option(
        min=1, max=50, help="Models to read and plan. Default: 30, or all of given folders."
    ),
]
Folders = Annotated[
    list[Path] | None,
    typer.Option("--folder", help="Folder with models on this machine; repeatable."),
]
_MAX_REFUSED_MODELS = 5
_SUGGESTION_LIMIT = 30
_FOLDER_LIMIT = 1000
# The order of suggestions for each use.
_DOWNLOAD_ORDER = "come first, by the bytes that users of the Hub download: downloads times size."
_CHAT_ORDER = (
    f"Models with 32k of context and 15 tokens/s {_DOWNLOAD_ORDER} Earlier releases of one size and"
    " models under an eighth of the largest follow."
)
_USE_ORDERS = {
    "chat": _CHAT_ORDER,
    "vision": _CHAT_ORDER,
    "code": f"Two models made for code lead. {_CHAT_ORDER}",
    "embed": f"Models that take 2,048 tokens {_DOWNLOAD_ORDER}",
}


def search(
    words: Annotated[list[str], typer.Argument(help="Words in the name, such as qwen3 8b.")],
    use: Use = None,
    hardware: Machine = None,
    folder: Folders = None,
    limit: Limit = 10,
    as_json: Json = False,
) -> None:
    """Search the Hub for models, and show which fit. Each one and its quantized variants are
    planned for this machine or --hardware. Without the Hub, the cache is searched. Exit code 3 when
    nothing fits."""
    _show_models(
        _judged_models(" ".join(words), use, hardware, folder, limit),
        as_json=as_json,
        empty_advice="Other words find others",
    )


def fits(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Plan only the models in these folders."),
    ] = None,
    use: Use = None,
    hardware: Machine = None,
    folder: Folders = None,
    limit: SuggestionLimit = None,
    as_json: Json = False,
) -> None:
    """Suggest models that fit this machine, the best first. The Hub's trending and most
    downloaded models of its size are planned for this machine or --hardware; for chat without
    --for. Exit code 3 when nothing fits."""
    if places:
        folders = [*places, *(folder or ())]
        folder_limit = limit or _FOLDER_LIMIT
        models = _judged_models("", use, hardware, folders, folder_limit, asks_hub=False)
        advice = "Without `--for`, all models of the folders count" if use else _CONFIG_ADVICE
        _show_models(models, as_json=as_json, empty_advice=advice)
        return
    use = use or "chat"
    _show_models(
        _judged_models("", use, hardware, folder, limit or _SUGGESTION_LIMIT),
        as_json=as_json,
        empty_advice="`fitserve fits FOLDER` plans the models of a folder",
        order_words=_USE_ORDERS[use],
    )


def _judged_models(
    words: str,
    use: str | None,
    hardware: str | None,
    folders: list[Path] | None,
    limit: int,
    *,
    asks_hub: bool = True,
) -> list[Any]:
    """Models of the Hub and of folders, with their plans for the machine or refusals."""
    from gateway.planner.service.model_finder import (
        USES,
        ModelFinder,
        ModelSearch,
        find_models,
        fitting_parameters,
    )
    from gateway.planner.service.offline import OfflinePlanner

    if use is not None and use not in USES:
        usage_error(f"--for takes {', '.join(USES)}, not {use[:80]!r}{near_name_hint(use, USES)}.")
    planner = OfflinePlanner.read_environment()
    machine = planner.machine(hardware)
    with status() as show_status:
        show_status("Searching for models")
        parameters = None if words else fitting_parameters(machine[1], use)
        models, note = find_models(
            planner.hub,
            ModelSearch(
                words=words,
                use=use,
                limit=limit,
                folders=tuple(folders or ()),
                parameters=parameters,
                asks_hub=asks_hub,
            ),
        )
        changes = sys.stderr.isatty()

        def report(phase: str, count: int, total: int) -> None:
            # Each phase is one line in a pipe.
            if total and (changes or not count):
                count_words = f"{count} of " if changes else ""
                show_status(f"{phase.capitalize()} {count_words}{plural(total, 'model')}")

        judged_models = ModelFinder(planner, machine, use, report).judge(
            models, sorts_by_size=not words
        )
    planner.profiles.documents.save()
    if note:
        print_message(f"note: {note}")
    return judged_models


def _show_models(
    models: list[Any], *, as_json: bool, empty_advice: str, order_words: str = ""
) -> None:
    """Print the models; exit code 3 where none fits.

    empty_advice: a way to models that fit, where none does.
    order_words: reasons for the order; with them, each base model has one row, its best form.
    """
    fitting_models = [model for model in models if model.fits]
    if as_json:
        say(json.dumps([model.fields() for model in models], indent=2))
    else:
        best_by_base = {model.base: model for model in reversed(fitting_models)}
        rows = [
            model
            for model in fitting_models
            if not order_words or best_by_base[model.base] is model
        ]
        empty_words = (
            f"No model was found that fits. {empty_advice}, and `--hardware` plans for another"
            " machine."
        )
        refused_models = [model for model in models if not model.fits]
        _show_table(rows, refused_models, empty_words, order_words)
    if not fitting_models:
        raise typer.Exit(3)


_CONFIG_ADVICE = "A folder of a model holds config.json"


def _show_table(
    fitting_models: list[Any], refused_models: list[Any], empty_words: str, order_words: str
) -> None:
    """Print the models that fit as a table, and below them the refused ones."""
    rows = [
        (
            model.name,
            f"{model.context:,}",
            f"{model.tokens_s:,g}" if model.tokens_s is not None else "-",
            model.gpus or "CPU",
            format_bytes(model.weights_bytes),
            model.form,
        )
        for model in fitting_models
    ]
    head = ("MODEL", "CONTEXT", "TOK/S", "GPUS", "SIZE", "FORM")
    print_table(
        *drop_column(head, rows, "GPUS", ("CPU",)),
        empty=empty_words,
        optional=("FORM", "SIZE"),
    )
    if refused_models:
        say(f"\nThese do not fit ({len(refused_models)})")
    for model in refused_models[:_MAX_REFUSED_MODELS]:
        print_paragraph(f"{model.name}: {model.why}", indent=4, first="  ")
    if len(refused_models) > _MAX_REFUSED_MODELS:
        say(f"  {len(refused_models) - _MAX_REFUSED_MODELS} more; --json has all")
    if fitting_models:
        say("")
        source = shlex.quote(fitting_models[0].source)
        print_paragraph(
            f"`fitserve run {source}` serves the first, and `fitserve plan` shows why a model fits"
            " or not. TOK/S is the expected speed of a single request."
        )
        if order_words:
            print_paragraph(f"{order_words} `fitserve search NAME` shows every form of a model.")
