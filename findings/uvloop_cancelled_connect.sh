#!/usr/bin/env bash
# uvloop 0.23.0: if create_connection is cancelled between connection_made and its return, the
# protocol's connection_lost is never called, although the socket is closed. asyncio's own loop calls
# it. What a protocol releases in connection_lost stays held.
# Seen on 2026-11-28: asyncio made=lost, uvloop made>lost
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'uvloop==0.23.0'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio

import uvloop


class Client(asyncio.Protocol):
    def __init__(self):
        self.calls = []

    def connection_made(self, transport):
        self.calls.append("made")

    def connection_lost(self, error):
        self.calls.append("lost")


async def cancelled_dials():
    """Calls of protocols whose dials were cancelled after 0 to 9 turns of the loop."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = lost = 0
    for turns in range(10):
        client = Client()
        dial = loop.create_task(loop.create_connection(lambda c=client: c, "127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
        dial.cancel()
        try:
            transport, _ = await dial
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            made += "made" in client.calls
            lost += "lost" in client.calls
        else:
            transport.close()
    server.close()
    return "made=lost" if made == lost else "made>lost"


print("asyncio", asyncio.run(cancelled_dials()))
print("uvloop", uvloop.run(cancelled_dials()))
PY
)
echo "$output"
[ "$output" = $'asyncio made=lost\nuvloop made>lost' ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
