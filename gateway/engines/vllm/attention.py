"""Choice of the backend for each attention layer, by the rules of one engine version
(attention.yaml). Pure.

AttentionRules + AttentionQuery (per rank) + compute capability -> BackendChoice
AttentionRules + AttentionGroups of a model -> one LayerAttention for each

The engine walks an ordered list of backends and takes the first that accepts the layer.
`choose_backend` does the same, and keeps every reason of each refusal. An undescribed layer is
"unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from gateway.domain import AttentionGroup, LayerAttention, Refusal
from gateway.engines.common.rules.check import UnknownSubject
from gateway.engines.common.rules.choice_reasons import choice_reason
from gateway.engines.common.rules.subject import AttentionQuery, AttentionRole, Subject, numbers
from gateway.engines.vllm.attention_rules import (
    AttentionRules,
    OverrideStep,
    preferred_block,
    refusals,
)
from gateway.models.rank import Rank


class BackendChoice(NamedTuple):
    """The backend for an attention layer, or the reason that there is none.

    `none`: the engine will refuse the model. `unknown`: these rules do not describe the layer,
    or too little of the layer is known.
    """

    backend: str | None
    status: Literal["ok", "none", "unknown"]
    version: int | None = None  # of FlashAttention: 2, 3 or 4
    block: int | None = None  # tokens of a block of the KV cache, where --block-size names none
    refusals: tuple[Refusal, ...] = ()
    reason: str = ""  # why the engine takes it


@lru_cache(maxsize=4096)  # the same layers are judged for every number of ranks
def choose_backend(
    rules: AttentionRules,
    query: AttentionQuery,
    capability: str,
    packages: frozenset[str] | None = None,
    forced_name: str | None = None,
) -> BackendChoice:
    """The backend of this layer on a GPU of this capability ("8.6").

    packages: packages that the engine can import; None: those of its official image.
    forced_name: --attention-backend, which does not apply to vision towers and recurrent layers.
    """
    subject = Subject(
        capability, frozenset(rules.packages) if packages is None else packages, attention=query
    )
    if numbers(capability) is None:
        return _unknown_choice("", f"{capability!r} is not a compute capability")
    if query.kind == "recurrent":
        return _recurrent_choice(rules, query)
    if query.kind == "vision":
        return _vision_choice(rules, subject)
    if query.kv_dtype not in rules.kv_dtypes:
        return _unknown_choice("", f"these rules do not describe a KV cache in {query.kv_dtype}")
    forced_name = _backend_name(forced_name)
    names = (forced_name,) if forced_name else rules.order(subject)
    if not names:
        return _unknown_choice(
            "", f"these rules have no list of backends for {query.kind} layers like this"
        )
    backend_refusals: list[Refusal] = []
    for name in names:
        if name not in rules.backends:
            return _unknown_choice(name, "these rules do not describe this backend")
        reasons = [reason for _, reason in refusals(rules.backends[name], rules.asks, subject)]
        certain = [reason for reason in reasons if not isinstance(reason, UnknownSubject)]
        if certain:
            backend_refusals.append(Refusal(kernel=name, reason="; ".join(dict.fromkeys(certain))))
        elif reasons:
            return BackendChoice(
                backend=None,
                refusals=(*backend_refusals, Refusal(kernel=name, reason=reasons[0])),
                status="unknown",
            )
        else:
            version = _flash_version(rules, subject) if name in rules.flash_backends else None
            block = query.block_size or preferred_block(rules.backends[name], subject)
            flag = f"--attention-backend {forced_name}" if forced_name else ""
            reason = choice_reason(names, flag)
            return BackendChoice(
                backend=name,
                status="ok",
                version=version,
                block=block,
                refusals=tuple(backend_refusals),
                reason=reason,
            )
    return BackendChoice(backend=None, refusals=tuple(backend_refusals), status="none")


def layer_attention(
    groups: Sequence[AttentionGroup],
    rules: AttentionRules,
    rank: Rank,
    *,
    block_size: int | None = None,
    forced_name: str | None = None,
    is_drafter: bool = False,
    architecture: str = "",
    config: Mapping[str, Any] | None = None,
) -> tuple[LayerAttention, ...]:
    """One row for each group, by its own head size.

    block_size: the value of --block-size, if set.
    is_drafter: the layers are a drafter's, which reads only text and takes no backend over from its
        target. If any layer of a drafter sees ahead, the engine asks every layer's backend for such
        layers.
    config: config.json, for sizes that a group lacks.
    """
    forced_name = _backend_name(forced_name)
    is_drafted = is_drafter and not all(group.causal for group in groups)
    queries = [
        _attention_query(
            group=group,
            rules=rules,
            rank=rank,
            block_size=block_size,
            is_drafter=is_drafter,
            config=config or {},
        )
        for group in groups
    ]
    step = None if is_drafter else _step(rules, queries, rank.capability, architecture, forced_name)
    rows = []
    version = step.flash_attention if step else None
    for group, query in zip(groups, queries, strict=True):
        target = (
            query._replace(causal=not is_drafted, flash_attention=version)
            if is_drafted or version is not None
            else query
        )
        if architecture in rules.own_backends and group.kind not in ("recurrent", "vision"):
            choice = _class_backend(rules, target, rank.capability, architecture, forced_name)
        elif (own_choice := _model_choice(rules, group, query, architecture)) is not None:
            choice = own_choice
        else:
            step_backend = step.backend if step and not forced_name else None
            choice = choose_backend(
                rules, target, rank.capability, forced_name=forced_name or step_backend
            )
            if step_backend and choice.backend:
                reason = f"the engine sets this backend for {architecture}"
                choice = choice._replace(reason=reason)
            # A tower's layers keep no cache, and have no implementation that could refuse one.
            if group.kind != "vision":
                subject = Subject(rank.capability, frozenset(rules.packages), attention=target)
                choice = _check_start(choice, rules, subject)
        rows.append(_layer_attention(group, choice, rank.capability))
    return tuple(rows)


def _model_choice(
    rules: AttentionRules, group: AttentionGroup, query: AttentionQuery, architecture: str
) -> BackendChoice | None:
    """The backend that the model's own class takes for these layers; None: it asks the engine."""
    if own_backend := rules.own_recurrent.get(architecture, {}).get(query.recurrent):
        reason = f"{architecture} computes these layers itself"
        return BackendChoice(backend=own_backend, status="ok", reason=reason)
    if architecture in rules.plain_towers and group.kind == "vision":
        reason = f"the tower of {architecture} asks torch itself"
        return BackendChoice(backend="torch", status="ok", reason=reason)
    return None


