"""A YAML document with line and column of each value, for error messages.

A key that stands twice is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Keys = tuple[str | int, ...]
# No models file is deeper.
_MAX_DEPTH = 12
# Values with aliases counted at each use: a few lines of nested aliases can exceed any memory.
_MAX_VALUES = 200_000


class Position(NamedTuple):
    """Line and column, from 1 on."""

    line: int
    column: int


class Mistake(NamedTuple):
    position: Position
    text: str

    def describe_in(self, file: Path) -> str:
        return f"{file}:{self.position.line}:{self.position.column}: {self.text}"


class Document(NamedTuple):
    """The data of a YAML document, with positions and mistakes.

    `positions` is by the keys that lead to a value: the position of the key, or of an entry of a
    list.
    """

    data: Any
    positions: dict[Keys, Position]
    mistakes: list[Mistake]

    def position_of(self, keys: Keys) -> Position:
        """The place of the value, or of the innermost one around it in the file."""
        return next(
            (
                self.positions[keys[:end]]
                for end in range(len(keys), -1, -1)
                if keys[:end] in self.positions
            ),
            Position(1, 1),
        )


def read(text: str) -> Document:
    """The document of a YAML text, with its mistakes and the position of each key."""
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        positions: dict[Keys, Position] = {}
        mistakes = (
            list(_walk_nodes(node, (), positions))
            if node is not None and _values(node, {}) <= _MAX_VALUES
            else []
        )
        if node is not None and not positions:
            return Document(
                None,
                {},
                [
                    Mistake(
                        _position(node), f"with its aliases this is more than {_MAX_VALUES} values"
                    )
                ],
            )
        data = loader.construct_document(node) if node is not None and not mistakes else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(mark.line + 1, mark.column + 1) if mark is not None else Position(1, 1)
        return Document(
            None, {}, [Mistake(position, f"this is not YAML: {error.problem or error.context}")]
        )
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        last = text.rfind("\n", 0, error.position)
        return Document(
            None,
            {},
            [Mistake(Position(line, error.position - last), "this character may not be in YAML")],
        )
    except RecursionError:
        return Document(None, {}, [Mistake(Position(1, 1), "this is nested too deeply")])
    except (yaml.YAMLError, ValueError) as error:
        return Document(
            None, {}, [Mistake(Position(1, 1), f"this is not YAML: {' '.join(str(error).split())}")]
        )
    finally:
        if loader is not None:
            loader.dispose()
    return Document(data, positions, mistakes)


def _values(node: yaml.Node, counts: dict[int, int]) -> int:
    """The number of values in a node, aliases counted at each use; a cycle is too many."""
    if (count := counts.get(id(node))) is None:
        counts[id(node)] = _MAX_VALUES + 1
        inner_nodes = (
            [child for pair in node.value for child in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        count = counts[id(node)] = 1 + (
            sum(_values(child, counts) for child in inner_nodes)
            if not isinstance(node, yaml.ScalarNode)
            else 0
        )
    return count


def _walk_nodes(node: yaml.Node, keys: Keys, positions: dict[Keys, Position]) -> Iterator[Mistake]:
    """The mistakes of a node and of the nodes in it. Each position is added to `positions`."""
    position = _position(node)
    positions.setdefault(keys, position)
    if len(keys) > _MAX_DEPTH:
        yield Mistake(position, "this is nested too deeply")
    elif isinstance(node, yaml.SequenceNode):
        for number, entry in enumerate(node.value):
            yield from _walk_nodes(entry, (*keys, number), positions)
    elif isinstance(node, yaml.MappingNode):
        anchors: set[str] = set()
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not name or name in anchors:
                yield Mistake(
                    _position(key),
                    f"the key {name!r} stands here twice" if name else "a key has to be a word",
                )
            anchors.add(name)
            # A name stays as it is written: `no` and `1.10` are names, not False and 1.1.
            key.tag = "tag:yaml.org,2002:str"
            positions[(*keys, name)] = _position(key)
            yield from _walk_nodes(value, (*keys, name), positions)


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)
