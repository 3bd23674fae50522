"""Models that a search found, each judged by the planner for one machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gateway.domain import Decision, Hardware, ModelSpec, Quant, Wish
from gateway.domain.record import FrozenRecord
from gateway.domain.units import plural
from gateway.errors import FitserveError
from gateway.models.catalog.hub import Hub, HubUnreachable
from gateway.models.catalog.hub_search import (
    USES,
    FoundModel,
    Use,
    cached_models,
    daily_downloads,
    models_in,
    quantized_variants,
    search_hub,
)
from gateway.models.media import read_media
from gateway.planner.comparison import gpus_of
from gateway.planner.refusal_words import cause
from gateway.planner.sizes import COMFORTABLE_CONTEXT, shortcomings, wanted_context

if TYPE_CHECKING:
    from gateway.planner.service.offline import OfflinePlanner

__all__ = ["USES", "ModelFinder", "ModelSearch", "find_models", "fitting_parameters"]

# Seconds for all reads, concurrent reads, and quantized variants of a model that are read.
_LIMIT_S = 60.0
_CONCURRENT_READS = 8
_MAX_VARIANTS = 3
# Tokens/s of a single request. People read ten, and a model thinks before it answers.
_CHAT_SPEED = 15.0
# Tokens that a suggestion takes: a conversation with files, or a page to embed.
_CHAT_CONTEXT = COMFORTABLE_CONTEXT
_PASSAGE_TOKENS = 2048
# A model below this part of the largest that fits leaves most of the machine idle.
_SIZE_PARTS = 8
# Models made for code that come before general ones.
_CODE_LEADERS = 2
# The fewest bytes of a parameter, and the part of the largest model that is still asked for.
_PARAMETER_BYTES = 0.5
_SIZE_RANGE = 16


SearchPhase = Literal["reading", "planning"]
SearchReport = Callable[[SearchPhase, int, int], None]
"""A phase of a search, the number of finished models, and the number of all models. Calls never
overlap."""


class JudgedModel(FrozenRecord, frozen=True):
    """A model with the planner's verdict.

    form: the quantization of its weights.
    tokens_s: speed of a single request; None: unknown.
    why: the refusal; "": it fits.
    weights_bytes: bytes of the weights on all ranks.
    rank: its position among the forms of its base model.
    size: bytes of the model with 16-bit weights.
    is_short: whether context or speed is too low for a suggestion.
    """

    name: str
    source: str
    base: str
    why: str = ""
    form: str = ""
    context: int = 0
    tokens_s: float | None = None
    gpus: int = 0
    engine: str = ""
    weights_bytes: int = 0
    rank: tuple[Any, ...] = ()
    size: float = 0.0
    is_short: bool = False

    @property
    def fits(self) -> bool:
        return not self.why

    def fields(self) -> dict[str, Any]:
        """The fields for JSON."""
        fields = self.as_dict()
        return {"fits": self.fits} | {
            name: fields[name] for name in fields if name not in _ORDER_FIELDS
        }


_ORDER_FIELDS = {"rank", "size", "is_short"}


class ModelSearch(NamedTuple):
    """A search.

    words: the words that a model's name contains; "": any name.
    use: None is any.
    limit: models of the Hub, of its cache, and of the folders, each.
    folders: folders of models on this machine.
    parameters: the fewest and the most of a model of the Hub.
    asks_hub: whether the Hub is searched, and not only the folders.
    """

    words: str
    use: Use | None
    limit: int
    folders: tuple[Path, ...] = ()
    parameters: tuple[int, int] | None = None
    asks_hub: bool = True


def fitting_parameters(machine: Hardware, use: Use | None) -> tuple[int, int]:
    """The fewest and the most parameters of a model worth asking for: the most that this machine's
    memory holds with 4-bit weights, and a sixteenth of that. Embedding models may be small."""
    memory = sum(gpu.total_bytes or 0 for gpu in machine.gpus) or machine.ram_total_bytes
    max_parameters = int(memory / _PARAMETER_BYTES)
    return (0 if use == "embed" else max_parameters // _SIZE_RANGE), max_parameters


def find_models(hub: Hub, search: ModelSearch) -> tuple[list[FoundModel], str]:
    """The models of folders and the Hub, and a note on missing ones; "": none is missing.

    Without an answer of the Hub: those of folders and its cache on this machine.
    Raises BadModel, BadRequest.
    """
    everything = models_in(search.folders, search.words)
    folders = everything[: search.limit]
    note = _omission_note(len(everything) - len(folders))
    if not search.asks_hub:
        return folders, note
    try:
        return [
            *folders,
            *search_hub(hub, search.words, search.use, search.limit, search.parameters),
        ], note
    except HubUnreachable as error:
        models_of_cache = cached_models(hub, search.words)
        hub_note = f"Only models on this machine are listed: {error.message}"
        notes = filter(
            None, (hub_note, note or _omission_note(len(models_of_cache) - search.limit))
        )
        return [*folders, *models_of_cache[: search.limit]], " ".join(notes)


def _omission_note(count: int) -> str:
    """The note on models on this machine that are too many for one search; "": none is."""
    if count <= 0:
        return ""
    verb = "is" if count == 1 else "are"
    models_text = f"{plural(count, 'model')} on this machine"
    return f"{models_text} {verb} left out. Words of a name narrow the search."


class ModelFinder:
    """Judges found models for one machine."""

    def __init__(
        self,
        planner: OfflinePlanner,
        machine: tuple[str, Hardware],
        use: Use | None,
        report: SearchReport = lambda *_: None,
    ) -> None:
        """machine: its name and the machine.
        use: the tasks and abilities that models must have.
        report: is called for each model that was read or planned.
        """
        self._planner = planner
        self._machine = machine
        self._use = use
        self._report = report
        self._end_s = time.monotonic() + _LIMIT_S

    def judge(
        self, found_models: Sequence[FoundModel], *, sorts_by_size: bool
    ) -> list[JudgedModel]:
        """The models and their quantized variants: of each base model the best form first.

        sorts_by_size: base models as `_sort_suggestions` orders them, else in the order given.
        Models that do not fit come last. Models of another use are left out.
        """
        names = {model.name for model in found_models}
        listed_variants = self._variants([model for model in found_models if not model.base])
        models = [
            *found_models,
            *(
                variant
                for variants in listed_variants
                for variant in variants[:_MAX_VARIANTS]
                if variant.name not in names
            ),
        ]
        specs = self._read_specs(models)
        usable_models = [model for model in models if self._is_for_use(specs[model.name])]
        judged_models: list[JudgedModel] = []
        for model in usable_models:
            self._report("planning", len(judged_models), len(usable_models))
            judged_models.append(self._judge_one(model, specs[model.name]))
        everything = {variant.name: variant for variants in listed_variants for variant in variants}
        everything |= {model.name: model for model in found_models}
        groups, refused_models = _group(judged_models)
        if sorts_by_size:
            groups = _sort_suggestions(groups, list(everything.values()), self._use)
        return [*(model for group in groups for model in group), *refused_models]

    def _variants(self, bases: Sequence[FoundModel]) -> list[list[FoundModel]]:
        """Quantized variants of each repository; a Hub that does not answer has none."""

        def list_variants(model: FoundModel) -> list[FoundModel]:
            return quantized_variants(self._planner.hub, model.name)

        answers = self._call_in_threads(
            list_variants, [model for model in bases if model.is_remote]
        )
        return [answer for answer in answers if isinstance(answer, list)]

    def _read_specs(self, models: Sequence[FoundModel]) -> dict[str, ModelSpec | FitserveError]:
        """The specs by name, or why there is none."""
        lock = Lock()
        count = itertools.count(1)
        is_over = Event()

        def read(model: FoundModel) -> ModelSpec:
            try:
                return self._planner.spec(_wish_for(model))
            finally:
                with lock:
                    # A reader may outlive the time for all of them.
                    if not is_over.is_set():
                        self._report("reading", next(count), len(models))

        self._report("reading", 0, len(models))
        answers = self._call_in_threads(read, models)
        with lock:
            is_over.set()
        return {
            model.name: answer
            if isinstance(answer, ModelSpec | FitserveError)
            else FitserveError("It was not read in time.", hint="Search for fewer models.")
            for model, answer in zip(models, answers, strict=True)
        }

    def _call_in_threads(
        self, call: Callable[[FoundModel], Any], models: Sequence[FoundModel]
    ) -> list[Any]:
        """The answers in order: a value, a FitserveError, or None where there was no time.

        The threads are daemons: a Hub that sends slowly for ever does not keep the command.
        """
        answers: list[Any] = [None] * len(models)
        faults: list[BaseException] = []
        numbered = iter(enumerate(models))

        def read() -> None:
            for number, model in numbered:
                if time.monotonic() >= self._end_s or faults:
                    return
                try:
                    answers[number] = call(model)
                except FitserveError as error:
                    answers[number] = error
                except BaseException as error:  # raised again by the caller
                    faults.append(error)

        readers = [
            Thread(target=read, name="found-model", daemon=True)
            for _ in range(min(_CONCURRENT_READS, len(models)))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, self._end_s - time.monotonic()))
        if faults:
            raise faults[0]
        return list(answers)

    def _is_for_use(self, spec: ModelSpec | FitserveError) -> bool:
        if isinstance(spec, FitserveError) or self._use is None:
            return True
        if self._use == "embed":
            return spec.task == "embed"
        chats = spec.task == "generate" and spec.chat_template is not None
        return chats and (self._use != "vision" or "image" in read_media(spec.config))

    def _judge_one(self, model: FoundModel, spec: ModelSpec | FitserveError) -> JudgedModel:
        judged_model = JudgedModel(model.name, model.source, model.base or model.name)
        if isinstance(spec, FitserveError):
            return judged_model.evolve(why=spec.message)
        wish = _wish_for(model)
        try:
            decision = self._planner.decide_on(wish, *self._machine)
        except FitserveError as error:
            return judged_model.evolve(why=error.message)
        except Exception as error:
            # One odd repository leaves the others their verdicts.
            fault = type(error).__name__
            return judged_model.evolve(
                why=f"The planner failed: {fault}. This is a fault of fitserve."
            )
        if not decision.plans:
            return judged_model.evolve(why=cause(decision), form=_form_name(spec.quant))
        return _attach_plan(judged_model, decision, spec, wish)


def _wish_for(model: FoundModel) -> Wish:
    return Wish(name="plan", source=model.source)


def _attach_plan(
    judged_model: JudgedModel, decision: Decision, spec: ModelSpec, wish: Wish
) -> JudgedModel:
    """The model with the figures of its best plan."""
    plan = decision.plans[0]
    bytes_in_all = plan.memory.weights_bytes * max(1, len(plan.gpus))
    tokens_s = plan.speed.stream.value if plan.speed is not None and spec.generates else None
    is_slow = tokens_s is not None and tokens_s < _CHAT_SPEED
    context = plan.max_model_len.value
    bits = _bits(spec.quant)
    least_context = _CHAT_CONTEXT if spec.generates else _PASSAGE_TOKENS
    plan_shortcomings = (*shortcomings(plan, wanted_context(spec, wish, {})), is_slow)
    return judged_model.evolve(
        form=_form_name(spec.quant)
        if not plan.quantizes_weights
        else f"{plan.quantization.value} at load",
        context=context,
        tokens_s=tokens_s,
        gpus=gpus_of(plan),
        engine=str(plan.engine),
        weights_bytes=bytes_in_all,
        # Answers of 8-bit weights are as good as those of 16-bit ones, and come sooner.
        rank=(
            plan_shortcomings,
            plan.verdict == "degraded",
            -min(bits, 8),
            -(tokens_s or 0.0),
            -bytes_in_all,
        ),
        size=bytes_in_all * 16 / bits,
        is_short=any(plan_shortcomings) or context < least_context,
    )


def _form_name(quant: Quant | None) -> str:
    return quant.method if quant is not None else "unquantized"


def _bits(quant: Quant | None) -> int:
    """The bits of most weights, by a quantization block."""
    if quant is None:
        return 16
    for block in (quant.config, *_weight_blocks(quant.config)):
        for name in ("bits", "num_bits"):
            if type(block.get(name)) is int and 1 <= block[name] <= 16:
                return int(block[name])
    names = f"{quant.method} {quant.config.get('quant_algo', '')}".lower()
    if "4" in names or quant.config.get("load_in_4bit") is True:
        return 4
    return 8


def _weight_blocks(block: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks inside, without those of activations and of the KV cache."""
    inner_blocks = [
        value
        for name, value in block.items()
        if isinstance(value, dict) and "activation" not in name and "kv_cache" not in name
    ]
    return [
        nested_block
        for inner_block in inner_blocks
        for nested_block in (inner_block, *_weight_blocks(inner_block))
    ]


