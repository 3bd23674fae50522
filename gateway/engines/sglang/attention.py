"""Choice of attention backends in SGLang, by the rules of one version (attention_backends.yaml).
Pure.

BackendRules + Subject (the whole model on a GPU) + ForcedBackends -> Selection
BackendRules + AttentionGroups of a model -> one LayerAttention for each

SGLang decides once for the whole model, not for each layer: by needs of the model, else by the GPU,
for prefill and for decoding; then the tokens of a page. A forced backend wins, and is checked like
the engine's own choice. `select` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from gateway.domain import AttentionGroup, LayerAttention, Refusal, Scalar, Value
from gateway.domain.units import GIB
from gateway.engines.common.rules.check import Check
from gateway.engines.common.rules.subject import AttentionQuery, Subject, numbers
from gateway.engines.sglang.attention_rules import (
    BackendLimit,
    BackendOption,
    BackendRules,
    BackendStep,
    SglangBackend,
)
from gateway.models.rank import Rank

# Forced option -> its flag.
_FLAGS = {
    "attention": "attention-backend",
    "prefill": "prefill-attention-backend",
    "decode": "decode-attention-backend",
}


class ForcedBackends(Value):
    """Options that the user forces: --attention-backend, --prefill-attention-backend,
    --decode-attention-backend, --page-size."""

    attention: str | None = None
    prefill: str | None = None
    decode: str | None = None
    page: int | None = None


class Selection(Value):
    """The attention backends of a plan, or the reason that there are none.

    `none`: the engine refuses the model. `unknown`: these rules do not describe the model.
    """

    prefill: str | None = None
    decode: str | None = None
    page: int | None = None
    refused: tuple[Refusal, ...] = ()
    status: Literal["ok", "none", "unknown"]
    reason: str = ""


@lru_cache(maxsize=1024)  # the same model is judged for every number of ranks
def select(rules: BackendRules, model: Subject, forced_backends: ForcedBackends) -> Selection:
    """The engine's selection for this model on this GPU."""
    rules = _deciding_rules(rules, model)
    if gap := _description_gap(rules, model, forced_backends):
        return _unknown_selection(gap)
    chosen_names: dict[BackendOption, str | None] = {
        "attention": forced_backends.attention,
        "prefill": forced_backends.prefill,
        "decode": forced_backends.decode,
    }
    page = _apply_steps(rules.models, chosen_names, forced_backends.page, model)
    choice_reason = _choice_reason(forced_backends, chosen_names, model)
    refusals = _limit_refusals(rules.limits, chosen_names, page, model)
    if chosen_names["prefill"] is not None and chosen_names["prefill"] == chosen_names["decode"]:
        chosen_names["attention"] = chosen_names["prefill"]
    page = _apply_steps(rules.defaults, chosen_names, page, model)
    if unknown_names := sorted(
        {name for name in chosen_names.values() if name} - set(rules.backends)
    ):
        return _unknown_selection(f"these rules do not describe the backend {unknown_names[0]}")
    for name, backend in rules.backends.items():
        page = _backend_page(name, backend, chosen_names, page, model)
        if name in (chosen_names["attention"], chosen_names["decode"]) and (
            reason := backend.when_named.refusal(model)
        ):
            refusals.append(Refusal(kernel=name, reason=reason))
    for replacement in rules.replacements:
        if (
            chosen_names["attention"] == replacement.backend
            and replacement.where.refusal(model) is None
        ):
            chosen_names["attention"] = replacement.replacement
    refusals += _limit_refusals(rules.last_limits, chosen_names, page, model)
    prefill, decode = _chosen_parts(chosen_names)
    for name, conditions in (
        (decode, rules.backends[decode].decode),
        (prefill, rules.backends[prefill].prefill),
    ):
        backend = rules.backends[name]
        if reason := backend.described_for.refusal(model):
            return _unknown_selection(f"what becomes of {name} is not known: it {reason}")
        if reason := _checks_refusal(backend.any_of, model) or _checks_refusal(conditions, model):
            refusals.append(Refusal(kernel=name, reason=reason))
    if refusals:
        return Selection(refused=tuple(dict.fromkeys(refusals)), status="none")
    return Selection(
        prefill=prefill, decode=decode, page=page or 1, status="ok", reason=choice_reason
    )


def _backend_page(
    name: str,
    backend: SglangBackend,
    chosen_names: Mapping[BackendOption, str | None],
    page: int | None,
    model: Subject,
) -> int | None:
    """The tokens of a page after a backend had its say: its own number where it is chosen."""
    is_chosen = any(chosen_names[option] == name for option in backend.page_backends)
    has_page = backend.page and page not in backend.pages
    if has_page and is_chosen and backend.page_condition.refusal(model) is None:
        return backend.page
    return page


