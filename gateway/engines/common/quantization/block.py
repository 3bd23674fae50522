"""The quantization block of a checkpoint, and each layer's scheme, or the reason that it is
unknown. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.domain.record import FrozenRecord
from gateway.models.scheme import Kind, Scheme


class UnknownScheme(FrozenRecord, frozen=True):
    """A layer whose scheme these rules do not know, and why."""

    reason: str

    @property
    def is_foreign(self) -> bool:
        """Whether the scheme is of a method or format that no rule describes: an engine that has it
        may well compute the layer."""
        return self.reason.startswith("no rules for")


LayerScheme = Scheme | UnknownScheme
UNQUANTIZED_SCHEME = Scheme(kind="unquantized", bits=16)
# Errors of reading a block that has another form than these rules expect.
FORM_ERRORS = (
    ArithmeticError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    Warning,
)


def make_scheme(kind: Kind, bits: int, group: int = -1, **extra_fields: Any) -> Scheme:
    return Scheme(kind=kind, bits=bits, group=group, **extra_fields)


def unknown_scheme(reason: str) -> UnknownScheme:
    return UnknownScheme(reason=reason)


class QuantizedLayer(FrozenRecord, frozen=True):
    """A layer that is asked for: its name in the engine, the names of its modules in a checkpoint,
    and whether it has experts."""

    name: str
    modules: tuple[str, ...]
    has_experts: bool


Rule = Callable[[QuantizedLayer], LayerScheme]


class MixedSchemes(Exception):
    """The parts of one fused layer differ, which engines refuse."""


class Quantization(FrozenRecord, frozen=True):
    """The schemes of a checkpoint. `assumed`: an assumption that was needed because config.json is
    silent."""

    rule: Rule
    assumed: str = ""
    # GPTQ, AWQ and AutoRound: engines treat some layers differently for these families.
    is_integer_checkpoint: bool = False
    is_numbered: bool = True  # layers that differ only in their number may have different schemes

    def scheme_of(
        self, name: str, parts: Sequence[str] = (), *, has_experts: bool = False
    ) -> LayerScheme:
        """The scheme of the layer `name`; `parts` are the last names of the modules fused into
        it."""
        stem, _, last = name.rpartition(".")
        modules = tuple(f"{stem}.{part}" if stem else part for part in parts) or (name,)
        if has_experts:
            # An expert layer is asked for by the first expert's projections.
            modules = tuple(f"{name}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
        try:
            return self.rule(QuantizedLayer(name, modules, has_experts))
        except MixedSchemes:
            return unknown_scheme(
                f"the modules fused into {last or name} are quantized differently, which engines"
                " refuse"
            )
        except (*FORM_ERRORS, re.error) as error:
            return unknown_scheme(
                f"its quantization block is not understood ({type(error).__name__})"
            )


class Block(FrozenRecord, frozen=True):
    """The quantization block of a checkpoint.

    renames: (checkpoint, engine) module paths of the engine's model class.
    packed_names: the checkpoint's modules with packed integers, if `headers_read` (layer numbers
        may be `*`).
    traits: the traits of the engine version.
    """

    config: Mapping[str, Any]
    renames: Sequence[tuple[str, str]] = ()
    packed_names: frozenset[str] = frozenset()
    headers_read: bool = False
    traits: frozenset[str] = frozenset()

    def engine_name(self, entry: str) -> str:
        """A path of the block as the engine's name. Regular expressions stay. Source:
        WeightsMapper, models/utils.py."""
        if entry.startswith("re:"):
            return entry
        for old_prefix, new_prefix in self.renames:
            if old_prefix.startswith("."):
                entry = entry.replace(old_prefix, new_prefix)
            elif entry.startswith(old_prefix):
                entry = new_prefix + entry[len(old_prefix) :]
        return entry


def first_entries(config: Mapping[str, Any], *names: str) -> list[str]:
    """The first of these lists that has entries, flattened once."""
    for name in names:
        result = config.get(name)
        if result:
            flat = [
                inner_word
                for item in result
                for inner_word in (item if isinstance(item, list) else [item])
            ]
            if not all(isinstance(item, str) for item in flat):
                raise TypeError(name)
            return flat
    return []


def number(value: object, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 2**20:
        raise TypeError("a number")
    return value


def has_all_or_none(modules: Sequence[str], matches: Callable[[str], bool]) -> bool:
    result = {matches(module) for module in modules}
    if len(result) > 1:
        raise MixedSchemes
    return result.pop()
