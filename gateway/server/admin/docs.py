"""GET /admin/docs: the admin API as one page, from its OpenAPI description.

The page has no script and uses no other server, because it may be read with an admin key.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0"
    " 1em}h2{margin-top:2em}code{background:#8883;padding:0"
    " .2em}table{border-collapse:collapse}td{vertical-align:top;padding:.1em 1em .1em"
    " 0}:root{color-scheme:light dark}"
)
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'sha256-"
        + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
        + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/admin/docs")
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(page(request.app.openapi()), headers=_HEADERS)


def page(api: dict[str, Any]) -> str:
    """The OpenAPI 3.1 description as HTML."""
    title = f"{api['info']['title']} {api['info']['version']}: admin API"
    head = (
        "<!doctype html><html lang=en><meta"
        f" charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1>"
    )
    intro = "<p>The same for programs: <a href=/admin/openapi.json>/admin/openapi.json</a></p>"
    calls = (
        _operation_html(method, path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    )
    schemas = (_schema_html(name, schema) for name, schema in api["components"]["schemas"].items())
    return "\n".join((head, intro, *calls, "<h1>Values</h1>", *schemas))


def _operation_html(method: str, path: str, operation: dict[str, Any]) -> str:
    """The part of a call in the page of the API."""
    lines = [
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>",
        f"<p>{escape(operation.get('description', ''))}</p>",
    ]
    rows = [
        (
            parameter["name"],
            parameter["in"] + (", required" if parameter.get("required") else ""),
            _type_html(parameter["schema"]),
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", ())
    ]
    lines += _table(rows)
    for title, message in (
        ("Body", operation.get("requestBody", {})),
        ("Answer", _success(operation["responses"])),
    ):
        lines += [
            f"<p>{title}: {_type_html(content['schema'])}</p>"
            for content in message.get("content", {}).values()
            if "schema" in content
        ]
    return "\n".join(lines)


def _success(responses: dict[str, Any]) -> dict[str, Any]:
    return next((response for status, response in responses.items() if status.startswith("2")), {})


def _schema_html(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            field,
            "required" if field in required else "",
            _type_html(field_schema),
            field_schema.get("description", ""),
        )
        for field, field_schema in schema.get("properties", {}).items()
    ]
    return "\n".join(
        (
            f'<h2 id="{escape(name)}">{escape(name)}</h2>',
            f"<p>{escape(schema.get('description', ''))}</p>",
            *_table(rows),
        )
    )


def _table(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Rows of name, requirement, type in HTML, description."""
    cells = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(requirement)}<td>{kind}"
        f"<td>{escape(description)}"
        for name, requirement, kind, description in rows
    ]
    if cells:
        yield f"<table>{''.join(cells)}</table>"


def _type_html(schema: dict[str, Any]) -> str:
    """A type in HTML; a type of this API is a link to its fields."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type_html(choice) for choice in choices)
    if "enum" in schema or "const" in schema:
        return " or ".join(
            escape(repr(value)) for value in schema.get("enum", [schema.get("const")])
        )
    kind = escape(str(schema.get("type", "any")))
    return (
        f"{kind} of {_type_html(schema['items'])}"
        if isinstance(schema.get("items"), dict)
        else kind
    )
