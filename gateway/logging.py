"""Structured log lines on stderr: text for a terminal, JSON for everything else. Prompts and keys are never logged."""

from __future__ import annotations

import datetime
import logging
import sys

import structlog

from gateway.domain.visible import visible

_USUAL = ("debug", "info")


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
        renderer = _line
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
    # A line for every request of ours, or of a start and an end that ours tell too.
    for noisy in ("httpx", "httpcore", "urllib3", "docker", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _line(_: object, __: str, event: structlog.typing.EventDict) -> str:
    """For people: `10:41:02 listening  url=http://127.0.0.1:8080`."""
    at = datetime.datetime.fromisoformat(event.pop("timestamp")).astimezone().strftime("%H:%M:%S")
    level, said, trace = event.pop("level"), event.pop("event"), event.pop("exception", "")
    event.pop("logger", None)
    named = [
        f"{name}={value if isinstance(value, str) and value and ' ' not in value else repr(value)}"
        for name, value in event.items()
    ]
    line = "  ".join([f"{at} {'' if level in _USUAL else f'{level}: '}{said}", *([" ".join(named)] if named else [])])
    return f"{line}\n{trace}" if trace else line


def _without_escapes(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal: what an engine or a client has written steers nothing. JSON escapes by itself."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in event.items()}