def _layer_attention(
    group: AttentionGroup, choice: BackendChoice, capability: str
) -> LayerAttention:
    return LayerAttention(
        kind=group.kind,
        layers=group.layers,
        head_dim=group.head_dim,
        backend=choice.backend,
        status=choice.status,
        version=choice.version,
        block=choice.block,
        refusals=choice.refusals,
        reason=_version_reason(choice, capability) if choice.backend else "",
    )


def _version_reason(choice: BackendChoice, capability: str) -> str:
    """The reason of a choice, with that for its version of FlashAttention."""
    if choice.version is None:
        return choice.reason
    return f"{choice.reason}; in version {choice.version} for compute capability {capability}"


def _class_backend(
    rules: AttentionRules,
    query: AttentionQuery,
    capability: str,
    architecture: str,
    forced_name: str | None,
) -> BackendChoice:
    """The backend that the model's own class names, whatever the lists of the engine have."""
    choices = rules.own_choices.get(architecture, ())
    if forced_name or not choices:
        return _unknown_choice("", f"{architecture} brings attention backends of its own")
    subject = Subject(capability, frozenset(rules.packages), attention=query)
    refusals: list[Refusal] = []
    for choice in choices:
        reason = choice.requires.refusal(subject)
        if reason is None:
            reason_text = f"{architecture} names it"
            return BackendChoice(choice.backend, "ok", refusals=tuple(refusals), reason=reason_text)
        refusals.append(Refusal(kernel=choice.backend, reason=reason))
    return BackendChoice(backend=None, refusals=tuple(refusals), status="none")


def _check_start(choice: BackendChoice, rules: AttentionRules, subject: Subject) -> BackendChoice:
    """The choice; none where the backend that is selected then refuses. The engine tries no
    other."""
    backend = rules.backends.get(choice.backend or "")
    if backend is None or choice.backend is None or not (reason := backend.starts.refusal(subject)):
        return choice
    refusal = Refusal(kernel=choice.backend, reason=f"is selected, and {reason}", is_at_start=True)
    return BackendChoice(backend=None, refusals=(*choice.refusals, refusal), status="none")


