"""Structured log lines on stderr: text for a terminal, JSON for everything else. Prompts and keys
are never logged."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from gateway.visible import visible

_USUAL = ("debug", "info")


class Logger:
    """The log of a part of the gateway: each line says what happened, and has what is known of it
        as fields.

    exc_info, of every method: the error whose traceback is logged too.
    """

    def __init__(self, name: str) -> None:
        self._to = logging.getLogger(name)

    def info(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.ERROR, event, fields)

    def critical(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.CRITICAL, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """An error with the traceback of what is being handled."""
        self._tell(logging.ERROR, event, {"exc_info": True, **fields})

    def _tell(self, level: int, event: str, fields: dict[str, Any]) -> None:
        trace = fields.pop("exc_info", None)
        self._to.log(level, event, exc_info=trace, extra={"fields": fields})


def configure_logging(level: str) -> None:
    """Write our events and the standard library's to stderr, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines() if sys.stderr.isatty() else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # A line for every request of ours, or of a start and an end that ours tell too.
    for noisy in ("httpx", "httpcore", "urllib3", "docker", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Json(logging.Formatter):
    """One object a line. What JSON has no form for is written as Python writes it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            **_fields(record),
            "event": record.getMessage(),
            "logger": record.name,
            "level": record.levelname.lower(),
            "timestamp": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


class Lines(logging.Formatter):
    """For people: `10:41:02 listening  url=http://127.0.0.1:8080`. What an engine or a client has
    written steers no terminal."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = record.levelname.lower()
        named = [
            f"{name}={value if isinstance(value, str) and value and ' ' not in value else repr(value)}"
            for name, value in _fields(record).items()
        ]
        said = f"{at} {'' if level in _USUAL else f'{level}: '}{record.getMessage()}"
        line = visible("  ".join([said, *([" ".join(named)] if named else [])]))
        return (
            f"{line}\n{visible(self.formatException(record.exc_info))}" if record.exc_info else line
        )


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


# A command configures no log: what is told while it works is told to its user.
if logging.lastResort is not None:
    logging.lastResort.setFormatter(Lines())
