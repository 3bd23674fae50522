"""`python -m gateway.health`: exit 0 when the gateway of this container answers. Standard library only, for it runs every few seconds."""

from __future__ import annotations

import http.client
import os
import sys


def main() -> int:
    host = os.environ.get("FITSERVE_HOST", "127.0.0.1")
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(target, int(os.environ.get("FITSERVE_PORT", "8080")), timeout=4)
    try:
        connection.request("GET", "/healthz")
        return 0 if connection.getresponse().status == 200 else 1
    except OSError:
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
