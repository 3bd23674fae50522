"""Whether a collector of OpenTelemetry can be reached, and its libraries are installed."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

_CONNECT_S = 3.0
# Packages, with a part of each.
_LIBRARIES = {"opentelemetry.sdk": "trace", "opentelemetry.exporter.otlp.proto": "http"}
EXTRA_HINT = "Run `pip install '.[otel]'` in a clone of the repository, or unset the variable."


def missing_library() -> str | None:
    """The first package that the export needs and that is not installed. Imports only packages that
    are names."""
    for package, part in _LIBRARIES.items():
        try:
            if find_spec(f"{package}.{part}") is None:
                return package
        except ModuleNotFoundError:
            return package
    return None


def connection_problem(url: str) -> str:
    """The reason for which no connection to the collector opens; "": one opens."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    except ValueError as error:  # a port or a name that no machine can have
        return str(error)
