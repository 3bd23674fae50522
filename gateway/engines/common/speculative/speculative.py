"""Speculative decoding: the drafter of a model in an engine version, its settings, or reasons
against it. Pure.

SpeculativeRules (speculative.yaml) + DraftTarget + Drafter + Wish -> Speculation

A drafter that cannot run never refuses the model: the model is served without it, with every reason
listed. Nothing is drafted unless the user asks for it, because the gain depends on the prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gateway.domain import (
    AttentionGroup,
    Choice,
    Engine,
    IntChoice,
    LayerAttention,
    ModelSpec,
    Refusal,
    StrChoice,
    Wish,
)
from gateway.domain.choice import ENGINE_DEFAULT, NO_SPECULATION
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.weights import other_bytes, weights_bytes
from gateway.engines.common.speculative.mtp import (
    drafting_bytes,
    drafting_groups,
    drafting_layers,
    vocabulary_bytes,
)
from gateway.engines.common.speculative.speculative_rules import Speculation, SpeculativeRules
from gateway.models.drafter import Drafter
from gateway.models.families.config import Fields
from gateway.models.rank import Rank

# The number where no config names one. A small number is best, because each refused token is lost
# work. Users measure and set their own.
_TOKENS = 3
# The n-grams that the engine looks up are this long when nothing is set (prompt_lookup_max in
# vllm/config/speculative.py).
_NGRAM = 5
_READ_HIDDEN_STATES = ("eagle3", "dflash", "dspark")


class DraftTarget(NamedTuple):
    """The target model of drafted tokens, on one rank.

    build: makes a BuiltModel of a config.
    attends: attention backends of drafter layers on this GPU, by the rules of the engine version.
    """

    spec: ModelSpec
    rank: Rank
    build: Callable[[ModelSpec], BuiltModel]
    attends: Callable[[tuple[AttentionGroup, ...]], tuple[LayerAttention, ...]]


def _no_speculation(reason: str, source: str, refusals: tuple[Refusal, ...] = ()) -> Speculation:
    return Speculation(
        method=StrChoice(value="none", reason=reason, source=source), refused=refusals
    )


_NO_SPECULATION = _no_speculation(NO_SPECULATION, "planner")


def speculate(
    target: DraftTarget,
    drafter: Drafter | None,
    wish: Wish,
    engine: Engine,
    rules: SpeculativeRules | None,
) -> Speculation:
    """The engine version's speculation for the target; `drafter` is the one that the user names."""
    wanted_kind = "drafter" if drafter is not None else wish.speculative
    if wanted_kind is None:
        return _NO_SPECULATION
    if wanted_kind == "off":
        return _no_speculation("set by the user", "user")
    if rules is None:
        return _refuse_speculation(
            wanted_kind,
            engine,
            [_kernel_refusal(wanted_kind, f"what {engine.ref} can draft with is not known here")],
        )
    if drafter is not None:
        return _drafter_speculation(target, drafter, wish, engine, rules)
    if wanted_kind == "ngram":
        return _ngram_speculation(wish, engine, rules)
    return _layer_speculation(target, wish, engine, rules)


def drafter_bytes(drafter: Drafter, rank: Rank, build: Callable[[ModelSpec], BuiltModel]) -> int:
    """Bytes of the drafter on one rank, after the engine's cast to the rank's dtype."""
    if drafter.plain is not None:
        return weights_bytes(build(drafter.plain), Rank(tp=rank.tp, dtype=rank.dtype)) or 0
    heads = drafter.attention[0].kv_heads if drafter.attention else 1
    return sum(other_bytes(tensor, rank.tp, rank.dtype, heads) for tensor in drafter.tensors)


def _ngram_speculation(wish: Wish, engine: Engine, rules: SpeculativeRules) -> Speculation:
    if "ngram" not in rules.methods:
        return _refuse_speculation("ngram", engine, [_no_method("ngram", engine, rules)])
    tokens = _draft_tokens_choice(
        wish, _NGRAM, "as many as the n-grams that are looked up are long", rules.methods["ngram"]
    )
    return Speculation(
        method=StrChoice(value="ngram", reason="set by the user", source="user"),
        tokens=tokens,
        config={"method": "ngram", "num_speculative_tokens": tokens.value},
    )


