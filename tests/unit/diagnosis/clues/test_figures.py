"""Facts that follow from figures of a failure."""

import pytest

from gateway.diagnosis.clues.figures import conclude, short_table
from gateway.domain import Scalar

GIB = 2**30


@pytest.mark.parametrize(
    ("tried", "free", "facts"),
    [
        (GIB // 50, 66 * GIB, {"enough_free": "yes"}),
        (20 * GIB, 42 * GIB, {"enough_free": "yes"}),
        # Memory that is nearly free is a lack: the driver needs a part.
        (GIB // 2, GIB, {}),
        (20 * GIB, 30 * GIB, {}),
        (None, 66 * GIB, {}),
        (GIB, None, {}),
    ],
)
def test_a_small_refused_allocation_has_another_cause_than_memory(
    tried: Scalar, free: Scalar, facts: dict[str, Scalar]
) -> None:
    values = {"tried_bytes": tried, "free_bytes": free}
    assert conclude("", values) == facts


@pytest.mark.parametrize(
    ("shapes", "facts"),
    [
        ("(10x200 and 600x9)", {"one_channel": "yes"}),
        ("(10x200 and 400x9)", {}),
        ("(10x600 and 200x9)", {}),
    ],
)
def test_a_third_of_the_values_is_one_channel_of_three(
    shapes: str, facts: dict[str, Scalar]
) -> None:
    assert conclude(f"mat1 and mat2 shapes cannot be multiplied {shapes}", {}) == facts


@pytest.mark.parametrize(
    ("total", "own_gib", "facts"),
    [
        (80 * GIB, "78.30", {"own_memory": "yes"}),
        # Another program has the rest.
        (80 * GIB, "12.00", {}),
        (80 * GIB, "40.00", {}),
        (None, "78.30", {}),
    ],
)
def test_a_process_that_holds_most_of_the_gpu_has_filled_it_itself(
    total: Scalar, own_gib: str, facts: dict[str, Scalar]
) -> None:
    message = f"CUDA out of memory. Of the allocated memory {own_gib} GiB is allocated by PyTorch"
    assert conclude(message, {"total_bytes": total}) == facts


@pytest.mark.parametrize(
    ("ranks", "sizes", "facts"),
    [
        (2, (512, 1024), {"unsplit": "yes"}),
        (4, (2048, 512), {"unsplit": "yes"}),
        (4, (1024, 512), {}),
        (1, (512, 512), {}),
        (None, (512, 1024), {}),
    ],
)
def test_a_weight_as_many_times_too_large_as_there_are_ranks_is_not_split(
    ranks: Scalar, sizes: tuple[int, int], facts: dict[str, Scalar]
) -> None:
    first, second = sizes
    message = f"The size of tensor a ({first}) must match the size of tensor b ({second})"
    assert conclude(message, {"ranks": ranks}) == facts


@pytest.mark.parametrize(
    ("check", "context", "rows"),
    [
        ("index out of bounds: 0 <= tmp48 < 40960", 87040, 40960),
        # The table is as long as the context, or it has experts or requests.
        ("index out of bounds: 0 <= tmp48 < 40960", 40960, None),
        ("index out of bounds: 0 <= tmp4 < 128", 87040, None),
        ("frob < frob_size", 87040, None),
        ("index out of bounds: 0 <= tmp48 < 40960", None, None),
    ],
)
def test_a_table_shorter_than_the_context_is_that_of_positions(
    check: str, context: int | None, rows: int | None
) -> None:
    expected: dict[str, Scalar] = {"assertion": check}
    assert short_table(check, context) == expected | ({"position_rows": rows} if rows else {})
    assert short_table("", context) == {}


def test_an_address_that_nccl_does_not_use_is_another_interface() -> None:
    addresses = {"host_ip": "192.0.2.7", "nccl_ip": "198.51.100.7"}
    assert conclude("", addresses) == {"other_interface": "yes"}
    assert conclude("", addresses | {"nccl_ip": "192.0.2.7"}) == {}
    assert conclude("", addresses | {"ray_workers": "yes"}) == {}
