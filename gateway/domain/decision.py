"""The planner's answer: plans, rejected candidates, and forms that would fit."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.domain.base import ConfigDict, Field
from gateway.domain.plan import (
    LayerAttention,
    LayerKernel,
    Memory,
    Plan,
    Question,
    Speed,
    StartSettings,
)
from gateway.domain.sharing import Offer, Promise
from gateway.domain.start import ExpectedStart
from gateway.domain.value import EngineRef, Value


class RejectedPlan(Value):
    """A rejected candidate.

    verdict: the gate.
    reasons: the reasons in words.

    Other fields have the plan so far.
    """

    engine: EngineRef
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = Field(1, exclude_if=lambda groups: groups == 1)
    verdict: str
    layer: str | None = Field(None, description="the layer that no kernel computes")
    reasons: tuple[str, ...]
    source: str
    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    question: Question | None = Field(
        None, description="question whose answer could overrule the refusal; None: no answer could"
    )


class RuleGap(Value):
    """A contradiction between an engine's own answer, which wins, and the rules that forecast it.

    rules: the version of the rules.
    source: the source of the answer.
    model: its architecture and shapes.
    subject: a refusal, a kernel, a backend or bytes.
    """

    engine: str
    rules: str
    source: str
    capability: str | None
    model: str
    argv: tuple[str, ...]
    subject: str
    forecast: str
    answer: str


class EngineAvailability(Value):
    """An engine version with its availability here. Decisions use available versions only.

    gain: how many more tokens/s its best plan should give than the best one here (0.2: a fifth
        more).
    gain_text: the same in words.
    """

    engine: str = Field(description='"kind==version"')
    is_available: bool
    reason: str
    remedy: str = Field("", description="the command, or the setting, that brings it here")
    gain: float | None = None
    gain_text: str = ""


class ModelForm(Value):
    """A quantized form of a model that this machine could serve.

    source: its repository; "": none is known, but the shape would fit.
    """

    quantization: str = Field(description="how its weights are quantized")
    source: str = ""
    weights_bytes: int = Field(description="bytes of all ranks together")
    context: int
    engine: str = Field(description='"kind==version"')
    gpus: int


class FitAdvice(Value):
    """The changes that would give a plan where there is none. Bytes are of all ranks together."""

    weights_bytes: int = Field(description="bytes of the model's weights; 0: not known")
    room_bytes: int = Field(description="the largest weights that have room now")
    room_empty_bytes: int | None = Field(
        None, description="and without the engines that run; None: none do"
    )
    fits_empty: bool = Field(False, description="whether the model has a plan without them")
    context: int | None = Field(
        None,
        description=(
            "where a context was demanded: the longest that fits; None: none was, or none fits"
        ),
    )
    change: str = Field(
        "",
        description="a change of one option that was planned and has a plan, as a phrase",
    )
    forms: tuple[ModelForm, ...] = Field((), description="forms of the model that fit, best first")


class Decision(Value):
    """The planner's answer (schema fitserve.plan/1). plans: best first."""

    schema_: Literal["fitserve.plan/1"] = Field("fitserve.plan/1", alias="schema")
    model: str
    hardware: str
    plans: tuple[Plan, ...] = ()
    why_gpus: str = Field(
        "",
        description=(
            "why the first plan takes this many GPUs: its gains in speed, context and requests over"
            " the neighbouring numbers"
        ),
    )
    gpu_choice: str = Field(
        "",
        exclude_if=lambda words: not words,
        description="GPUs that the first plan takes and leaves, and the plans with fewer and more",
    )
    rejected: tuple[RejectedPlan, ...] = ()
    gaps: tuple[RuleGap, ...] = Field(
        (), description="where engines that were asked contradict the rules"
    )
    engines: tuple[EngineAvailability, ...] = Field(
        (), description="which can be started on this machine, and what the others would give"
    )
    taken_offers: tuple[Offer, ...] = Field(
        (), description="memory that other models give before the first plan is started"
    )
    would_fit: FitAdvice | None = Field(None, description="where there is no plan: what would fit")
    why_nodes: str = Field(
        "",
        exclude_if=lambda reason: not reason,
        description=("nodes of a copy of the first plan in a cluster, with the reason in figures"),
    )
    wait_reason: str = Field(
        "",
        exclude_if=lambda reason: not reason,
        description=("conditions that a plan over nodes waits for, in a cluster without a plan"),
    )
    holders: tuple[Promise, ...] = Field(
        (), description="where there is no plan: which models hold how much of which GPU"
    )
    refusal: tuple[str, ...] = Field(
        (), description="where there is no plan: the cause, the cure, and forms that fit, in words"
    )
    start: ExpectedStart | None = Field(
        None, description="the start of the first plan; None: this machine starts none"
    )

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    def __repr__(self) -> str:
        """One line for a notebook. `model_dump()` has all fields."""
        best_text = repr(self.plans[0]) if self.plans else " ".join(self.refusal[:1]) or "no plan"
        counts = f"{len(self.plans)} plans, {len(self.rejected)} rejected"
        return f"<Decision for {self.model} on {self.hardware}: {counts}; {best_text}>"

    def __str__(self) -> str:
        """The tables that `print` shows."""
        from gateway.domain.decision_html import decision_text  # not before a program prints

        return decision_text(self)

    def _repr_html_(self) -> str:
        """The tables that a notebook shows."""
        from gateway.domain.decision_html import decision_html  # not before a notebook asks

        return decision_html(self)


class Rival(Value):
    """A plan that should be better than the running one. gain: the factor, by the model's goal."""

    speed: Speed = Field(description="measurements of the running plan")
    plan: Plan
    gain: float


class OpenQuestions(NamedTuple):
    """The questions of a decision that one engine can answer. starts: of the plans that some of
    them are about."""

    engine: EngineRef
    questions: tuple[Question, ...]
    starts: tuple[tuple[Question, StartSettings], ...] = ()
