#!/usr/bin/env bash
# mcp 2.3.0: a tool's parameter of the type `str | None` cannot take a text that is JSON. The server
# parses each text before it validates it, unless the type is exactly str. An object or a list is
# refused as "not a string", and the text null becomes None. A tool that writes a file by `content:
# str | None = None` refuses package.json, and the model, which sent a string as the schema says,
# tries again until its turns are used up. Numbers stay texts.
# Seen on 2026-11-30: exact: '{"a": 1}' '[1]' 'null' '5' 'plain'; optional: refused refused None '5'
# 'plain'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'mcp==2.3.0'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio

from mcp.server import MCPServer

server = MCPServer("files")


@server.tool()
def exact(content: str) -> str:
    return repr(content)


@server.tool()
def optional(content: str | None = None) -> str:
    return repr(content)


async def call(tool, text):
    try:
        result = await server.call_tool(tool, {"content": text})
    except Exception as error:
        assert "should be a valid string" in str(error), error
        return "refused"
    content = result[0] if isinstance(result, tuple) else getattr(result, "content", result)
    return content[0].text


async def main():
    for tool in ("exact", "optional"):
        (schema,) = [one.input_schema for one in await server.list_tools() if one.name == tool]
        types = schema["properties"]["content"]
        assert "string" in str(types), types
        words = [await call(tool, text) for text in ('{"a": 1}', "[1]", "null", "5", "plain")]
        print(f"{tool}: {' '.join(words)}", end="; " if tool == "exact" else "\n")


asyncio.run(main())
PY
)
echo "$output"
expected="exact: '{\"a\": 1}' '[1]' 'null' '5' 'plain'; optional: refused refused "
expected+="None '5' 'plain'"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
