"""Whether an engine orders its requests by the priority of their callers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Choice, Scalar, str_choice
from gateway.domain.choice import ONE_CLASS
from gateway.engines.common.candidate import Candidate
from gateway.models.media import read_media

ARRIVAL_ORDER = "arrival"
PRIORITY_ORDER = "priority"
_COST = "where its memory is short, the last class gives its place up, and is computed again"
# The part of a step that the prompt of one request may take, so that a first class has room in the
# next step. Several long prompts still fill the step.
_PIECE_PART = 4
# Layers that read a prompt in pieces of any size. States of recurrent layers are kept for whole
# blocks, and an image is read as a whole.
_DIVISIBLE_KINDS = frozenset({"full", "sliding", "mla"})


def request_order(candidate: Candidate) -> Choice[str]:
    """The order of waiting requests within the engine."""
    engine = candidate.engine
    args = candidate.args
    flags = candidate.rules.priority_flags(engine)
    switch = next(iter(flags), "")
    if switch in args:
        order = PRIORITY_ORDER if args[switch] == flags[switch] else ARRIVAL_ORDER
        return str_choice(order, "set by the user", "user")
    classes = candidate.inputs.key_classes
    if classes < 2:
        return str_choice(ARRIVAL_ORDER, ONE_CLASS, "planner")
    source = f"profile {engine.ref}"
    if not flags:
        reason = f"{engine.ref} has no order by priority; the gateway's own queue has"
        return str_choice(ARRIVAL_ORDER, reason, source)
    if objection := candidate.rules.priority_objection(args):
        return str_choice(ARRIVAL_ORDER, objection, source)
    return str_choice(PRIORITY_ORDER, f"keys have {classes} classes; {_COST}", source)


def order_flags(
    candidate: Candidate, order: Choice[str], batched_tokens: int
) -> Mapping[str, Scalar]:
    """The flags of an order that the planner chose. A question leaves them out, because they
    compute nothing.

    batched_tokens: the tokens of a step.
    """
    if order.value == ARRIVAL_ORDER or order.source == "user":
        return {}
    groups = candidate.built_model.attention
    spec = candidate.inputs.spec
    # Some models, as Gemma 4, name no layers of their tower.
    has_media = bool(read_media(spec.config)) and not candidate.rules.leaves_towers(
        spec, candidate.args
    )
    is_divisible = (
        spec.generates
        and not has_media
        and candidate.args.get("enable-chunked-prefill") is not False
        and all(group.kind in _DIVISIBLE_KINDS for group in groups)
    )
    piece_tokens = batched_tokens // _PIECE_PART
    piece_flags = (
        candidate.rules.prompt_piece_flags(candidate.engine, piece_tokens)
        if groups and is_divisible and piece_tokens
        else {}
    )
    return {**candidate.rules.priority_flags(candidate.engine), **piece_flags}
