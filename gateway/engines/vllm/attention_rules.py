"""Requirements of the attention backends of one engine version: attention.yaml. Pure.

    VllmBackend (from a profile) + Subject (one layer on one rank) -> every criterion that the
    backend fails, with the reason

The criteria are those of the engine's own `validate_configuration`, one field of VllmBackend for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Self

from gateway.domain import Value
from gateway.domain.base import Field, model_validator
from gateway.engines.common.rules.check import Check, RuleFile, UnknownSubject, first_refusal
from gateway.engines.common.rules.subject import AttentionQuery, AttentionRole, Subject

# Tokens of a block, the engine's default first.
_BLOCKS = (16, 32, 64, 128, 256)

Trait = Literal["sinks", "multimodal_prefix", "sliding_window", "non_causal"]


class Workspace(Value):
    """Buffers that a backend keeps on every rank, where `match` holds for the layer."""

    match: Check = Check()
    shared_bytes: int = Field(0, description="bytes of the buffer that prefill needs")
    query_bytes: int = Field(
        0, description="bytes for each value of a full batch's queries, where these are more"
    )
    decode_bytes: int = Field(0, description="bytes of a buffer that only decoding needs")
    graph_bytes: int = Field(
        0, description="bytes for each batch size of decoding with a CUDA graph"
    )
    has_draft_graphs: bool = Field(
        False,
        description="steps that verify drafted tokens have whole CUDA graphs",
        alias="draft_graphs",
    )


class VllmBackend(Value):
    """The requirements of one attention backend.

    Source: `validate_configuration` of the backend. A trait that `traits` does not name is refused.
    """

    source: str = ""
    supports_mla: bool = Field(False, alias="mla")
    supports_sparse: bool = Field(False, alias="sparse")
    package: str | None = None  # without which the backend cannot be imported
    head: Check | None = None
    dtype: Check | None = None
    kv: Check | None = None
    block: tuple[Check, ...] = ()
    capability: Check | None = None
    roles: tuple[AttentionRole, ...] = ("decoder",)
    # An empty check holds everywhere.
    traits: dict[Trait, Check] = Field(default_factory=dict, alias="takes")
    combination: tuple[Check, ...] = ()
    workspaces: tuple[Workspace, ...] = ()  # the first that matches holds
    # These refusals come after selection: in the constructor, or as kernels are compiled.
    starts: Check = Check()
    starts_source: str = ""


def refusals(
    backend: VllmBackend, needed_traits: Iterable[Trait], subject: Subject
) -> Iterator[tuple[str, str]]:
    """Every criterion that the backend fails, and why. `needed_traits`: the traits that this
    version looks at."""
    query = _query_of(subject)
    if backend.package is not None and backend.package not in subject.packages:
        yield "package", f"the package {backend.package} is not installed"
        return
    for name in ("head", "dtype", "kv", "capability"):
        check: Check | None = getattr(backend, name)
        if check is not None and (reason := check.refusal(subject)):
            yield name, reason
    if reason := first_refusal(backend.block, subject):
        yield "block", reason
    if backend.supports_mla != (query.kind == "mla"):
        yield "mla", "is for MLA" if backend.supports_mla else "is not for MLA"
    if backend.supports_sparse != query.sparse:
        yield (
            "sparse",
            "is for sparse attention" if backend.supports_sparse else "is not for sparse attention",
        )
    if query.role not in backend.roles:
        yield "role", f"does not do {query.role.replace('_', '-')} attention"
    yield from _trait_refusals(backend, needed_traits, subject)
    if reason := first_refusal(backend.combination, subject):
        yield "combination", reason


def _trait_refusals(
    backend: VllmBackend, needed_traits: Iterable[Trait], subject: Subject
) -> Iterator[tuple[str, str]]:
    """The traits of the layers that the backend does not take, and why."""
    query = _query_of(subject)
    for trait in needed_traits:
        has_trait, text = _TRAITS[trait]
        if not has_trait(query):
            continue
        if trait not in backend.traits:
            yield trait, f"does not take {text}"
        elif reason := backend.traits[trait].refusal(subject):
            yield trait, reason if isinstance(reason, UnknownSubject) else f"{text}: {reason}"


def preferred_block(backend: VllmBackend, subject: Subject) -> int | None:
    """The least tokens of a block that the backend takes. get_preferred_block_size in
    vllm/v1/attention/backend.py."""
    if not backend.block:
        return _BLOCKS[0]
    query = _query_of(subject)
    blocks = (
        (size, subject._replace(attention=query._replace(block_size=size))) for size in _BLOCKS
    )
    return next((size for size, check in blocks if not first_refusal(backend.block, check)), None)


def _query_of(subject: Subject) -> AttentionQuery:
    assert subject.attention is not None  # noqa: S101 - of attention alone
    return subject.attention


_TRAITS: dict[Trait, tuple[Callable[[AttentionQuery], bool], str]] = {
    "sinks": (lambda q: q.has_sinks, "attention sinks"),
    "multimodal_prefix": (lambda q: q.multimodal_prefix, "image tokens that see one another"),
    "sliding_window": (lambda q: q.kind == "sliding", "a sliding window"),
    "non_causal": (lambda q: not q.causal, "non-causal layers"),
}


# --- the file ---


class BackendOrder(Value):
    """The engine's list of backends, best first, for the layers and GPUs that match."""

    match: Check
    backends: tuple[str, ...]


