"""`python -m gateway.health`: exit 0 when the gateway of this container answers.

Standard library only, because it runs every few seconds.
"""

from __future__ import annotations

import http.client
import os
import sys


def connect(host: str, port: int, *, tls: bool) -> http.client.HTTPConnection:
    """A connection to the gateway that listens on this address."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if tls:
        # The certificate has another name than this address. On this machine's own port no other
        # program can answer.
        import ssl

        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - this machine's own port
        return http.client.HTTPSConnection(target, port, timeout=4, context=context)
    return http.client.HTTPConnection(target, port, timeout=4)


def is_healthy(host: str, port: int, *, tls: bool) -> bool:
    """Whether a gateway answers at this address."""
    connection = connect(host, port, tls=tls)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def main() -> int:
    host = os.environ.get("FITSERVE_HOST") or "127.0.0.1"
    port = int(os.environ.get("FITSERVE_PORT") or "8080")
    return 0 if is_healthy(host, port, tls=bool(os.environ.get("FITSERVE_TLS_CERT"))) else 1


if __name__ == "__main__":
    sys.exit(main())
