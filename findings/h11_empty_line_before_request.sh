#!/usr/bin/env bash
# h11 0.16.0 beside httptools 0.9.0: an empty line before a request line is an error to h11,
# although RFC 9112 (2.2) asks servers to ignore one. Old clients send an empty line after the body
# of a request, so the next request of the connection fails in a server that reads with h11.
# Seen on 2026-11-29: h11: RemoteProtocolError, httptools: POST / POST /
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'h11==0.16.0' 'httptools==0.9.0'
output=$("$folder/venv/bin/python" - <<'PY'
import h11
import httptools

REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
WIRE = REQUEST + b"\r\n" + REQUEST


def targets_of_h11():
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(WIRE)
    targets = []
    while len(targets) < 2:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            return type(error).__name__
        if isinstance(event, h11.Request):
            targets.append(f"{event.method.decode()} {event.target.decode()}")
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    return " ".join(targets)


class Reader:
    targets = []

    def on_url(self, url):
        self.targets.append(f"{parser.get_method().decode()} {url.decode()}")


parser = httptools.HttpRequestParser(Reader())
parser.feed_data(WIRE)
print(f"h11: {targets_of_h11()}, httptools: {' '.join(Reader.targets)}")
PY
)
echo "$output"
[ "$output" = "h11: RemoteProtocolError, httptools: POST / POST /" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