class VisionBackend(Value):
    """A backend of vision towers, which have a list of their own."""

    backend: str
    requires: Check = Check()


class FlashVersion(Value):
    match: Check
    version: Literal[2, 3, 4]


class OverrideStep(Value):
    """Settings of the engine if `match` holds for the layer with the largest head; neither field:
    nothing."""

    match: Check = Check()
    backend: str | None = None
    flash_attention: int | None = None
    # A user may force these backends without losing `flash_attention`.
    forced_backends: tuple[str, ...] = Field((), alias="with_forced")


class OwnBackend(Value):
    """A backend that a model's own class names, and the GPUs that it takes."""

    backend: str
    requires: Check


class ModelOverride(Value):
    """Settings of the engine for these architectures before selection: the first matching step, if
    no backend is forced."""

    architectures: tuple[str, ...]
    source: str = ""
    # The override needs layers that differ in head size.
    needs_mixed_heads: bool = Field(False, alias="mixed_heads")
    min_head_dim: int = Field(0, alias="above_head")  # only where the largest head is larger
    steps: tuple[OverrideStep, ...]


class AttentionRules(RuleFile):
    """The rules of profiles/engines/KIND/VERSION/attention.yaml.

    Sources are files of that version, with lines.
    """

    packages: tuple[str, ...]  # of those that the rules ask for, the packages of the official image
    asks: tuple[Trait, ...]  # the traits that selection looks at, and no others
    asks_source: str = ""
    kv_dtypes: tuple[str, ...]  # of the KV cache; with any other the answer is "unknown"
    orders: tuple[BackendOrder, ...]
    orders_source: str = ""
    backends: dict[str, VllmBackend]
    vision: tuple[VisionBackend, ...]
    vision_source: str = ""
    flash_versions: tuple[FlashVersion, ...]
    flash_versions_source: str = ""
    flash_backends: tuple[str, ...]  # backends whose layers ask for a version of FlashAttention
    recurrent: dict[str, str]
    recurrent_source: str = ""
    # The backend that an architecture's own class names, by architecture and kind of recurrent
    # layer.
    own_recurrent: dict[str, dict[str, str]] = Field(default_factory=dict)
    own_recurrent_source: str = ""
    multimodal_prefix: tuple[str, ...]  # model types
    multimodal_prefix_source: str = ""
    # The value of use_bidirectional_attention where config.json does not set it, by model type.
    vision_prefix: dict[str, str] = Field(default_factory=dict)
    vision_prefix_source: str = ""
    models: tuple[ModelOverride, ...] = ()
    own_backends: tuple[str, ...] = ()  # architectures whose layers bring backends that no list has
    own_backends_source: str = ""
    # The backends of an architecture of own_backends, in the order of its class.
    own_choices: dict[str, tuple[OwnBackend, ...]] = Field(default_factory=dict)
    own_choices_source: str = ""
    # The vision tower of these architectures asks torch itself for attention.
    plain_towers: tuple[str, ...] = ()
    plain_towers_source: str = ""

    def order(self, subject: Subject) -> tuple[str, ...]:
        """The engine's list for this layer on this GPU."""
        return next(
            (order.backends for order in self.orders if order.match.refusal(subject) is None), ()
        )

    @model_validator(mode="after")
    def _check_listed_rows(self) -> Self:
        listed_names = {name for order in self.orders for name in order.backends}
        listed_names |= {
            step.backend for model in self.models for step in model.steps if step.backend
        }
        if unknown_names := sorted(listed_names - set(self.backends)):
            raise ValueError(
                f"{', '.join(unknown_names)} is listed, but `backends` does not describe it"
            )
        return self