def _layer_speculation(
    target: DraftTarget, wish: Wish, engine: Engine, rules: SpeculativeRules
) -> Speculation:
    """MTP: layers of the target's own checkpoint draft."""
    spec = target.spec
    drafting = drafting_layers(spec, rules.mtp)
    own_layers = drafting.layers if drafting is not None else None
    reason = _own_layers_refusal(spec, own_layers, engine, rules)
    staged = rules.mtp.staged
    own_class = staged.get(spec.model_type) or staged.get(spec.architecture)
    reason = reason or _stages_refusal(own_class, target.rank.pp, engine, rules)
    groups = () if reason else drafting_groups(spec, own_layers or 1)
    rows = target.attends(groups)
    refusals = (
        [_kernel_refusal("mtp", reason)]
        if reason
        else [refusal for row in rows if row.status == "none" for refusal in row.refusals]
    )
    layers = own_layers or 1
    source = drafting.source if drafting is not None else rules.mtp.source
    tokens = _own_tokens_choice(wish, layers, rules, source)
    if not refusals and tokens.value > layers and tokens.value % layers:
        refusals = [
            _kernel_refusal(
                "mtp",
                f"{tokens.value} tokens in a draft are not a multiple of the {layers} layers that"
                " draft",
            )
        ]
    if refusals and wish.speculative == "auto":
        return _no_speculation(
            "; ".join(refusal.reason for refusal in refusals), rules.mtp.source, tuple(refusals)
        )
    if refusals:
        return _refuse_speculation("mtp", engine, refusals)
    weights_bytes = drafting_bytes(spec, layers, target.rank, target.build)
    if rules.copies_vocabulary and weights_bytes is not None:
        weights_bytes += vocabulary_bytes(spec, target.rank)
    choice_reason = (
        "the checkpoint has layers that draft" if wish.speculative == "auto" else "set by the user"
    )
    return Speculation(
        method=StrChoice(
            value="mtp",
            reason=choice_reason,
            source=rules.mtp.source if wish.speculative == "auto" else "user",
        ),
        tokens=tokens,
        config={"method": "mtp", "num_speculative_tokens": tokens.value},
        weights_bytes=weights_bytes or 0,
        groups=groups,
        attention=rows,
        warnings=(
            *_own_layer_warnings(spec, tokens.value, layers, weights_bytes),
            *_backend_warnings(rows),
        ),
    )


def _own_tokens_choice(
    wish: Wish, layers: int, rules: SpeculativeRules, source: str
) -> Choice[int]:
    """Tokens of a draft by layers of the checkpoint."""
    if rules.default_tokens is not None:
        return _draft_tokens_choice(wish, rules.default_tokens, ENGINE_DEFAULT, rules.mtp.source)
    return _draft_tokens_choice(
        wish, layers, f"one for each of the {layers} layers that draft", source
    )


def _own_layers_refusal(
    spec: ModelSpec, own_layers: int | None, engine: Engine, rules: SpeculativeRules
) -> str:
    """Why the target has no layers that draft; "": it has some."""
    if "mtp" not in rules.methods or own_layers is None:
        return f"{engine.ref} knows no drafting layers of {spec.architecture}"
    if own_layers == 0:
        return "config.json names no layers that draft"
    if spec.tensors_from == "headers" and not spec.draft_tensors:
        return "the weight files hold no layers that draft"
    return ""


def _stages_refusal(name: str | None, pp: int, engine: Engine, rules: SpeculativeRules) -> str:
    """Why the class `name` cannot draft in the stages of its target; "": it can."""
    # Versions whose drafters have one stage list no `staged` classes.
    if pp == 1 or not rules.mtp.staged or name not in engine.no_stages:
        return ""
    return f"{engine.ref} cannot share {name}, which drafts, by stages of a pipeline"


