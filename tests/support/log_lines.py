"""The log of the gateway during a test: each line with its fields."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.logging import LineFormatter


class _LineCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields = {
            "event": record.getMessage(),
            "log_level": record.levelname.lower(),
            "exc_info": error,
        }
        self.lines.append({**getattr(record, "fields", {}), **fields})


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record))  # noqa: T201 - to the standard output of the test that runs


@contextmanager
def printed_logs() -> Iterator[None]:
    """Every line is printed, as a terminal shows it."""
    logger, handler = logging.getLogger("fitserve"), _Printed()
    handler.setFormatter(LineFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """The lines of every level: their fields, and `event`, `log_level`, and as `exc_info` the error
    whose traceback is logged."""
    logger, handler = logging.getLogger("fitserve"), _LineCollector()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
