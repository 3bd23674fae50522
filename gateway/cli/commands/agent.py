"""`fitserve agent`: the process that starts engines in Docker."""

from __future__ import annotations


def agent() -> None:
    """Run the agent, which starts engines in Docker. Its gateway has FITSERVE_HOST_KIND=agent."""
    from gateway.cli.agent_process import run
    from gateway.logging import configure_logging
    from gateway.settings import load_settings

    settings = load_settings()
    configure_logging(settings.log_level)
    run(settings)