def _choice_reason(
    forced_backends: ForcedBackends,
    chosen_names: Mapping[BackendOption, str | None],
    model: Subject,
) -> str:
    """The reason for the backends.

    chosen_names: the names after the engine's steps for the architecture.
    """
    flags = [
        f"`--{flag} {name}`"
        for role, flag in _FLAGS.items()
        if (name := getattr(forced_backends, role))
    ]
    if flags:
        return f"named by {' and '.join(flags)}"
    if any(chosen_names.values()):
        return f"the engine sets it for {_attention_query(model).architecture}"
    return f"the engine's default for such models on compute capability {model.capability}"


def _deciding_rules(rules: BackendRules, model: Subject) -> BackendRules:
    """The rules of the version whose selection this model has."""
    rule_sets = (loan.rules for loan in rules.borrowed_rules if loan.where.refusal(model) is None)
    source_rules = next(rule_sets, None)
    return rules if source_rules is None else _deciding_rules(source_rules, model)


def _description_gap(rules: BackendRules, model: Subject, forced_backends: ForcedBackends) -> str:
    """Why these rules do not know the selection; "": they do."""
    query = _attention_query(model)
    if numbers(model.capability) is None:
        return f"{model.capability!r} is not a compute capability"
    if query.kv_dtype not in rules.kv_dtypes:
        return f"these rules do not describe a KV cache in {query.kv_dtype}"
    if forced_backends == ForcedBackends() and any(
        check.refusal(model) is None for check in rules.described
    ):
        return ""
    if query.architecture in rules.own_backends:
        return f"{query.architecture} brings settings of its own, which these rules do not describe"
    if (query.kind == "mla") != (query.architecture in rules.mla):
        return f"whether it computes {query.architecture} as MLA is not known"
    return ""


def server_attention(
    groups: Sequence[AttentionGroup],
    rules: BackendRules,
    rank: Rank,
    architecture: str,
    config: Mapping[str, Any],
    gpu_bytes: int,
    args: Mapping[str, Scalar],
) -> tuple[LayerAttention, ...]:
    """One row for each group. A backend that differs for prefill and decoding is named
    prefill/decode.

    config: config.json.
    gpu_bytes: memory of the smallest GPU.
    args: the user's flags by canonical names.
    """
    chunk = int(args.get("max-num-batched-tokens", 0))
    model = describe_model(
        groups=groups,
        architecture=architecture,
        kv_dtype=rank.kv_dtype,
        capability=rank.capability,
        gpu_bytes=gpu_bytes,
        chunk=chunk,
    )
    flags = rules.undescribed_flags(args, model)
    # A field that is off is the engine's default: getattr(config, "language_model_only", False).
    fields = sorted(field for field in rules.own_fields if config.get(field))
    if flags or fields:
        chosen_selection = _unknown_selection(
            f"these rules do not describe what {f'--{flags[0]}' if flags else fields[0]} changes"
        )
    elif any(
        group.value_dim not in (None, group.head_dim)
        for group in groups
        if group.kind in ("full", "sliding")
    ):
        chosen_selection = _unknown_selection(
            "these rules do not describe layers whose keys and values differ in size"
        )
    else:
        forced_names = {role: str(args[flag]) for role, flag in _FLAGS.items() if flag in args}
        page = int(args["block-size"]) if "block-size" in args else None
        chosen_selection = select(rules, model, ForcedBackends(**forced_names, page=page))
    backends = _deciding_rules(rules, model).backends
    return tuple(
        _layer_attention(group, rules, backends, chosen_selection, model) for group in groups
    )


def describe_model(
    groups: Sequence[AttentionGroup],
    architecture: str,
    kv_dtype: str,
    capability: str,
    gpu_bytes: int,
    chunk: int = 0,
) -> Subject:
    state = next((group.recurrent for group in groups if group.recurrent), None)
    query = AttentionQuery(
        kind="mla" if any(group.kind == "mla" for group in groups) else "full",
        architecture=architecture,
        sparse=any(group.index_dim for group in groups),
        has_sinks=any(group.has_sinks for group in groups),
        kv_dtype=kv_dtype,
        recurrent=state.kind if state else "",
        state_dtype=state.dtype or "float32" if state else "float32",
        state_size=(state.rows, state.columns) if state else (0, 0),
        chunk=chunk,
    )
    return Subject(capability, attention=query, gpu_gib=gpu_bytes / GIB)