_Group = list[JudgedModel]


def _group(judged_models: Sequence[JudgedModel]) -> tuple[list[_Group], list[JudgedModel]]:
    """The forms of each base model that fit, best first; and the models that do not fit."""
    groups: dict[str, _Group] = {}
    for model in judged_models:
        if model.fits:
            groups.setdefault(model.base, []).append(model)
    fitting_groups = [sorted(group, key=lambda model: model.rank) for group in groups.values()]
    return fitting_groups, [model for model in judged_models if not model.fits]


def _sort_suggestions(
    groups: Sequence[_Group], models: Sequence[FoundModel], use: Use | None
) -> list[_Group]:
    """The base models in the order of suggestions.

    First those with enough context and speed, without a later release of the same size, and not
    much smaller than the largest. Among them by the bytes that users download a day: size times
    downloads of all forms. For code, two models made for code lead. Without downloads, by size.
    """
    usable_groups = [group for group in groups if not group[0].is_short]
    largest_size = max((group[0].size for group in usable_groups or groups), default=0.0)
    downloads = daily_downloads(models)
    model_by_name = {model.name: model for model in models}
    releases = [
        model_by_name[group[0].base] for group in usable_groups if group[0].base in model_by_name
    ]
    older_names = {
        model.name
        for model in releases
        if any(model.is_older_than(release) for release in releases)
    }

    def key(group: _Group) -> tuple[Any, ...]:
        best_model = group[0]
        is_small = use != "embed" and best_model.size * _SIZE_PARTS < largest_size
        usage = downloads.get(best_model.base, 0.0) * best_model.size
        return (
            best_model.is_short,
            best_model.base in older_names,
            is_small,
            -usage,
            -best_model.size,
        )

    ordered_groups = sorted(groups, key=key)
    if use != "code":
        return ordered_groups
    code = {model.base or model.name for model in models if model.is_for_code}
    code_groups = [
        group for group in ordered_groups if group[0].base in code and not any(key(group)[:3])
    ]
    code_groups = code_groups[:_CODE_LEADERS]
    return [*code_groups, *(group for group in ordered_groups if group not in code_groups)]