def _own_layer_warnings(spec: ModelSpec, tokens: int, layers: int, size: int | None) -> list[str]:
    warnings = []
    if tokens > layers:
        warnings.append(
            f"{tokens} tokens are drafted by {layers} layers in turn; later ones are accepted"
            " less often."
        )
    if spec.tensors_from == "config":
        warnings.append(
            "Whether the weight files hold the layers that draft is only known once they are here."
        )
    if size is None:
        warnings.append(
            "How large the layers that draft are is not known; memory may turn out scarcer than"
            " planned."
        )
    return warnings


def _drafter_speculation(
    target: DraftTarget, drafter: Drafter, wish: Wish, engine: Engine, rules: SpeculativeRules
) -> Speculation:
    """Speculation with a drafter, or its refusal with every reason."""
    spec = target.spec
    tokens = _draft_tokens_choice(
        wish,
        drafter.tokens or _TOKENS,
        (
            f"taken from {drafter.tokens_source} = {drafter.tokens}"
            if drafter.tokens
            else "the drafter names none; a few are a start"
        ),
        "config.json of the drafter" if drafter.tokens else "planner",
    )
    rows = target.attends(drafter.attention) if drafter.method in rules.methods else ()
    against_stages = _stages_refusal(_class_of(drafter, rules), target.rank.pp, engine, rules)
    refusals = [
        *_load_refusals(spec, drafter, engine, rules),
        *_size_refusals(spec, drafter, target.rank.tp),
        *([_kernel_refusal(drafter.method, against_stages)] if against_stages else []),
        *(refusal for row in rows if row.status == "none" for refusal in row.refusals),
    ]
    if refusals:
        return _refuse_speculation(drafter.source, engine, refusals, rows)
    config = {
        "method": drafter.method,
        "model": drafter.source,
        "num_speculative_tokens": tokens.value,
    }
    if drafter.revision:
        config["revision"] = drafter.revision
    if drafter.is_parallel:
        config["parallel_drafting"] = True
    is_parallel = drafter.is_parallel or drafter.method in rules.parallel
    return Speculation(
        method=StrChoice(
            value=drafter.method, reason=f"the drafter {drafter.source} was named", source="user"
        ),
        tokens=tokens,
        config=config,
        weights_bytes=drafter_bytes(drafter, target.rank, target.build),
        groups=drafter.attention,
        attention=rows,
        slots=(tokens.value - 1 if is_parallel else 0)
        + (1 if drafter.method == "draft_model" else 0),
        warnings=_backend_warnings(rows),
    )


def _load_refusals(
    spec: ModelSpec, drafter: Drafter, engine: Engine, rules: SpeculativeRules
) -> list[Refusal]:
    """Why this version cannot load the drafter, or not for this target."""
    method = drafter.method
    if method not in rules.methods:
        return [_no_method(method, engine, rules)]
    result = []
    if method == "mtp":
        if not any(
            drafter.model_type.removesuffix("_text") in target.types for target in rules.mtp.targets
        ):
            result.append(
                _kernel_refusal(
                    method,
                    f"{engine.ref} does not know drafting heads of the kind {drafter.model_type}",
                )
            )
    elif method == "draft_model":
        if engine.architectures and drafter.architecture not in engine.architectures:
            result.append(
                _kernel_refusal(method, f"{engine.ref} does not know {drafter.architecture}")
            )
    else:
        name = _class_of(drafter, rules)
        if name not in rules.architectures:
            result.append(
                _kernel_refusal(
                    method,
                    f"{engine.ref} does not know drafters of the kind {name or drafter.kind}",
                )
            )
    hidden = rules.hidden_states
    typed = (
        not hidden.types
        or any(name in _text_type(spec) for name in hidden.types)
        or method != "eagle3"
    )
    if method in _READ_HIDDEN_STATES and not (typed and spec.architecture in hidden.architectures):
        result.append(
            _kernel_refusal(
                method,
                f"{spec.architecture} of {engine.ref} does not hand out the hidden states that it"
                " reads",
            )
        )
    return result