def _layer_attention(
    group: AttentionGroup,
    rules: BackendRules,
    backends: Mapping[str, SglangBackend],
    chosen_selection: Selection,
    model: Subject,
) -> LayerAttention:
    """The row of a group. backends: of the rules that decide for the model."""
    group_facts: dict[str, Any] = {
        "kind": group.kind,
        "layers": group.layers,
        "head_dim": group.head_dim,
    }
    if group.kind in ("recurrent", "vision") and chosen_selection.status != "unknown":
        listed_rules = rules.recurrent if group.kind == "recurrent" else rules.vision
        rule = next((rule for rule in listed_rules if rule.where.refusal(model) is None), None)
        if rule is not None and rule.backend is not None:
            reason = f"the engine's backend for such layers on capability {model.capability}"
            return LayerAttention(
                **group_facts,
                backend=rule.backend,
                version=rule.version,
                status="ok",
                reason=reason,
            )
        chosen_selection = _unknown_selection(
            "which kernels this version takes for such layers is not known here"
        )
    if chosen_selection.prefill is None or chosen_selection.decode is None:
        return LayerAttention(
            **group_facts,
            backend=None,
            status=chosen_selection.status,
            refusals=chosen_selection.refused,
        )
    name = "/".join(dict.fromkeys((chosen_selection.prefill, chosen_selection.decode)))
    if (group.kind == "encoder" or not group.causal) and backends[
        chosen_selection.prefill
    ].is_causal_only:
        wrong_refusal = Refusal(
            kernel=chosen_selection.prefill,
            reason="would give wrong answers: it hides later tokens from each token",
        )
        return LayerAttention(**group_facts, backend=None, status="none", refusals=(wrong_refusal,))
    for part in dict.fromkeys((chosen_selection.prefill, chosen_selection.decode)):
        if obstacle := backends[part].starts.refusal(model):
            late_refusal = Refusal(
                kernel=part, reason=f"is selected, and {obstacle}", is_at_start=True
            )
            return LayerAttention(
                **group_facts, backend=None, status="none", refusals=(late_refusal,)
            )
    return LayerAttention(
        **group_facts,
        backend=name,
        version=backends[name].version if name in backends else None,
        block=chosen_selection.page,
        status="ok",
        reason=chosen_selection.reason,
    )


def _chosen_parts(chosen_names: Mapping[BackendOption, str | None]) -> tuple[str, str]:
    """Prefill and decode: "" where nothing is chosen yet."""
    attention = chosen_names["attention"] or ""
    return chosen_names["prefill"] or attention, chosen_names["decode"] or attention


def _apply_steps(
    steps: Sequence[BackendStep],
    chosen_names: dict[BackendOption, str | None],
    page: int | None,
    model: Subject,
) -> int | None:
    """Fill `chosen_names`; return the tokens of a page."""
    for step in steps:
        if step.where.refusal(model) is not None:
            continue
        if (step.attention or step.decode) and any(
            chosen_names[option] is not None for option in step.unset
        ):
            continue
        chosen_names["attention"] = step.attention or chosen_names["attention"]
        chosen_names["decode"] = step.decode or chosen_names["decode"]
        page = step.page or page
    return page


def _limit_refusals(
    limits: Sequence[BackendLimit],
    chosen_names: Mapping[BackendOption, str | None],
    page: int | None,
    model: Subject,
) -> list[Refusal]:
    """The refusals of a model by limits of the chosen backends."""
    refusals = []
    architecture = _attention_query(model).architecture
    prefill, decode = _chosen_parts(chosen_names)
    names = {"attention": chosen_names["attention"] or "", "prefill": prefill, "decode": decode}
    for limit in (limit for limit in limits if limit.where.refusal(model) is None):
        if limit_reason := limit.requires.refusal(model):
            refusals.append(Refusal(kernel="", reason=f"{architecture} {limit_reason}"))
        if limit.page is not None and page not in (None, limit.page):
            reason = (
                f"{architecture} takes only pages of {limit.page}"
                f" token{'s' if limit.page > 1 else ''}, not of {page}"
            )
            refusals.append(Refusal(kernel="", reason=reason))
        for name in (names[option] for option in limit.options):
            if limit.accepts is not None and name not in limit.accepts:
                refusals.append(
                    Refusal(
                        kernel=name, reason=f"{architecture} takes only {', '.join(limit.accepts)}"
                    )
                )
            elif name in limit.refuses:
                refusals.append(Refusal(kernel=name, reason=f"not for {architecture}"))
    return refusals


def _checks_refusal(any_of: Sequence[Check], model: Subject) -> str:
    """Why none of the checks holds; "": one does."""
    reasons = [check.refusal(model) for check in any_of]
    return (
        ""
        if None in reasons
        else "; or ".join(dict.fromkeys(reason for reason in reasons if reason))
    )


def _attention_query(model: Subject) -> AttentionQuery:
    assert model.attention is not None  # noqa: S101 - of attention alone
    return model.attention


def _unknown_selection(reason: str) -> Selection:
    return Selection(refused=(Refusal(kernel="", reason=reason),), status="unknown")
