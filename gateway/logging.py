"""Structured log lines on stderr: text for a terminal, JSON for everything else. Prompts and keys are never logged."""

from __future__ import annotations

import logging
import sys

import structlog

from gateway.domain.visible import visible


def configure_logging(level: str) -> None:
    """Route our events and the standard library's warnings through structlog."""
    number = getattr(logging, level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
        shared.append(_without_escapes)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # Its every request line would be one of ours per health check.
    for noisy in ("httpx", "httpcore", "urllib3", "docker"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _without_escapes(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal: what an engine or a client has written steers nothing. JSON escapes by itself."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in event.items()}
