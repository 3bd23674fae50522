"""A test stands where its module stands and has the module's name, so that each leads to the
other."""

from __future__ import annotations

from pathlib import Path

from tests.support.paths import ROOT

# What several modules do together, by the folder of the lowest of them.
TOGETHER = """
local/controller/test_faults.py
local/controller/test_gpu_loss.py
local/controller/test_images.py
local/controller/test_proof.py
local/controller/test_start_phases.py
local/controller/test_unexpected_errors.py
local/proxy/test_app_requests.py
local/proxy/test_compiled_wheel.py
local/proxy/test_endpoint_sdks.py
local/proxy/test_hostile_bytes.py
local/proxy/test_hostile_engine.py
local/proxy/test_openai.py
local/proxy/test_openai_clients.py
local/proxy/test_sdks.py
local/test_boot_storm.py
local/test_documented.py
local/test_examples.py
local/test_proxy_benchmark.py
local/test_security.py
local/test_seed_scenarios.py
local/test_sharing.py
unit/engines/common/kernels/test_sglang_kernels.py
unit/planner/test_launch.py
unit/planner/test_plan_json.py
unit/planner/test_properties.py
unit/planner/test_public_cases.py
unit/planner/test_reported_failures.py
unit/planner/test_sources.py
unit/test_architecture.py
unit/test_contributing.py
unit/test_docs_style.py
unit/test_yaml_style.py
unit/test_documented.py
unit/test_forge.py
unit/test_imports.py
unit/test_locks.py
unit/test_measured_grid.py
unit/test_mentions.py
unit/test_names.py
unit/test_outside.py
unit/test_pure_rooms.py
unit/test_security.py
unit/test_style.py
"""
TESTS = sorted(
    path for tier in ("unit", "local") for path in (ROOT / "tests" / tier).glob("**/test_*.py")
)


def modules(test: Path) -> set[str]:
    """The files and folders of the package, of tests/support or of profiles, where the test
    stands."""
    inside = Path(*test.relative_to(ROOT / "tests").parts[1:-1])
    roots = {"support": ("tests",), "profiles": ("", "gateway")}.get(inside.name, ("gateway",))
    files = (path for root in roots for path in (ROOT / root / inside).glob("*"))
    return {path.stem for path in files if path.suffix in (".py", ".yaml") or path.is_dir()} | {
        inside.name
    }


def nameless() -> set[str]:
    """Tests whose name begins with the name of no module there."""
    return {
        str(test.relative_to(ROOT / "tests"))
        for test in TESTS
        if not any(f"{test.stem}_".startswith(f"test_{module}_") for module in modules(test))
    }


def test_a_test_has_the_name_of_its_module() -> None:
    assert nameless() <= set(TOGETHER.split())
