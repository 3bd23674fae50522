"""Cures for a machine name engine versions that run on it."""

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.signatures import Signatures
from gateway.planner.service.cure_versions import signatures_for
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
BUG = b"""Traceback (most recent call last):
  File "/x/site-packages/vllm/v1/worker/frob_worker.py", line 7, in frob
AttributeError: 'Frob' object has no attribute 'frobs'
"""
MODERN = PROFILES.hardware("2x3090")


def steps(signatures: Signatures, engine: str) -> str:
    log = BUG.replace(b"vllm", engine.partition("==")[0].encode())
    return " ".join(diagnose([log], signatures, engine)[0].steps)


@pytest.mark.parametrize(
    ("changes", "versions"),
    [
        ({"driver": "580.65.06"}, "vllm==0.33.0 or vllm==0.25.1"),
        # The driver runs CUDA 12 alone.
        ({"driver": "570.86.10"}, "vllm==0.19.1"),
    ],
)
def test_only_versions_that_the_driver_runs_are_named(
    changes: dict[str, str], versions: str
) -> None:
    texts = steps(signatures_for(MODERN.evolve(**changes), PROFILES), "vllm==0.26.0")
    assert f"as {versions} " in texts.replace(":", " ")
    assert ("0.33.0" in texts) is ("0.33.0" in versions)


def test_no_step_asks_for_a_version_where_none_runs() -> None:
    other_machine = MODERN.evolve(arch="riscv64")
    local_signatures, anywhere = signatures_for(other_machine, PROFILES), PROFILES.signatures
    assert "another engine version" in steps(anywhere, "sglang==0.5.20").lower()
    lower = steps(local_signatures, "sglang==0.5.20").lower()
    assert lower
    assert "another engine version" not in lower


def test_a_gpu_without_code_in_any_version_has_none_named() -> None:
    (gpu, *_) = MODERN.gpus
    old = MODERN.evolve(gpus=(gpu.evolve(capability="6.1"),))
    assert "vllm==" not in steps(signatures_for(old, PROFILES), "vllm==0.26.0")


def test_the_version_with_an_architecture_must_run_here_too() -> None:
    line = b"ValueError: Model architectures ['DeepseekV4ForCausalLM'] are not supported for now."
    old = signatures_for(MODERN.evolve(driver="570.86.10"), PROFILES)
    steps = [
        diagnose([line], signatures, "vllm==0.18.0")[0].steps
        for signatures in (PROFILES.signatures, old)
    ]
    assert "vllm==0.33.0" in steps[0][0]
    assert not any("vllm==0.33.0" in step for step in steps[1])


def test_an_engine_that_is_not_known_may_have_another_version() -> None:
    log = BUG.replace(b"/vllm/", b"/frob/")
    local_signatures, anywhere = (
        diagnose([log], signatures)[0].steps
        for signatures in (signatures_for(MODERN, PROFILES), PROFILES.signatures)
    )
    assert any(step.startswith("Use another engine version") for step in anywhere)
    assert local_signatures == anywhere


def test_the_failing_version_counts_where_it_does_not_run() -> None:
    """A log may come from elsewhere, or from an engine that was built for this machine."""
    old = signatures_for(MODERN.evolve(driver="570.86.10"), PROFILES).cures
    assert "0.33.0" not in old.rows.versions["vllm"]
    anywhere = PROFILES.signatures.cures
    architecture = "DeepseekV4ForCausalLM"
    assert anywhere.having_architecture("vllm", "0.33.0", architecture) == {}
    assert old.having_architecture("vllm", "0.33.0", architecture) == {}

    message = "unrecognized arguments: --prefill-context-parallel-sizes"
    refused_flag = anywhere.refused_flag("vllm", "0.33.0", message)
    assert refused_flag["flag_near"] == "--prefill-context-parallel-size"
    assert old.refused_flag("vllm", "0.33.0", message) == refused_flag
