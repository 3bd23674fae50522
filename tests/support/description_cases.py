"""Cases made of the gateway's own description (GET /admin/openapi.json), sent to a gateway that
runs, and each answer held to that description.

    with asked_gateway(folder) as gateway: ask_cases(gateway, cases=5000, seed=1) -> {"GET
    /admin/models": Row(...), ...}

schemathesis makes the cases and checks the answers: values that fit the description, values that do
not, and beside them bodies that are not JSON. Nothing leaves this machine: the Hub is an address
where nobody listens, and every engine that a case names is one of the gateway's own.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis import BaseSchema, Case, CheckContext, GenerationMode, HookContext, Response
from schemathesis.core.failures import FailureGroup
from schemathesis.core.transport import is_event_stream
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from urllib3 import HTTPResponse

from gateway.domain.endpoint_url import endpoint_url
from gateway.domain.wish import NAME_PATTERN
from gateway.proxy.api.endpoints import is_inference, shape_of
from tests.contract.process_harness import free_port
from tests.e2e.conftest import Gateway
from tests.e2e.scripted import scripted_gateway
from tests.support.patience import hang_s
from tests.support.running import model_folder

KEY = "an-admin-key-of-the-described-runs"
# This model serves throughout: no case changes it.
SERVED = "served"
# Models that cases add and change. Few, since each has an engine.
NAMES = ("a", "b:1", "org/c", "d")
_DEEP = 100_000

# (bytes, content type) that no description would make.
RAW: tuple[tuple[bytes, str | None], ...] = (
    (b"", "application/json"),
    (b"\xff\xfe\x80", "application/json"),
    (b'{"name": "\xff"}', "application/json"),
    ('{"name": "é"}'.encode("utf-16"), "application/json"),
    (b"\xef\xbb\xbf{}", "application/json"),
    (b'{"name": "\\ud800"}', "application/json"),
    (b'{"model": "\\ud800", "source": "\\udfff", "name": "a"}', "application/json"),
    (b'{"name": NaN, "value": Infinity}', "application/json"),
    (b'{"name": 1e999, "value": -1e999}', "application/json"),
    (b'{"name": ' + b"9" * 5000 + b"}", "application/json"),
    (b"[" * _DEEP + b"]" * _DEEP, "application/json"),
    (b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, "application/json"),
    (b'{"name": "a", "name": 1}', "application/json"),
    (b"null", "application/json"),
    (b"[]", "application/json"),
    (b'"a"', "application/json"),
    (b"{", "application/json"),
    (b"{}", None),
    (b"{}", "text/plain"),
    (b"{}", "application/json; charset=utf-16"),
    (b"{}", "application/x-www-form-urlencoded"),
    (b"{}", "multipart/form-data"),
    (b"{}", "multipart/form-data; boundary=x"),
    (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nserved\r\n--x--\r\n',
        "multipart/form-data; boundary=x",
    ),
    (b"{}", "\xff/json"),
)


# Facts of a model that its description does not contain.
CHANGES: tuple[dict[str, Any], ...] = (
    {"context": 2048},
    {"context": None},
    {"policy": {"keep_alive": "5m", "pinned": True}},
    {"aliases": ["e", "org/f:2"]},
    {"args": {"max-num-seqs": 8}},
    {"args": {"nothing-like-this": 1}},
    {"env": {"OMP_NUM_THREADS": "1"}},
    {"replicas": 2},
    {"source": None},
    {"chat_template": {"text": "{{ messages[0].content }}"}},
)


@dataclass
class Row:
    """The results of the cases of one route and method. breaches: each kind once, with its first
    case."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    breaches: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def asked_gateway(folder: Path) -> Iterator[Gateway]:
    """A gateway as users start it, with a key, scripted engines and the models of SERVED. The Hub
    is an address without a listener."""
    nobody = f"http://127.0.0.1:{free_port()}"
    environment = {
        "FITSERVE_HF_ENDPOINT": nobody,
        "FITSERVE_MODELS_DIR": str(folder / "hub"),
        "FITSERVE_ADMIN_KEY": KEY,
    }
    with contextlib.closing(scripted_gateway(folder, **environment)) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {KEY}"
        source = model_folder(folder / "model")
        gateway.start()
        answer = gateway.client.post("/admin/models", json={"name": SERVED, "source": str(source)})
        assert answer.status_code == 202, answer.text
        gateway.until(SERVED, "ready")
        yield gateway


