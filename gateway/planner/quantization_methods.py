"""The verdict of an engine version on a quantization method, before any layer. Pure.

    resolve(engine, quant, user, ...) -> ResolvedMethod, the way the checkpoint is loaded
    check(engine, resolved, capability, dtype): raises MethodRefusalError

The rules are data of the engine's profile (MethodRule, Method);
tests/conformance/method_questions.py asks the engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.domain import Engine, Method, MethodRule, Quant
from gateway.engines.common.refusal import RefusalError, RepairHint

# The words with which engines refuse; tests compare them with the engines' answers.
MISMATCH = "mismatch"
UNKNOWN = "unknown"
DEPRECATION = "deprecated"
CAPABILITY = "capability"
DTYPE = "dtype"
ONLINE = "online"
_VERDICT = "unsupported_quantization"


class MethodRefusalError(RefusalError):
    """A quantization method that an engine version refuses.

    `reason` is one of the words above.
    """

    def __init__(
        self, refusal_reason: str, reason: str, source: str, dtypes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(_VERDICT, reason, source, repair=RepairHint(dtypes=dtypes))
        self.refusal_reason = refusal_reason


class ResolvedMethod(NamedTuple):
    """The method by the engine's own name, "none" for weights that stay unquantized; `limits` are
    its requirements."""

    method: str
    limits: Method = Method()


def resolve(
    engine: Engine,
    quant: Quant | None,
    user: str,
    model_type: str,
    capability: str | None,
    *,
    allow_deprecated: bool = False,
) -> ResolvedMethod:
    """user: --quantization, "" without it. Raises MethodRefusalError."""
    if quant is None and not user:
        return ResolvedMethod("none")
    method = (
        _checkpoint_method(engine, quant, user, model_type, capability)
        if quant is not None
        else user
    )
    limits = engine.quantizations.get(method)
    if limits is None and not engine.quantizations:
        return ResolvedMethod(method)
    if limits is None:
        names = ", ".join(sorted(engine.quantizations))
        raise MethodRefusalError(
            UNKNOWN,
            f"{engine.ref} has no quantization method {method[:80]}; it has {names}",
            f"profile {engine.ref}",
        )
    if limits.is_deprecated and not allow_deprecated:
        reason = (
            f"{engine.ref} refuses the quantization method {method}, which is deprecated, without"
            " --allow-deprecated-quantization"
        )
        raise MethodRefusalError(DEPRECATION, reason, f"profile {engine.ref}")
    if quant is None and limits.online is None:
        reason = (
            f"--quantization {method} needs weights that are quantized so, and config.json names no"
            " quantization"
        )
        raise MethodRefusalError(ONLINE, reason, f"profile {engine.ref}")
    return ResolvedMethod(
        method,
        limits
        if quant is not None or limits.online is None
        else engine.quantizations[limits.online],
    )


def check(engine: Engine, resolution: ResolvedMethod, capability: str | None, dtype: str) -> None:
    """The method takes this GPU and these activations. Raises MethodRefusalError."""
    method = resolution.method
    limits = resolution.limits
    source = f"profile {engine.ref}"
    if limits.min_capability and capability and float(capability) < float(limits.min_capability):
        reason = (
            f"the quantization method {method} of {engine.ref} needs compute capability"
            f" {limits.min_capability}, this GPU has {capability}"
        )
        raise MethodRefusalError(CAPABILITY, reason, source)
    if limits.dtypes and dtype not in limits.dtypes:
        reason = (
            f"the quantization method {method} of {engine.ref} takes {' and '.join(limits.dtypes)}"
            f" activations, not {dtype}"
        )
        raise MethodRefusalError(DTYPE, reason, source, limits.dtypes)


def _checkpoint_method(
    engine: Engine, quant: Quant, user: str, model_type: str, capability: str | None
) -> str:
    """The engine's method for quantized weights. Raises MethodRefusalError."""
    method = quant.method.lower().replace("compressed_tensors", "compressed-tensors")
    if quant.is_unread and not user:
        reason = (
            f"the weights are quantized with {method} by {quant.place}, which {engine.ref} reads"
            f" only with --quantization {method}: add `--arg quantization={method}`"
        )
        raise MethodRefusalError(MISMATCH, reason, quant.place)
    for rule in engine.method_rules:
        if not _holds(
            rule=rule,
            named_method=method,
            quant=quant,
            user=user,
            model_type=model_type,
            capability=capability,
        ):
            continue
        if rule.refuses:
            reason = (
                f"{engine.ref} refuses this checkpoint, whose method is {method[:80]}:"
                f" {rule.refuses}"
            )
            raise MethodRefusalError(MISMATCH, reason, rule.source)
        if not rule.renames_method:
            return rule.method
        method = rule.method
    if user and user != method:
        reason = (
            f"the checkpoint is quantized with {method[:80]}, which {engine.ref} does not load as"
            f" --quantization {user}"
        )
        raise MethodRefusalError(MISMATCH, reason, f"profile {engine.ref}")
    return method


def _holds(
    rule: MethodRule,
    named_method: str,
    quant: Quant,
    user: str,
    model_type: str,
    capability: str | None,
) -> bool:
    """Whether the rule is one of this checkpoint, on this GPU."""
    return (
        _fits_checkpoint(rule, named_method, quant)
        and (rule.users is None or user in rule.users)
        and (not rule.models or model_type in rule.models)
        and _fits_capability(rule, capability)
        and _has_algorithms(rule, quant.fields)
        and _has_fields(rule, quant.fields)
    )


def _fits_checkpoint(rule: MethodRule, named_method: str, quant: Quant) -> bool:
    return (
        (not rule.checkpoints or named_method in rule.checkpoints)
        and (not rule.places or quant.place in rule.places)
        and (rule.is_nested is None or rule.is_nested is quant.is_nested)
    )


def _fits_capability(rule: MethodRule, capability: str | None) -> bool:
    """Whether a GPU is within the bounds. An unknown one is within no bounds."""
    if not rule.min_capability and not rule.below_capability:
        return True
    if capability is None:
        return False
    number = float(capability)
    return (not rule.min_capability or number >= float(rule.min_capability)) and (
        not rule.below_capability or number < float(rule.below_capability)
    )


def _has_algorithms(rule: MethodRule, block: Mapping[str, Any]) -> bool:
    if rule.algorithm is not None and not re.fullmatch(rule.algorithm, _algorithm(block)):
        return False
    return rule.layer_algorithm is None or _has_layer_algorithm(rule.layer_algorithm, block)


def _has_fields(rule: MethodRule, block: Mapping[str, Any]) -> bool:
    if rule.exceptions and all(
        _has(block, names, values) for names, values in rule.exceptions.items()
    ):
        return False
    return all(_has(block, names, values) for names, values in rule.fields.items())


def _has(block: Mapping[str, Any], names: str, values: tuple[Any, ...]) -> bool:
    """JSON's true is not 1 here, though Python takes them for equal."""
    value = next((block[name] for name in names.split("|") if name in block), None)
    return any(
        value == requirement and isinstance(value, bool) == isinstance(requirement, bool)
        for requirement in values
    )


def _algorithm(block: Mapping[str, Any]) -> str:
    """ModelOpt's name of its algorithm."""
    return str(block.get("quant_algo", "")).upper()[:80]


def _has_layer_algorithm(algorithm: str, block: Mapping[str, Any]) -> bool:
    layers = block.get("quantized_layers")
    values = layers.values() if isinstance(layers, Mapping) else ()
    return any(
        isinstance(layer_values, Mapping) and re.fullmatch(algorithm, _algorithm(layer_values))
        for layer_values in values
    )
