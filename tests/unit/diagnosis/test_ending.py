"""The end of an engine whose log names no cause: proofs of its exit code about the plan."""

import pytest

from gateway.diagnosis.ending import exit_failure, is_environmental
from gateway.domain import Instance


def instance(code: int | None) -> Instance:
    return Instance(
        name="m-r0-a1", model="m", attempt=1, fingerprint="f", state="exited", exit_code=code
    )


@pytest.mark.parametrize(
    ("code", "kind", "blames_the_plan"),
    [
        (0, "exited", False),  # SGLang as process 1 after its scheduler died; vLLM's dead core
        (137, "killed", False),  # the same behind an init
        (-9, "killed", False),
        (139, "exited", False),
        (1, "unknown", True),
        (None, "exited", False),
    ],
)
def test_only_an_error_code_of_a_start_is_held_against_the_plan(
    code: int | None, kind: str, blames_the_plan: bool
) -> None:
    failure = exit_failure(instance(code), "loading weights", ["some line"], was_ready=False)
    assert failure.kind == kind
    assert is_environmental(failure) is not blames_the_plan
    assert failure.line == "some line"


def test_an_end_with_code_0_is_blamed_on_nobody() -> None:
    """So ends an engine that was told to stop before a backup was restored, too."""
    failure = exit_failure(instance(0), "serving", [], was_ready=True)
    assert "by itself" not in failure.message
    assert "without an order of this gateway while it was serving" in failure.message
