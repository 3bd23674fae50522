"""The GPUs that run an engine's compiled code."""

import pytest

from gateway.engines.common.kernels.compiled_kernels import binary_support, capabilities

VLLM = (
    "compute_80",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_90a",
    "sm_100",
    "sm_100f",
    "sm_120",
)


@pytest.mark.parametrize(
    ("compiled", "capability", "expected"),
    [
        (VLLM, "7.0", "no"),
        (VLLM, "7.5", "code"),
        (VLLM, "8.7", "code"),  # a minor version runs the code of those before it
        (VLLM, "11.0", "ptx"),
        (VLLM, "12.1", "code"),
        (("sm_86",), "8.0", "no"),
        (("sm_90a",), "9.0", "code"),
        (("sm_100a",), "10.3", "no"),
        (("sm_100f",), "10.3", "code"),
        (("sm_100f",), "12.0", "no"),
        (("compute_90a",), "10.0", "no"),
        (("compute_90",), "8.9", "no"),
        (("something new",), "9.0", "no"),
    ],
)
def test_compiled_code_runs_on_a_gpu_of_its_capability(
    compiled: tuple[str, ...], capability: str, expected: str
) -> None:
    assert binary_support(compiled, capability) == expected


def test_capabilities_are_those_with_code_each_once() -> None:
    assert capabilities(VLLM) == ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
