"""Structured log lines on stderr: text for a terminal, else JSON. Never prompts or keys."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from gateway.errors import hide_password
from gateway.visible import visible

_USUAL_LEVELS = ("debug", "info")


class Logger:
    """The log of a part of the gateway. A line is an event with its facts as fields.

    exc_info, of every method: an error to log with its traceback.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, /, **fields: Any) -> None:
        self._write_line(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._write_line(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._write_line(logging.ERROR, event, fields)

    def critical(self, event: str, /, **fields: Any) -> None:
        self._write_line(logging.CRITICAL, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._write_line(logging.ERROR, event, {"exc_info": True, **fields})

    def _write_line(self, level: int, event: str, fields: dict[str, Any]) -> None:
        trace = fields.pop("exc_info", None)
        self._logger.log(level, event, exc_info=trace, extra={"fields": fields})


def configure_logging(level: str) -> None:
    """Write our events and the standard library's to stderr, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter() if sys.stderr.isatty() else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These loggers print a line for each request, or for events that the gateway logs itself.
    for noisy in ("httpx", "httpcore", "urllib3", "docker", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Json(logging.Formatter):
    """JSON, one object a line. A value without a JSON form is written as its `repr`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            **_record_fields(record),
            "event": record.getMessage(),
            "logger": record.name,
            "level": record.levelname.lower(),
            "timestamp": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return hide_password(json.dumps(line, default=repr))


class LineFormatter(logging.Formatter):
    """Text for people: `10:41:02 listening  url=http://127.0.0.1:8080`.

    Control characters in texts of engines and clients do not reach the terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = record.levelname.lower()
        fields = " ".join(
            f"{name}={_format_value(value)}" for name, value in _record_fields(record).items()
        )
        event = f"{time} {'' if level in _USUAL_LEVELS else f'{level}: '}{record.getMessage()}"
        line = visible(f"{event}  {fields}" if fields else event)
        if record.exc_info:
            line = f"{line}\n{visible(self.formatException(record.exc_info))}"
        return hide_password(line)


def _format_value(value: object) -> str:
    """A value in one piece: with its quotes where a space, or the end of a line, would split it."""
    is_word = isinstance(value, str) and value and not any(letter.isspace() for letter in value)
    return str(value) if is_word else repr(value)


def _record_fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


# A command configures no log: its log lines are for its user.
if logging.lastResort is not None:
    logging.lastResort.setFormatter(LineFormatter())