def _attention_query(
    group: AttentionGroup,
    rules: AttentionRules,
    rank: Rank,
    block_size: int | None,
    is_drafter: bool,
    config: Mapping[str, Any],
) -> AttentionQuery:
    """The layer as an attention backend judges it, on one rank."""
    # The engine calls a layer that sees both ways an encoder layer, except in a drafter: `causal`
    # asks for that.
    encoder = group.kind == "encoder" or (
        group.kind in ("full", "sliding") and not group.causal and not is_drafter
    )
    # Keys of an encoder are asked for as those of an encoder that a decoder reads.
    role: AttentionRole = "encoder_only" if encoder else "decoder"
    if group.kind == "cross":
        role = "encoder_decoder"
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    latent = group.value_dim if group.kind == "mla" else None
    return AttentionQuery(
        kind="encoder" if encoder or group.kind == "cross" else group.kind,
        role=role,
        head_dim=group.head_dim,
        heads=max(1, group.heads // max(rank.tp, 1)),
        dtype=rank.dtype,
        kv_dtype=rank.kv_dtype,
        block_size=block_size,
        has_sinks=group.has_sinks,
        alibi=group.alibi,
        sparse=group.index_dim is not None,
        multimodal_prefix=not is_drafter and _has_multimodal_prefix(rules, config, text),
        softcap=_config_number(text, "attn_logit_softcapping", float) is not None,
        latent_dim=latent,
        rope_dim=None if latent is None else group.head_dim - latent,
        nope_dim=_config_number(text, "qk_nope_head_dim", int),
        value_dim=_config_number(text, "v_head_dim", int),
        index_topk=_config_number(text, "index_topk", int),
        recurrent=group.recurrent.kind if group.recurrent else "",
    )


def _has_multimodal_prefix(
    rules: AttentionRules, config: Mapping[str, Any], text: Mapping[str, Any]
) -> bool:
    """The engine's own property of the model, is_mm_prefix_lm."""
    model = config.get("model_type")
    if isinstance(model, str) and model in rules.vision_prefix:
        return bool(text.get("use_bidirectional_attention", rules.vision_prefix[model]) == "vision")
    if "is_mm_prefix_lm" in config:
        return bool(config["is_mm_prefix_lm"])
    return model in rules.multimodal_prefix


def _config_number(config: Mapping[str, Any], name: str, number_type: type) -> Any:
    """The number in config.json; None: there is none. An integer counts as a float, and `true` is
    not a number."""
    value = config.get(name)
    return value if isinstance(value, (int, number_type)) and not isinstance(value, bool) else None


def _step(
    rules: AttentionRules,
    queries: Sequence[AttentionQuery],
    capability: str,
    architecture: str,
    forced_name: str | None,
) -> OverrideStep | None:
    """The backend or block that this version sets for the architecture before selection; None:
    nothing."""
    model_override = next(
        (override for override in rules.models if architecture in override.architectures), None
    )
    decoders = [query for query in queries if query.kind in ("full", "sliding")]
    if model_override is None or not decoders:
        return None
    largest_query = max(decoders, key=lambda query: query.head_dim)
    if largest_query.head_dim <= model_override.min_head_dim or (
        model_override.needs_mixed_heads and len({query.head_dim for query in decoders}) == 1
    ):
        return None
    subject = Subject(capability, frozenset(rules.packages), attention=largest_query)
    step = next(
        (step for step in model_override.steps if step.match.refusal(subject) is None), None
    )
    return (
        step
        if step is not None and (forced_name is None or forced_name in step.forced_backends)
        else None
    )


def _recurrent_choice(rules: AttentionRules, query: AttentionQuery) -> BackendChoice:
    backend = rules.recurrent.get(query.recurrent)
    if backend is None:
        return _unknown_choice(
            "", f"these rules do not describe {query.recurrent or 'such'} layers"
        )
    return BackendChoice(backend=backend, status="ok", reason=choice_reason((backend,)))


def _vision_choice(rules: AttentionRules, subject: Subject) -> BackendChoice:
    refusals: list[Refusal] = []
    for tower in rules.vision:
        reason = tower.requires.refusal(subject)
        if reason is None:
            version = (
                _flash_version(rules, subject) if tower.backend in rules.flash_backends else None
            )
            reason = choice_reason([tower_rule.backend for tower_rule in rules.vision])
            return BackendChoice(
                tower.backend, "ok", version, refusals=tuple(refusals), reason=reason
            )
        refusals.append(Refusal(kernel=tower.backend, reason=reason))
    return BackendChoice(backend=None, refusals=tuple(refusals), status="none")


def _flash_version(rules: AttentionRules, subject: Subject) -> int | None:
    return next(
        (
            version.version
            for version in rules.flash_versions
            if version.match.refusal(subject) is None
        ),
        None,
    )


def _backend_name(forced_name: str | None) -> str | None:
    """The backend as the engine reads the option: upper or lower case alike; "auto" forces
    nothing."""
    return None if forced_name is None or forced_name.lower() == "auto" else forced_name.upper()


def _unknown_choice(subject: str, reason: str) -> BackendChoice:
    return BackendChoice(
        backend=None, refusals=(Refusal(kernel=subject, reason=reason),), status="unknown"
    )
