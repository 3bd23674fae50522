"""Bodies, request ids and envelopes, without a network."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import (
    BadRequest,
    FitserveError,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    RateLimited,
    TooSlow,
    Unauthorized,
    UpstreamError,
)
from gateway.proxy.api.protocol import (
    answer,
    dump,
    envelope,
    error_event,
    error_headers,
    read_fields,
    read_request_fields,
    read_usual_fields,
    replace_model,
    request_id,
    send_error,
)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def model_of(body: bytes) -> str:
    return read_request_fields(body).name(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","x":1,"model":"b"}',
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"model":{"deep":1},"model":"b"}',
    ],
)
def test_the_last_of_repeated_models_counts_as_in_the_engines_json(body: bytes) -> None:
    assert model_of(body) == json.loads(body)["model"] == "b"
    fields = read_usual_fields(body)
    assert fields is None or fields.model == "b"


def test_a_missing_model_has_the_near_field_of_the_body() -> None:
    with pytest.raises(BadRequest, match="Did you mean `model` instead of `modle`"):
        model_of(b'{"modle":"a"}')
    with pytest.raises(BadRequest) as refusal:
        model_of(b'{"messages":[]}')
    assert "Did you mean" not in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"model=a", "not JSON"),
        (b'{"model":"a"', "not JSON"),
        (b'{"model":"a"} {}', "not JSON"),
        (b'{"model":"a","x":NaN}', "not JSON"),
        (b'{"model":"a","x":-Infinity}', "not JSON"),
        (b'{"model":"\\ud800"}', "not JSON"),
        (b'{"model":"a","\\ud800":1}', "not JSON"),
        (b'{"model":"\xff"}', "not JSON"),
        (b'{"model":"a","x":"\xed\xa0\x80"}', "not JSON"),
        (b'{"model":"a","\xff":1}', "not JSON"),
        (b'\xef\xbb\xbf{"model":"a"}', "not JSON"),
        ('{"model":"a"}'.encode("utf-16"), "not JSON"),
        (b'{"model":"a","x":' + b"[" * 100_000, "nested too deeply"),
        (b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b'"model"', "not an object"),
        (b"[" * 100_000, "not an object"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_body_that_is_no_json_object_is_a_bad_request(body: bytes, says: str) -> None:
    for read in read_request_fields, read_fields:
        with pytest.raises(BadRequest, match=says) as error:
            read(body)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"Model":"a"}',
        b'{"model":null}',
        b'{"model":1}',
        b'{"model":["a"]}',
        b'{"model":{}}',
    ],
)
def test_a_missing_or_non_string_model_is_named_as_the_param(body: bytes) -> None:
    with pytest.raises(BadRequest) as error:
        model_of(body)
    assert error.value.envelope()["error"]["param"] == "model"


named_bodies = st.lists(
    st.tuples(
        st.sampled_from(["model", "stream", "previous_response_id", "x"]),
        st.booleans() | st.none() | st.text(max_size=3) | st.integers(),
    ),
    max_size=6,
).map(
    lambda pairs: (
        b"{"
        + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs).encode()
        + b"}"
    )
)


@given(
    named_bodies
    | st.binary(max_size=200)
    | st.text().map(str.encode)
    | json_values.map(lambda value: json.dumps(value).encode())
)
def test_no_body_is_anything_but_a_model_or_a_bad_request(body: bytes) -> None:
    try:
        model: str | None = model_of(body)
    except BadRequest:
        model = None
    fields = read_usual_fields(body)
    if model is None:
        assert fields is None
    else:
        request_fields = read_request_fields(body)
        assert fields is None or (
            fields.model,
            fields.stream is True,
            fields.previous_response_id,
        ) == (
            model,
            request_fields.streams(),
            request_fields.previous(),
        )
        assert json.loads(body)["model"] == model
        assert json.loads(bytes(read_fields(bytearray(body))["model"])) == model


@pytest.mark.parametrize(
    ("body", "streams"),
    [
        (b'{"stream":true}', True),
        (b'{"stream": false}', False),
        (b"{}", False),
        (b'{"stream":"x","stream":true}', True),
    ],
)
def test_a_body_asks_for_a_stream_or_not(body: bytes, streams: bool) -> None:
    assert read_request_fields(body).streams() is streams


@pytest.mark.parametrize(
    ("body", "previous"),
    [
        (b'{"previous_response_id":"resp_1"}', "resp_1"),
        (b'{"previous_response_id":null}', None),
        (b"{}", None),
    ],
)
def test_a_body_names_its_previous_response(body: bytes, previous: str | None) -> None:
    assert read_request_fields(body).previous() == previous


@given(st.dictionaries(st.text(), json_values, max_size=6), st.text())
def test_replacing_the_model_changes_nothing_else(fields: dict[str, Any], name: str) -> None:
    body = json.dumps({**fields, "model": "asked"}, ensure_ascii=False).encode()
    document = json.loads(replace_model(read_fields(body), name))
    assert document == {**fields, "model": name}
    assert list(document) == list(json.loads(body))


def test_replacing_the_model_keeps_the_bytes_of_other_values() -> None:
    body = (
        b'{ "temperature": 1.0e+0 , "model":"a", "x" : {"b":1,  "a":\n[1.50,'
        b' 123456789012345678901234567890]}, "s":"\\u00e9" }'
    )
    assert (
        replace_model(read_fields(body), 'é"')
        == b'{"temperature":1.0e+0,"model":"\xc3\xa9\\"","x":{"b":1,  "a":\n[1.50,'
        b' 123456789012345678901234567890]},"s":"\\u00e9"}'
    )


@pytest.mark.parametrize("value", [b"a", b"req-1.2:3/4~!", b"x" * 128])
def test_a_sane_request_id_is_kept(value: bytes) -> None:
    assert request_id({"headers": [(b"x-request-id", value)]}) == value.decode()


@pytest.mark.parametrize("value", [b"", b" ", b"a b", b"a\n", b"\x7f", b"\xc3\xa9", b"x" * 129])
def test_any_other_request_id_is_replaced_by_a_new_one(value: bytes) -> None:
    ids = {request_id({"headers": [(b"x-request-id", value)]}) for _ in range(20)} | {
        request_id({"headers": []})
    }
    assert len(ids) == 21
    assert all(id_.startswith("req_") for id_ in ids)


def test_an_error_has_the_shape_of_the_api_that_was_called() -> None:
    error = NotReady("Not now.", hint="Later.", param="model", retry_after_s=7)
    assert envelope(error, "openai") == error.envelope()
    assert envelope(error, "anthropic") == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "Not now. Later."},
    }
    assert error_event(error, "openai") == b"data: " + dump(error.envelope()) + b"\n\n"
    assert error_event(error, "anthropic").startswith(b'event: error\ndata: {"type":"error",')


def test_an_answer_is_one_http_message() -> None:
    error = MethodNotAllowed("No.", allow="GET")
    words = answer(405, b"{}", "id-1", error_headers(error))
    assert (
        words
        == b"HTTP/1.1 405 Method Not Allowed\r\ncontent-type: application/json\r\ncontent-length:"
        b" 2\r\nx-request-id: id-1\r\nx-gateway-source: gateway\r\nallow: GET\r\nx-should-retry:"
        b" false\r\n\r\n{}"
    )


class Client:
    """The ASGI side of a client."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.anyio
