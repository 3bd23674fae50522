#!/usr/bin/env bash
# httptools 0.9.0 beside h11 0.16.0: white space between a header's value and the end of its line
# stays in the value. RFC 9112 (5.1) excludes it. A key, a media type or an identifier of a
# request then differs from what the client means, and a comparison fails: behind one parser of
# uvicorn a request is right, behind the other one it is not. Space before the value is removed.
# Seen on 2026-11-29: httptools 'Bearer key ' 'text/event-stream\t', h11 'Bearer key'
# 'text/event-stream'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'httptools==0.9.0' 'h11==0.16.0'
output=$("$folder/venv/bin/python" - <<'PY'
import h11
import httptools

request = b"GET / HTTP/1.1\r\nHost: host\r\nAuthorization:  Bearer key \r\n\r\n"
answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\t\r\nContent-Length: 0\r\n\r\n"


class Values(dict):
    def on_header(self, name, value):
        self[name.lower()] = value.decode()


def of_httptools(parser, data):
    values = Values()
    parser(values).feed_data(data)
    return values


def of_h11(connection, data):
    connection.receive_data(data)
    return {name: value.decode() for name, value in connection.next_event().headers}


client = h11.Connection(h11.CLIENT)
client.send(h11.Request(method="GET", target="/", headers=[("Host", "host")]))
client.send(h11.EndOfMessage())
values = of_httptools(httptools.HttpRequestParser, request)[b"authorization"]
kind = of_httptools(httptools.HttpResponseParser, answer)[b"content-type"]
print(f"httptools {values!r} {kind!r}", end=", ")
values = of_h11(h11.Connection(h11.SERVER), request)[b"authorization"]
print(f"h11 {values!r} {of_h11(client, answer)[b'content-type']!r}")
PY
)
echo "$output"
expected='httptools '\''Bearer key '\'' '\''text/event-stream\t'\'', h11 '\''Bearer key'\'''
expected+=' '\''text/event-stream'\'''
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