def ask_cases(gateway: Gateway, cases: int, seed: int, count: int = 10) -> dict[str, Row]:
    """The results of at least so many cases, by "METHOD /path". The routes have their turns, so
    that each is met in many states of the others; in one turn a route is asked `count` times as it
    takes it, and as often as it does not."""
    api = gateway.client.get("/admin/openapi.json").json()
    for methods in api["paths"].values():
        for operation in methods.values():
            del operation["security"]  # every case has the key
    schema = schemathesis.openapi.from_dict(api)
    _keep_here(schema, gateway)
    operations = [method for _, methods in schema.items() for method in methods.values()]
    # Routes that remove something come last.
    operations.sort(key=lambda operation: operation.method.upper() == "DELETE")
    rows = {operation.label: Row() for operation in operations}
    strategies = {
        (operation.label, mode): operation.as_strategy(mode)
        for operation in operations
        for mode in GenerationMode
    }
    for turn in itertools.count():
        for operation in operations:
            row = rows[operation.label]
            if not operation.body and not any(operation.iter_parameters()):
                _ask(gateway, row, operation.Case())
                continue
            for mode in GenerationMode:
                _ask_each(
                    strategies[operation.label, mode],
                    count,
                    seed + turn,
                    partial(_ask, gateway, row),
                )
            if operation.body:
                names = {
                    parameter.name: NAMES[turn % len(NAMES)]
                    for parameter in operation.path_parameters
                }
                case = operation.Case(path_parameters=names)
                _ask(gateway, row, case, RAW[turn % len(RAW)])
        if sum(each_row.cases for each_row in rows.values()) >= cases:
            return rows
    raise AssertionError