def _class_of(drafter: Drafter, rules: SpeculativeRules) -> str | None:
    """The class that loads the drafter. Source: vllm/transformers_utils/configs/eagle.py,
    speculators/algos.py."""
    if drafter.kind:
        classes = rules.speculators.get(drafter.kind, {})
        return classes.get(drafter.model_type, classes.get("*"))
    name = drafter.architecture
    if drafter.method == "eagle" and not name.startswith("Eagle"):
        return f"Eagle{name}"
    if drafter.method == "eagle3" and not (name.startswith("Eagle3") or name.endswith("Eagle3")):
        return f"Eagle3{name}"
    if (
        drafter.method == "dflash"
        and name not in rules.architectures
        and not name.startswith("DFlash")
    ):
        return f"DFlash{name}"
    return name


def _size_refusals(spec: ModelSpec, drafter: Drafter, tp: int) -> list[Refusal]:
    """Why the drafter's sizes do not fit the target's, or the ranks."""
    result = []
    if drafter.target_hidden not in (None, spec.hidden):
        reason = (
            f"it was made for a target of hidden size {drafter.target_hidden}, and this one has"
            f" {spec.hidden}"
        )
        result.append(_kernel_refusal(drafter.method, reason))
    if drafter.vocab != spec.vocab and drafter.method != "mtp":
        reason = f"it reads a vocabulary of {drafter.vocab} tokens, and the target has {spec.vocab}"
        result.append(_kernel_refusal(drafter.method, reason))
    layers = sum(
        group.layers for group in spec.attention if group.kind not in ("encoder", "vision")
    )
    if max(drafter.target_layers, default=0) > layers:
        reason = f"it reads layer {max(drafter.target_layers)} of the target, which has {layers}"
        result.append(_kernel_refusal(drafter.method, reason))
    # verify_with_parallel_config of vllm/config/model.py, with as many ranks as the target has.
    result += [
        _kernel_refusal(drafter.method, f"its {heads} attention heads cannot be cut for {tp} ranks")
        for heads in drafter.heads
        if heads % tp
    ]
    return result


def _draft_tokens_choice(wish: Wish, default: int, reason: str, source: str) -> Choice[int]:
    if wish.num_speculative_tokens is not None:
        return IntChoice(value=wish.num_speculative_tokens, reason="set by the user", source="user")
    return IntChoice(value=default, reason=reason, source=source)


def _text_type(spec: ModelSpec) -> str:
    fields = Fields(spec.config, spec.source)
    inner_type = fields.mapping("text_config", {}).get("model_type")
    return inner_type if isinstance(inner_type, str) else spec.model_type


def _kernel_refusal(kernel: str, reason: str) -> Refusal:
    return Refusal(kernel=kernel, reason=reason)


def _no_method(method: str, engine: Engine, rules: SpeculativeRules) -> Refusal:
    return _kernel_refusal(
        method, f"{engine.ref} has no such method; it has {', '.join(sorted(rules.methods))}"
    )


def _backend_warnings(rows: tuple[LayerAttention, ...]) -> tuple[str, ...]:
    if all(row.status == "ok" for row in rows):
        return ()
    return ("Which backend computes the drafter's attention is unknown; the start will show it.",)


def drop_drafter(speculation: Speculation, engine: Engine, reason: str) -> Speculation:
    """The model without its drafter, because of the drafter's memory."""
    method = speculation.method.value
    return _refuse_speculation(
        speculation.config.get("model", method),
        engine,
        [_kernel_refusal(method, reason)],
        speculation.attention,
    )


def _refuse_speculation(
    subject: str, engine: Engine, refusals: list[Refusal], rows: tuple[LayerAttention, ...] = ()
) -> Speculation:
    """The model without a drafter, and why each way to draft is closed."""
    table = "; ".join(f"{refusal.kernel}: {refusal.reason}" for refusal in refusals)
    return Speculation(
        method=StrChoice(
            value="none",
            reason=f"{subject} cannot draft here: {table}",
            source=f"profile {engine.ref}",
        ),
        attention=rows,
        refused=tuple(refusals),
        warnings=(
            (
                f"The model is served without speculative decoding, because {subject} cannot draft"
                f" on {engine.ref}: {table}."
            ),
        ),
    )
