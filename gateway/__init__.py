"""fitserve: a self-hosted serving gateway that configures inference engines for the GPUs it finds.

`gateway.plan` plans from Python: docs/plan.md.
"""

from typing import TYPE_CHECKING, Any

from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.planner.service.offline import plan


__all__ = ["__version__", "plan"]


def __getattr__(name: str) -> Any:
    """Import `plan` at its first use, so that `import gateway` stays cheap."""
    if name == "plan":
        from gateway.planner.service.offline import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
