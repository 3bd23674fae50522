"""Whether a gateway can listen on its port."""

from __future__ import annotations

import socket

from gateway.settings import Settings


def port_problem(settings: Settings) -> str:
    """The system's reason for which nothing can listen there now; "": the port is free."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((settings.host, settings.port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
