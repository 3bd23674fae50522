"""Forms: `model` is read as by Starlette with python-multipart, as the engines do, or the form is
refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.errors import BadRequest
from gateway.proxy.bodies.multipart_form import Field, FormReader

TYPE = b"multipart/form-data; boundary=B"


def part(disposition: bytes, value: bytes = b"red-b", *headers: bytes) -> bytes:
    return b"\r\n".join((b"--B", b"Content-Disposition: " + disposition, *headers, b"", value, b""))


PLAIN = b'form-data; name="model"'
GOOD = part(PLAIN, b"red-a")
FILE = part(
    b'form-data; name="file"; filename="a.wav"', bytes(range(256)) * 4, b"Content-Type: audio/wav"
)
END = b"--B--\r\n"


def read(body: bytes, piece: int = 10**9) -> Field | None:
    reader = FormReader(TYPE)
    for at in range(0, len(body), piece):
        reader.feed(body[at : at + piece])
    return reader.field


def starlette(body: bytes) -> list[object]:
    """All fields `model`, as an engine gets them."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    async def parse() -> list[object]:
        form = await MultiPartParser(Headers({"content-type": TYPE.decode()}), pieces()).parse()
        try:
            return [value for name, value in form.multi_items() if name == "model"]
        finally:
            await form.close()

    return run(parse)


@pytest.mark.parametrize(
    "body",
    [
        GOOD + END,
        GOOD + FILE + END,
        FILE + GOOD + END,
        GOOD + b"--B--",
        part(b"form-data; name=model", b"red-a") + END,
        part(b'form-data;name="model"', b"red-a") + END,
        part(b'form-data; name="timestamp_granularities[]"', b"word") + GOOD + END,
        part(b"form-data; name=file; filename=a.wav; filename*=utf-8''a.wav", b"x") + GOOD + END,
        part('form-data; name="file"; filename="ä b;c=%22.wav"'.encode(), b"x") + GOOD + END,
        part(PLAIN, b"red-a", b"Content-Type: text/plain; charset=utf-8", b"Content-Length: 5")
        + END,
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 10**9])
def test_forms_of_clients_are_read_in_any_pieces(body: bytes, piece: int) -> None:
    field = read(body, piece)
    assert field is not None
    assert (field.value, body[field.start : field.end]) == ("red-a", b"red-a")
    assert starlette(body) == ["red-a"]


AMBIGUOUS = {
    "twice": GOOD + part(PLAIN) + END,
    "the same twice": GOOD + GOOD + END,
    "blanks around =": GOOD + part(b'form-data; name = "model"') + END,
    "a blank before =": part(b'form-data; name ="model"') + END,
    "attachment": GOOD + part(b'attachment; name="model"') + END,
    "no disposition type": GOOD + part(b'; name="model"') + END,
    "name in a file name": (
        part(PLAIN) + part(b'form-data; name="file"; filename="a; name=model; b\\""') + END
    ),
    "an escaped quote": GOOD + part(b'form-data; name="x\\"; name=\\"model"') + END,
    "a backslash": GOOD + part(b'form-data; name="mode\\l"') + END,
    "name*": GOOD + part(b"form-data; name*=utf-8''model") + END,
    "name* beside name": part(b"form-data; name=\"model\"; name*=utf-8''x", b"red-a") + END,
    "name*0": part(b'form-data; name*0="mo"; name*1="del"') + GOOD + END,
    "two names": GOOD + part(b'form-data; name="x"; name="model"') + END,
    "a file called model": part(b'form-data; name="model"; filename="x"') + END,
    "only filename*": part(b"form-data; name=\"model\"; filename*=utf-8''x") + END,
    "case": GOOD + part(b'form-data; name="Model"') + END,
    "case of the parameter": GOOD + part(b'form-data; NAME="model"') + END,
    "an array": GOOD + part(b'form-data; name="model[]"') + END,
    "a blank in the name": GOOD + part(b'form-data; name=" model"') + END,
    "single quotes": GOOD + part(b"form-data; name='model'") + END,
    "an open quote": GOOD + part(b'form-data; name="model') + END,
    "two dispositions": (
        part(b'form-data; name="x"', b"red-b", b"content-disposition: " + PLAIN) + END
    ),
    "a header in a header": (
        GOOD + part(b'form-data; name="x"\nContent-Disposition: form-data; name="model"') + END
    ),
    "folded": GOOD + part(b'form-data;\r\n name="model"') + END,
    "no disposition": GOOD + b"--B\r\n\r\nred-b\r\n" + END,
    "encoded": part(PLAIN, b"cmVkLWI=", b"Content-Transfer-Encoding: base64") + END,
    "padded delimiter": GOOD[:-2] + b"\r\n--B \r\n" + part(PLAIN)[5:] + END,
    "padded end": GOOD + b"--B-- \r\n",
    "delimiter that goes on": part(b'form-data; name="x"', b"y\r\n--Bx\r\n") + GOOD + END,
    "delimiter after LF": part(b'form-data; name="x"', b"y\n--B\r\n") + GOOD + END,
    "delimiter in a line": part(b'form-data; name="x"', b"y--B") + GOOD + END,
    "preamble": b"x\r\n" + GOOD + END,
    "empty lines first": b"\r\n\r\n" + GOOD + END,
    "a form behind the end": GOOD + END + part(PLAIN) + END,
    "LF alone": (GOOD + END).replace(b"\r\n", b"\n"),
    "a line break in the value": part(PLAIN, b"red-a\r\n-red-b") + END,
    "NUL in the value": part(PLAIN, b"red-a\0") + END,
    "too many headers": part(PLAIN, b"red-a", *[b"x%d: y" % n for n in range(20)]) + END,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("piece", [1, 5, 10**9])
def test_an_ambiguous_form_is_refused(name: str, piece: int) -> None:
    with pytest.raises(BadRequest):
        read(AMBIGUOUS[name], piece)


def test_a_field_is_found_as_soon_as_it_is_complete() -> None:
    body = FILE + GOOD + FILE + END
    whole = body.index(b"red-a") + len(b"red-a\r\n--B\r\n")
    for end in range(len(body)):
        assert (read(body[:end]) is None) == (end < whole)


FRAGMENTS = [
    b"--B",
    b"\r\n",
    b"\r\n\r\n",
    b"--",
    b"--B--\r\n",
    b"\n",
    b" ",
    b";",
    b"=",
    b'"',
    b"\\",
    b"*",
    b"model",
    b"name",
    b"red-b",
    b"Content-Disposition: ",
    b"form-data",
    b"filename",
    b"attachment",
    GOOD,
    FILE,
    part(PLAIN),
    PLAIN,
    END,
    b"\t",
    b"\0",
    b"a: b",
]


@given(
    st.lists(
        st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(list(AMBIGUOUS.values()))), max_size=8
    ),
    st.booleans(),
    st.integers(0, 400),
    st.sampled_from(FRAGMENTS),
    st.sampled_from([1, 3, 50, 10**9]),
)
def test_an_accepted_form_means_the_same_to_an_engine(
    fragments: list[bytes], starts: bool, at: int, insertion: bytes, piece: int
) -> None:
    body = (GOOD if starts else b"") + b"".join(fragments) + END
    for candidate in (
        body,
        body[:at] + insertion + body[at:],
        GOOD[:at] + insertion + GOOD[at:] + END,
    ):
        try:
            field = read(candidate, piece)
        except BadRequest:
            continue
        try:
            starlette_form = starlette(candidate)
        except MultiPartException:
            continue
        assert starlette_form == ([] if field is None else [field.value])