class FirstBytes(requests.Session):
    """Reads the beginning of an event stream, which has no end."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        answer = super().request(*args, **options)
        if is_event_stream(answer.headers.get("content-type")):
            first = answer.raw.read1()
            answer.close()
            answer.raw = HTTPResponse(BytesIO(first), answer.raw.headers, preload_content=False)
        return answer


def _ask_each(strategy: Any, count: int, seed: int, ask: Callable[[Case[Any]], None]) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def ask_case(case: Case[Any]) -> None:
        ask(case)

    # A route without input has no wrong input.
    with contextlib.suppress(Unsatisfiable):
        ask_case()


def _ask(
    gateway: Gateway, row: Row, case: Case[Any], raw: tuple[bytes, str | None] | None = None
) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body: dict[str, Any] = {}
    if raw is not None:
        headers |= {"content-type": raw[1]} if raw[1] is not None else {}
        body = {"data": raw[0]}
    row.cases += 1
    try:
        with FirstBytes() as session:
            answer = case.call(gateway.url, session, headers=headers, timeout=hang_s(), **body)
    except requests.RequestException as error:
        row.breaches.setdefault(type(error).__name__, f"{case!r} {raw!r}: {error}")
        return
    row.statuses[answer.status_code] += 1
    try:
        case.validate_response(answer, checks=CHECKS)
    except FailureGroup as failures:
        for failure in failures.exceptions:
            text = case.as_curl_command(headers={}) if raw is None else repr(raw)
            row.breaches.setdefault(
                f"{type(failure).__name__} {answer.status_code}", f"{text[:2000]}\n{failure}"[:4000]
            )


def errors_of_its_own(ctx: CheckContext, answer: Response, case: Case[Any]) -> None:
    """An error is the gateway's own but under inference, and it is one of the API that was
    called."""
    del ctx
    is_from_gateway = answer.headers.get("x-gateway-source", [""])[0] == "gateway"
    if answer.status_code >= 400 and not is_from_gateway and not is_inference(case.path):
        raise AssertionError("an error that is not the gateway's own")
    if answer.status_code >= 400 and is_from_gateway:
        document = answer.json()
        if shape_of(case.path) == "openai":
            assert document.keys() == {"error"}
            assert document["error"].keys() == {"message", "type", "param", "code"}
        else:
            assert document.keys() == {"type", "error"}
            assert document["error"].keys() == {"type", "message"}
        assert document["error"]["message"]


def no_server_error(ctx: CheckContext, answer: Response, case: Case[Any]) -> None:
    del ctx
    assert answer.status_code < 500, f"{case.method} {case.path}: {answer.text[:500]}"


CHECKS = [
    no_server_error,
    errors_of_its_own,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def _keep_here(schema: BaseSchema, gateway: Gateway) -> None:
    """Most cases name existing things, and none names another machine."""
    source = str(gateway.data.parent / "model")

    def map_path_parameters(
        context: HookContext, path_parameters: dict[str, Any]
    ) -> dict[str, Any]:
        assert context.operation is not None
        changes = context.operation.method.upper() != "GET"
        names = NAMES if changes else (SERVED, *NAMES)
        return {
            name: _one_of(names, value) if name == "name" else value
            for name, value in (path_parameters or {}).items()
        }

    def map_query(context: HookContext, query: dict[str, Any]) -> dict[str, Any]:
        assert context.operation is not None
        # A log that is followed has no end while its engine runs.
        return {
            name: value
            for name, value in (query or {}).items()
            if name != "follow" or not context.operation.path.endswith("/logs")
        }

    def map_body(context: HookContext, body: Any) -> Any:
        assert context.operation is not None
        if not isinstance(body, dict):
            return body
        if context.operation.method.upper() == "PATCH":
            return _one_of(CHANGES, body)
        fields = dict(body)
        if context.operation.path in ("/admin/models", "/admin/plan"):
            fields = _shorter(fields, source)
        if isinstance(fields.get("name"), str) and re.fullmatch(NAME_PATTERN, fields["name"]):
            fields["name"] = NAMES[zlib.crc32(fields["name"].encode()) % len(NAMES)]
        if isinstance(fields.get("model"), str):
            fields["model"] = _one_of((SERVED,), fields["model"])
        if "endpoint" in fields:
            fields["endpoint"] = _reachable_url(gateway, fields["endpoint"])
        if isinstance(fields.get("endpoints"), list):
            fields["endpoints"] = [
                _reachable_url(gateway, endpoint) for endpoint in fields["endpoints"]
            ]
        return fields

    for mapper in (map_path_parameters, map_query, map_body):
        schema.hooks.hook(mapper)


def _shorter(wish: dict[str, Any], source: str) -> dict[str, Any]:
    """Every other wish for a model names one that is here, or an endpoint, and has few other
    fields: the fields to send; one of many together is nearly always refused."""
    checksum = zlib.crc32(repr(wish).encode(errors="replace"))
    if checksum % 2:
        return wish
    where = (
        {"endpoint": "http://127.0.0.1/v1"}
        if checksum % 8 == 0
        else {"source": "org/model" if checksum % 8 == 2 else source}
    )
    other_fields = sorted(wish.keys() - {"source", "endpoint", "endpoints", "name"})
    field_names = (
        {
            other_fields[(checksum // 32 + place) % len(other_fields)]
            for place in range(checksum // 8 % 3)
        }
        if other_fields
        else set()
    )
    return {
        "name": NAMES[checksum // 8 % len(NAMES)],
        **where,
        **{name: wish[name] for name in field_names},
    }


def _one_of(values: Sequence[Any], value: Any) -> Any:
    """One of those that are known, or in one of four cases the value itself; the same for the
    same."""
    checksum = zlib.crc32(repr(value).encode(errors="replace"))
    return values[checksum // 4 % len(values)] if checksum % 4 else value


def _reachable_url(gateway: Gateway, url: Any) -> Any:
    """The gateway's only reachable host is itself; other hosts are refused without a request."""
    try:
        endpoint_url(url)
    except (ValueError, TypeError, AttributeError):
        return url
    return f"{gateway.url}/v1"