async def test_an_error_is_sent_as_envelope_with_its_headers() -> None:
    client = Client()
    await send_error(
        client.send,
        NotReady("Not \ud800 now.", hint="Later.", param="model", retry_after_s=7),
        "id-1",
    )
    start, body = client.sent
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body["body"]),
        b"x-request-id": b"id-1",
        b"x-gateway-source": b"gateway",
        b"retry-after": b"7",
    }
    assert json.loads(body["body"]) == {
        "error": {
            "message": "Not \ud800 now. Later.",
            "type": "service_unavailable",
            "param": "model",
            "code": "model_not_ready",
        }
    }


LASTING: dict[FitserveError, bool] = {
    Unauthorized("No."): True,
    ModelNotFound("No."): True,
    BadRequest("No."): True,
    NotReady("Its plan is refused."): True,
    NotReady("It starts.", retry_after_s=10): False,
    RateLimited("Enough.", retry_after_s=10): False,
    TooSlow("Too slow."): False,
    UpstreamError("It broke off."): False,
    FitserveError("Nobody expected this."): False,
}


@pytest.mark.parametrize("error", LASTING, ids=lambda error: f"{error.status} {error}")
def test_sdks_ask_again_only_where_that_may_help(error: FitserveError) -> None:
    assert ((b"x-should-retry", b"false") in error_headers(error)) is LASTING[error]


@pytest.mark.anyio
async def test_a_missing_key_is_answered_with_the_scheme_to_use() -> None:
    client = Client()
    await send_error(client.send, Unauthorized("No."), "id-1")
    assert (b"www-authenticate", b"Bearer") in client.sent[0]["headers"]
