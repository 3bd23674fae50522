"""Which lines of a log are handed over: each at most once, in order, with its number, and the last
ones after those that say something."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.diagnosis.lines.line_filter import LineFilter

# The lines by number: some are longer than a block.
KINDS = [b"frob", b"frob " * 20, b"RuntimeError: frob", b"x" * 70_000, b"y" * 140_000]
LINES = st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=200)


def filtered_lines(log: bytes, cuts: list[int], attend: int) -> list[tuple[int, bytes]]:
    rows: list[tuple[int, bytes]] = []
    lines = LineFilter(lambda raw: rows.append((lines.number, raw)))
    lines.attend = attend
    for begin, end in zip([0, *cuts], [*cuts, len(log)], strict=True):
        lines.feed(log[begin:end])
    lines.close()
    assert lines.number == log.rstrip(b"\n").count(b"\n") + 1
    return rows


@settings(deadline=None)
@given(LINES, st.lists(st.floats(0, 1), max_size=5), st.booleans(), st.sampled_from([0, 3]))
def test_each_line_is_handed_over_once_and_the_last_ones_always(
    kinds: list[int], cuts: list[float], ends: bool, attend: int
) -> None:
    lines_of_log = [KINDS[kind] for kind in kinds]
    log = b"\n".join(lines_of_log) + b"\n" * ends
    rows = filtered_lines(log, sorted(round(cut * len(log)) for cut in cuts), attend)
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert all(lines_of_log[number - 1].startswith(raw) and raw for number, raw in rows)
    error_numbers = {number for number, line in enumerate(lines_of_log, 1) if b"Error" in line}
    assert error_numbers <= set(numbers)
    assert numbers[-1] == len(lines_of_log)
    if max(map(len, lines_of_log)) < 60_000:
        assert {
            number
            for number in range(len(lines_of_log) - 5, len(lines_of_log) + 1)
            if number > max(error_numbers, default=0)
        } <= {*numbers, *range(-5, 1)}
