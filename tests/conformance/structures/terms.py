"""Terms of config fields that give observed sizes, layers and conditions. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

Env = Mapping[str, Any]
_SMALL = {Fraction(number) for number in range(1, 65)} | {Fraction(1, n) for n in (2, 4, 8, 16)}
_MAX_FIELD = 64
_LAST_LAYER = re.compile(r"(feature|select)_layer$")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _product(env: Env, factors: Sequence[str], divisor: str | None) -> Fraction:
    value = Fraction(1)
    for name in factors:
        value *= env[name]
    if divisor is None:
        return value
    return value / env[divisor] if env[divisor] else Fraction(0)


def _products(fields: Sequence[str]) -> dict[str, Callable[[Env], Fraction]]:
    """Products of up to three of the fields, one of which may divide, and 1."""
    products: dict[str, Callable[[Env], Fraction]] = {"1": lambda _: Fraction(1)}
    for size in (1, 2, 3):
        for names in itertools.combinations(fields, size):
            divisors: list[str | None] = [None, *names] if size > 1 else [None]
            for divisor in divisors:
                factors = [name for name in names if name != divisor]
                text = "*".join(factors) + (f"//{divisor}" if divisor else "")
                products[text] = partial(_product, factors=factors, divisor=divisor)
    for side in fields:  # of a patch
        for side_names in ([], *([name] for name in fields if name != side)):
            factors = [*side_names, side, side]
            products["*".join(factors)] = partial(_product, factors=factors, divisor=None)
    return products


def _solve(rows: Sequence[Sequence[Fraction]]) -> list[Fraction] | None:
    """The factors x with terms * x = value in each row (terms..., value); None: not one answer."""
    matrix = [[*row] for row in rows]
    width = len(matrix[0]) - 1
    for column in range(width):
        pivot = next((n for n in range(column, len(matrix)) if matrix[n][column]), None)
        if pivot is None:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        matrix[column] = [value / matrix[column][column] for value in matrix[column]]
        for number, row in enumerate(matrix):
            if number != column and row[column]:
                matrix[number] = [
                    value - row[column] * column_value
                    for value, column_value in zip(row, matrix[column], strict=True)
                ]
    if any(row[width] for row in matrix[width:]):
        return None
    return [matrix[number][width] for number in range(width)]


def _text_of_term(factor: Fraction, product: str) -> str:
    if product == "1":
        return str(factor)
    text = product if factor.numerator == 1 else f"{factor.numerator}*{product}"
    return text if factor.denominator == 1 else f"{text}//{factor.denominator}"


def _needed_fields(names: Sequence[str], rows: Sequence[tuple[Env, int]]) -> set[str]:
    """The fields that alone change the value."""
    field_names = set()
    for (first_env, first), (second_env, second) in itertools.combinations(rows, 2):
        differences = {name for name in names if first_env[name] != second_env[name]}
        if len(differences) == 1 and first != second:
            field_names |= differences
    return field_names


def size_term(fields: set[str], rows: Sequence[tuple[Env, int]]) -> str | None:
    """The shortest sum of products of `fields` that gives the value of every row."""
    names = sorted(f for f in fields if all(_is_integer(env.get(f)) for env, _ in rows))
    if len({value for _, value in rows}) == 1:
        equal = [name for name in names if all(env[name] == value for env, value in rows)]
        return equal[0] if equal else str(rows[0][1])
    distinct_rows = {(*(env[name] for name in names), value): (env, value) for env, value in rows}
    rows = [*distinct_rows.values()]
    needed_fields = _needed_fields(names, rows)
    products = _products(names)
    order = sorted(products, key=lambda text: (text.count("*") + text.count("/"), len(text)))
    # Factors of any size only where no small one fits.
    for any_factor, count in ((False, 1), (False, 2), (False, 3), (True, 1), (True, 2)):
        for subset in itertools.combinations(order, count):
            if not needed_fields <= {*re.split(r"\*|//", "*".join(subset))}:
                continue
            table = [
                [*(products[text](env) for text in subset), Fraction(value)] for env, value in rows
            ]
            factors = _solve(table)
            if factors is not None and all(
                factor in _SMALL
                or (factor > 0 and factor.denominator == 1 and (any_factor or text == "1"))
                for factor, text in zip(factors, subset, strict=True)
            ):
                return " + ".join(map(_text_of_term, factors, subset))
    return _stepped_term(names, rows)


def _stepped_term(names: Sequence[str], rows: Sequence[tuple[Env, int]]) -> str | None:
    """A field, or a share of it, rounded up to a multiple of another; the patches of a square."""
    for first, second in itertools.permutations(names, 2):
        if any(not env[second] for env, _ in rows):
            continue
        for above, below in ((1, 1), (2, 3), (8, 3)):
            share = first if above == below else f"{above}*{first}//{below}"
            if all(
                -(-(above * env[first] // below) // env[second]) * env[second] == value
                for env, value in rows
            ):
                return f"({share} + {second} - 1)//{second}*{second}"
        for more in (0, 1, 2):
            if all((env[first] // env[second]) ** 2 + more == value for env, value in rows):
                side = f"{first}//{second}"
                return f"({side})*({side})" + (f" + {more}" if more else "")
    return None


def flagged_term(fields: set[str], rows: Sequence[tuple[Env, int]]) -> str | None:
    """`size_term`, or one of several by flags and optional fields."""
    flags = sorted(f for f in fields if not all(_is_integer(env.get(f)) for env, _ in rows))
    if not flags:
        return size_term(fields, rows)
    for flag in flags:
        yes = [row for row in rows if row[0].get(flag)]
        no = [row for row in rows if not row[0].get(flag)]
        if yes and no:
            first = size_term(fields, yes) or flagged_term(fields - {flag}, yes)
            second = flagged_term(fields - {flag}, no)
            if first is not None and second is not None:
                return f"{first} if {flag} else {second}"
    return None


def condition_term(fields: set[str], rows: Sequence[tuple[Env, bool]]) -> str | None:
    """One literal, or two joined, that holds in exactly the rows that say so."""
    if all(holds for _, holds in rows):
        return "always"
    conditions: list[tuple[str, list[bool]]] = []
    for field in sorted(fields):
        values = [env.get(field) for env, _ in rows]
        truth = [bool(value) for value in values]
        conditions += [(field, truth), (f"not {field}", [not value for value in truth])]
        for word in sorted({value for value in values if isinstance(value, str)}):
            conditions.append((f"{field} == {word!r}", [value == word for value in values]))
            conditions.append((f"{field} != {word!r}", [value != word for value in values]))
    for first_field, right in itertools.combinations(sorted(fields), 2):
        pairs = [(env.get(first_field), env.get(right)) for env, _ in rows]
        if all(_is_integer(a) and _is_integer(b) for a, b in pairs):
            conditions.append((f"{first_field} != {right}", [a != b for a, b in pairs]))
            conditions.append((f"{first_field} == {right}", [a == b for a, b in pairs]))
    truths = [holds for _, holds in rows]
    for text, truth in conditions:
        if truth == truths:
            return text
    for (first, first_truths), (second, second_value) in itertools.combinations(conditions, 2):
        if [a and b for a, b in zip(first_truths, second_value, strict=True)] == truths:
            return f"{first} and {second}"
        if [a or b for a, b in zip(first_truths, second_value, strict=True)] == truths:
            return f"{first} or {second}"
    # All that the first row has.
    conditions_of_part = [
        (text, truth) for text, truth in conditions if truth[0] and not all(truth)
    ]
    if (
        truths[0]
        and [all(truth[n] for _, truth in conditions_of_part) for n in range(len(rows))] == truths
    ):
        return " and ".join(text for text, _ in conditions_of_part)
    return None


def last_layer_term(names: Sequence[str], rows: Sequence[tuple[Env, int]]) -> str | None:
    """The term for the number of layers up to one that a field names, from either end."""
    ends = {name for env, _ in rows for name in env if _LAST_LAYER.search(name)}
    for name, end in itertools.product(names, sorted(ends)):
        if not all(_is_integer(env.get(name)) and _is_integer(env.get(end)) for env, _ in rows):
            continue
        if all(env[end] + 1 + (env[name] if env[end] < 0 else 0) == count for env, count in rows):
            return f"{name} + {end} + 1 if {end} < 0 else {end} + 1"
    return None


LayerRow = tuple[Env, int, Sequence[int]]


def layers_term(fields: set[str], rows: Sequence[LayerRow]) -> str | None:
    """The term over the layer number `i` that holds in exactly the layers of each (env, number of
    layers, layers)."""
    envs = [{name: env.get(name) for name in fields} for env, _, _ in rows]
    for text, holds in _layer_terms(envs):
        if all(
            [n for n in range(count) if holds(env, n)] == [*layers]
            for env, (_, count, layers) in zip(envs, rows, strict=True)
        ):
            return text
    return None


_Holds = Callable[[Env, int], bool]


def _number(env: Env, field: str) -> int:
    value = env.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _layer_terms(envs: Sequence[Env]) -> Iterator[tuple[str, _Holds]]:
    yield "all", lambda _env, _i: True
    names = sorted({name for env in envs for name in env})
    for name in names:
        values = [env.get(name) for env in envs]
        if any(isinstance(value, list | str) and len(value) > 1 for value in values):
            yield from _list_terms(name, values)
    integers = [
        name for name in names if any(0 <= _number(env, name) <= _MAX_FIELD for env in envs)
    ]
    for name in integers:
        yield from _count_terms(name)
    for first, second in itertools.permutations(integers, 2):
        yield from _pair_terms(first, second)
    for name, interval in itertools.product(names, integers):
        if _is_of_numbers([env.get(name) for env in envs]):
            yield from _exception_terms(name, interval)
    for period in range(2, 9):
        for rest in range(period):
            yield f"i % {period} == {rest}", lambda _e, i, p=period, r=rest: i % p == r  # type: ignore[misc]
            yield f"i % {period} != {rest}", lambda _e, i, p=period, r=rest: i % p != r  # type: ignore[misc]
    for start in (1, 2, 3):
        yield f"i >= {start}", lambda _e, i, s=start: i >= s  # type: ignore[misc]
        yield f"i < {start}", lambda _e, i, s=start: i < s  # type: ignore[misc]


def _list_terms(name: str, values: Sequence[Any]) -> Iterator[tuple[str, _Holds]]:
    def entry(env: Env, number: int) -> Any:
        items = env.get(name) or ()
        return items[number] if len(items) > number else None

    items = {item for value in values for item in value or () if isinstance(item, str | int)}
    words = sorted(items, key=str)
    for item in words:
        yield f"{name}[i] == {item!r}", lambda env, i, w=item: entry(env, i) == w  # type: ignore[misc]
    for item in words:
        yield f"{name}[i] != {item!r}", lambda env, i, w=item: entry(env, i) not in (w, None)  # type: ignore[misc]
    if any(_is_integer(item) for item in items):
        yield f"i + 1 in {name}", lambda env, i: i + 1 in (env.get(name) or ())
        yield f"i in {name}", lambda env, i: i in (env.get(name) or ())
        yield f"i not in {name}", lambda env, i: i not in (env.get(name) or ())


def _count_terms(name: str) -> Iterator[tuple[str, _Holds]]:
    yield f"i >= {name}", lambda env, i: i >= _number(env, name)
    yield f"i < {name}", lambda env, i: i < _number(env, name)
    for offset in (0, 1):
        rest = f"(i + {offset}) % {name}"
        yield f"{rest} == 0", lambda env, i, o=offset: _rest(env, i + o, name) == 0  # type: ignore[misc]
        yield f"{rest} != 0", lambda env, i, o=offset: _rest(env, i + o, name) != 0  # type: ignore[misc]
        yield (
            f"{name} and {rest} != 0",
            lambda env, i, o=offset: bool(_number(env, name)) and _rest(env, i + o, name) != 0,  # type: ignore[misc]
        )


def _rest(env: Env, number: int, interval: str) -> int | None:
    """The remainder; None, which equals no number, where a structure reads `interval` as 0."""
    return number % _number(env, interval) if _number(env, interval) else None


def _pair_terms(first: str, second: str) -> Iterator[tuple[str, _Holds]]:
    yield (
        f"i % {first} == {second}",
        lambda env, i: _rest(env, i, first) == _number(env, second),
    )
    yield (
        f"i % {first} != {second}",
        lambda env, i: _rest(env, i, first) != _number(env, second),
    )
    yield (
        f"i >= {first} and i % {second} == 0",
        lambda env, i: i >= _number(env, first) and _rest(env, i, second) == 0,
    )
    yield (
        f"i < {first} or i % {second} != 0",
        lambda env, i: i < _number(env, first) or _rest(env, i, second) != 0,
    )


def _is_of_numbers(values: Sequence[Any]) -> bool:
    """Whether a field has lists of layer numbers, at times empty ones."""
    items = [item for value in values if isinstance(value, list) for item in value]
    return bool(items) and all(map(_is_integer, items))


def _exception_terms(name: str, interval: str) -> Iterator[tuple[str, _Holds]]:
    """Every n-th layer but those of a list, and the others."""

    def is_listed(env: Env, i: int) -> bool:
        items = env.get(name)
        return isinstance(items, list) and i in items

    def regular(env: Env, i: int) -> bool:
        return _rest(env, i + 1, interval) == 0

    yield (
        f"i not in {name} and (i + 1) % {interval} == 0",
        lambda env, i: not is_listed(env, i) and regular(env, i),
    )
    yield (
        f"i in {name} or (i + 1) % {interval} != 0",
        lambda env, i: is_listed(env, i) or not regular(env, i),
    )
