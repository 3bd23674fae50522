"""Forms whose `model` is hard to find: the gateway must read the same as Starlette, with which the
engines' servers are made."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from tests.hostile.mutation import mutate_bytes

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # which warns of each form

OTHER = "another-model"
"""No model of the gateway's: an engine whose form names it was asked for more than the gateway has
looked at."""
PATH = b"/v1/audio/transcriptions"
KIND = b"multipart/form-data; boundary=B"
END = b"--B--\r\n"
NAMED = b'form-data; name="model"'
AUDIO = b'form-data; name="file"; filename="a.wav"'
# Read as `model` by some parser of forms.
NAMES = (
    b'form-data; name = "model"',
    b"form-data; name=model",
    b"form-data; name='model'",
    b"form-data; name*=utf-8''model",
    b'attachment; name="model"',
    b'FORM-DATA; NAME="model"',
    b'form-data; name="mod\\el"',
    b'form-data;name="model"',
    b'form-data;\tname="model"',
    b'form-data; name="model" ',
    b'form-data; name="Model"',
    b'form-data; name=" model"',
    b'form-data; name="model"; name="x"',
    b'form-data; name="x"; name="model"',
    b'form-data;; name="model"',
    b'form-data; filename="a; name=model; b"',
    b'form-data; name="file"; filename="a\\"; name=\\"model"',
    b'form-data; name="model"; filename="f"',
    b"form-data; name=\"model\"; filename*=utf-8''f",
    b'form-data; name="mod%65l"',
    b'form-data; name="model\x00"',
    b'form-data; x="a;b"; name="model"',
    b'form-data; name="model',
    b'name="model"',
    b"",
    b'form-data; name="model";',
    b'form-data; name="model"x',
    b'form-data; name="m\xc3\xb6del"',
    b'form-data ; name="model"',
)
KINDS = (
    b'multipart/form-data; boundary="B"',
    b"Multipart/Form-Data; Boundary=B",
    b"multipart/form-data;boundary=B",
    b"multipart/form-data; boundary=B; boundary=C",
    b"multipart/form-data; boundary=C; boundary=B",
    b"multipart/form-data; x=y; boundary=B",
    b'multipart/form-data; x="; boundary=C"; boundary=B',
    b"multipart/form-data; charset=utf-16; boundary=B",
    b"multipart/form-data; boundary*=utf-8''B",
    b"multipart/mixed; boundary=B",
    b"multipart/form-data; boundary=b",
    b"multipart/form-data; boundary=B ",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b'multipart/form-data; boundary="B',
    b"multipart/form-data, x; boundary=B",
    b"application/x-www-form-urlencoded",
)
TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\x00",
    b" ",
    b"\t",
    b";",
    b'"',
    b"'",
    b"\\",
    b"=",
    b"--",
    b"--B",
    b"--B\r\n",
    b"--B--\r\n",
    b'name="model"',
    b"name=model",
    b'; name="model"',
    b'; filename="a"',
    b"Content-Disposition: ",
    b"form-data",
    b"model",
    b"content-transfer-encoding: base64\r\n",
    b"content-type: text/plain\r\n",
    b"\xff",
    b"*=utf-8''",
    OTHER.encode(),
)


def part(disposition: bytes, value: bytes, *lines: bytes) -> bytes:
    return (
        b"--B\r\n"
        + b"\r\n".join((b"Content-Disposition: " + disposition, *lines))
        + b"\r\n\r\n"
        + value
        + b"\r\n"
    )


@dataclass(frozen=True)
class Form:
    """A form and its type. `asks`: as in `Seed`."""

    name: str
    body: bytes
    asks: int | None = None
    kind: bytes = KIND

    @property
    def data(self) -> bytes:
        """The request."""
        head = b"POST " + PATH + b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: " + self.kind
        return head + b"\r\ncontent-length: %d\r\n\r\n" % len(self.body) + self.body


def forms(model: str) -> list[Form]:
    good, other_part = part(NAMED, model.encode()), part(NAMED, OTHER.encode())
    audio = part(AUDIO, b"RIFF" * 20, b"Content-Type: audio/wav")
    large = part(AUDIO, b"a" * 70_000)
    model_pairs = ((name, model.encode(), OTHER.encode()) for name in NAMES)
    return [
        Form("plain", good + audio + END, 1),
        Form("the file first", audio + good + END, 1),
        Form("large, the model first", good + large + END, 1),
        Form("another model alone", other_part + audio + END, 0),
        *(
            Form(f"{name!r} {order}", body + END)
            for name, gateway_value, engine_value in model_pairs
            for order, body in (
                ("alone", part(name, gateway_value)),
                ("behind", part(NAMED, gateway_value) + part(name, engine_value)),
                ("before", part(name, engine_value) + part(NAMED, gateway_value)),
                ("of the other behind", part(NAMED, engine_value) + part(name, gateway_value)),
            )
        ),
        *(Form(f"type {kind!r}", good + audio + END, None, kind) for kind in KINDS),
        Form(
            "charset",
            part(NAMED, model.encode("utf-16")) + END,
            0,
            b"multipart/form-data; charset=utf-16; boundary=B",
        ),
        Form("two models", good + other_part + END),
        Form("two models, the good one last", other_part + good + END),
        Form("another model behind a large file", good + large + other_part + END),
        Form("behind the end", good + END + other_part + END),
        Form("before the start", other_part.replace(b"--B", b"--C") + good + END),
        Form("a line before the start", b"\r\n" + good + END),
        Form("words before the start", b"words\r\n" + good + END),
        Form(
            "blanks behind the boundary",
            good.replace(b"--B\r\n", b"--B  \r\n")
            + other_part.replace(b"--B\r\n", b"--B\t\r\n")
            + END,
        ),
        Form("bare LF", (good + other_part + END).replace(b"\r\n", b"\n")),
        Form("bare LF in a head", good + other_part.replace(b"\r\n", b"\n", 2) + END),
        Form(
            "a boundary that goes on",
            good.replace(b"\r\n--B", b"\r\n--Bx")
            + part(NAMED, b"x\r\n--Bx\r\n" + other_part)
            + END,
        ),
        Form("a boundary in a value", part(NAMED, model.encode() + b"\r\n--B") + other_part + END),
        Form("no end", good),
        Form(
            "no end of the value",
            b"--B\r\nContent-Disposition: " + NAMED + b"\r\n\r\n" + model.encode(),
        ),
        Form(
            "two dispositions",
            part(b'form-data; name="x"', OTHER.encode(), b"Content-Disposition: " + NAMED)
            + good
            + END,
        ),
        Form(
            "a folded disposition",
            good + part(b'form-data;\r\n name="model"', OTHER.encode()) + END,
        ),
        Form(
            "a blank before the colon",
            good + other_part.replace(b"Disposition:", b"Disposition :") + END,
        ),
        Form(
            "base64",
            good + part(NAMED, b"YW5vdGhlci1tb2RlbA==", b"Content-Transfer-Encoding: base64") + END,
        ),
        Form("_charset_", part(b'form-data; name="_charset_"', b"utf-16") + good + END),
        Form("a model of no bytes", part(NAMED, b"") + good + END),
        Form("a model that is not text", part(NAMED, b"\xff\xfe") + good + END),
        Form("a part without a head", b"--B\r\n\r\nx\r\n" + good + END),
        Form(
            "2,000 fields",
            b"".join(part(b'form-data; name="f%d"' % number, b"") for number in range(2000))
            + good
            + END,
        ),
        Form(
            "a head of 40 KB", part(b'form-data; name="' + b"a" * 40_000 + b'"', b"x") + good + END
        ),
        Form("nothing", b"", 0),
    ]


class FormMutator:
    """Changes to the forms for a model."""

    def __init__(self, model: str) -> None:
        self._seeds = forms(model)
        self._short_bodies = [seed.body for seed in self._seeds if len(seed.body) < 1000]

    def mutate(self, random_: random.Random) -> bytes:
        """A request whose form, and now and then the type of it, was changed; its framing is
        good."""
        if random_.random() < 0.3:
            # The value of the plain form's file, which is its last: few readers look at it.
            seed = self._seeds[0]
            start = seed.body.rindex(b"\r\n\r\n") + 4
            value = seed.body[start : -len(END) - 2]
            value = mutate_bytes(random_, value, self._short_bodies, TOKENS)
            body = seed.body[:start] + value + b"\r\n" + END
        else:
            seed = random_.choice(self._seeds)
            body = mutate_bytes(random_, seed.body, self._short_bodies, TOKENS)
        kind = seed.kind
        if random_.random() < 0.1:
            kind = mutate_bytes(random_, kind, list(KINDS), TOKENS)
        return Form("", body, None, bytes(byte for byte in kind if 32 <= byte < 127)).data


async def model_read_by_starlette(kind: bytes, body: bytes) -> tuple[bool, object]:
    """Whether Starlette can read the form, and its value of `model` then."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(Headers(raw=[(b"content-type", kind)]), stream())
    try:
        return True, (await parser.parse()).get("model")
    except (MultiPartException, KeyError, UnicodeError, LookupError):
        return False, None
    finally:
        # Files of a part without an end, which are in no form, are closed too.
        for file in parser._files_to_close_on_error:
            file.close()
