"""Models that a search found, each judged by the planner for one machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.domain import Decision, Hardware, ModelSpec, Plan, Quant, Wish
from gateway.domain.record import FrozenRecord
from gateway.errors import FitserveError
from gateway.models.catalog.hub import Hub, HubUnreachable
from gateway.models.catalog.hub_search import (
    USES,
    FoundModel,
    Use,
    cached_models,
    models_in,
    quantized_variants,
    search_hub,
)
from gateway.models.media import media_of
from gateway.planner.refusal import cause
from gateway.planner.sizes import lacks, wanted_context

if TYPE_CHECKING:
    from gateway.planner.service.offline import OfflinePlanner

__all__ = ["USES", "ModelFinder", "ModelSearch", "find_models"]

# Seconds for all reads, reads at once, and quantized variants of a model that are read.
_LIMIT_S, _CONCURRENT_READS, _MAX_VARIANTS = 60.0, 8, 3
# Slower answers than people read are no suggestion (tokens/s alone).
_READING_SPEED = 10.0


class JudgedModel(FrozenRecord, frozen=True):
    """A model with the planner's verdict.

    form: the quantization of its weights. tokens_s: of one request alone; None: unknown. why: the
    refusal; "": it fits. weights_bytes: of all ranks.
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

    @property
    def fits(self) -> bool:
        return not self.why

    def fields(self) -> dict[str, Any]:
        """The fields for JSON."""
        return {"fits": self.fits} | {
            name: value for name, value in self.as_dict().items() if name != "rank"
        }


class ModelSearch(NamedTuple):
    """A search. words: in the names; "": any. use: None is any. limit: models of the Hub, of its
    cache, and of the folders, each. folders: on this machine, with models."""

    words: str
    use: Use | None
    limit: int
    folders: tuple[Path, ...] = ()


def find_models(hub: Hub, search: ModelSearch) -> tuple[list[FoundModel], str]:
    """The models of folders and the Hub, and "".

    Without an answer of the Hub: those of folders and its cache on this machine, and the reason.
    Raises BadModel, BadRequest.
    """
    folders = models_in(search.folders, search.words)[: search.limit]
    try:
        return [*folders, *search_hub(hub, search.words, search.use, search.limit)], ""
    except HubUnreachable as error:
        return [*folders, *cached_models(hub, search.words)[: search.limit]], error.message


class ModelFinder:
    """Judges found models for one machine."""

    def __init__(
        self, planner: OfflinePlanner, machine: tuple[str, Hardware], use: Use | None
    ) -> None:
        """machine: its name and the machine. use: what the models must be able to do."""
        self._planner, self._machine, self._use = planner, machine, use
        self._end_s = time.monotonic() + _LIMIT_S

    def judge(self, candidates: Sequence[FoundModel], *, by_size: bool) -> list[JudgedModel]:
        """The models and their quantized variants: of each base model the best form first.

        by_size: base models by their size as far as this machine serves them well, else in the
        order given. Models that do not fit come last. Models of another use are left out.
        """
        names = {model.name for model in candidates}
        variants = [
            variant
            for variant in self._variants([model for model in candidates if not model.base])
            if variant.name not in names
        ]
        models = [*candidates, *variants]
        specs = self._read(models)
        judged = [
            self._judge_one(model, specs[model.name])
            for model in models
            if self._is_for_use(specs[model.name])
        ]
        return _group(judged, by_size=by_size)

    def _variants(self, bases: Sequence[FoundModel]) -> list[FoundModel]:
        """Quantized variants of repositories; a Hub that does not answer has none."""

        def list_variants(model: FoundModel) -> list[FoundModel]:
            return quantized_variants(self._planner.hub, model.name, _MAX_VARIANTS)

        answers = self._call_in_threads(
            list_variants, [model for model in bases if model.is_remote]
        )
        return [variant for answer in answers if isinstance(answer, list) for variant in answer]

    def _read(self, models: Sequence[FoundModel]) -> dict[str, ModelSpec | FitserveError]:
        """The specs by name, or why there is none."""
        answers = self._call_in_threads(lambda model: self._planner.spec(_wish(model)), models)
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
        return chats and (self._use != "vision" or "image" in media_of(spec.config))

    def _judge_one(self, model: FoundModel, spec: ModelSpec | FitserveError) -> JudgedModel:
        judged = JudgedModel(model.name, model.source, model.base or model.name)
        if isinstance(spec, FitserveError):
            return judged.evolve(why=spec.message)
        wish = _wish(model)
        try:
            decision = self._planner.decide_on(wish, *self._machine)
        except FitserveError as error:
            return judged.evolve(why=error.message)
        if not decision.plans:
            return judged.evolve(why=cause(decision), form=_form(spec.quant))
        return _with_plan(judged, decision, spec, wish)


def _wish(model: FoundModel) -> Wish:
    return Wish(name="plan", source=model.source)


def _with_plan(judged: JudgedModel, decision: Decision, spec: ModelSpec, wish: Wish) -> JudgedModel:
    plan = decision.plans[0]
    bytes_in_all = plan.memory.weights_bytes * max(1, len(plan.gpus))
    tokens_s = plan.speed.stream.value if plan.speed is not None and spec.generates else None
    is_slow = tokens_s is not None and tokens_s < _READING_SPEED
    shortcomings = (*lacks(plan, wanted_context(spec, wish, {})), is_slow)
    return judged.evolve(
        form=_form(spec.quant)
        if not plan.quantizes_weights
        else f"{plan.quantization.value} at load",
        context=plan.max_model_len.value,
        tokens_s=tokens_s,
        gpus=_gpus(plan),
        engine=str(plan.engine),
        weights_bytes=bytes_in_all,
        rank=(shortcomings, plan.verdict == "degraded", -bytes_in_all, _size_class(plan, spec)),
    )


def _gpus(plan: Plan) -> int:
    return len(plan.gpus) * plan.replicas.value


def _form(quant: Quant | None) -> str:
    return quant.method if quant is not None else "unquantized"


def _size_class(plan: Plan, spec: ModelSpec) -> int:
    """The size of a model with 16-bit weights, in doublings. Close sizes are equal."""
    size = plan.memory.weights_bytes * max(1, len(plan.gpus)) * 16 / _bits(spec.quant)
    return round(math.log2(max(size, 1)))


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
    inner = [
        value
        for name, value in block.items()
        if isinstance(value, dict) and "activation" not in name and "kv_cache" not in name
    ]
    return [item for value in inner for item in (value, *_weight_blocks(value))]


def _group(judged: Sequence[JudgedModel], *, by_size: bool) -> list[JudgedModel]:
    """The forms of each base model together, best first; models that do not fit last."""
    groups: dict[str, list[JudgedModel]] = {}
    for model in judged:
        groups.setdefault(model.base, []).append(model)
    fitting = [
        sorted((model for model in group if model.fits), key=lambda model: model.rank)
        for group in groups.values()
    ]
    ordered = [group for group in fitting if group]
    if by_size:
        ordered.sort(key=lambda group: (any(group[0].rank[0]), -group[0].rank[-1]))
    best = [model for group in ordered for model in group]
    return [*best, *(model for model in judged if not model.fits)]
