"""Changes to the requests of the corpus, to forms and to answers."""

from __future__ import annotations

import random
import re

from tests.hostile.corpus import Seed

SHORT = 20_000
TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\n\n",
    b"\x00",
    b"\t",
    b" ",
    b"\x0b",
    b":",
    b";",
    b",",
    b"\xff",
    b"%0d%0a",
    b"0\r\n\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: identity\r\n",
    b"content-length: 0\r\n",
    b"content-length: 10\r\n",
    b"chunked",
    b"identity",
    b"Transfer-Encoding",
    b"Content-Length",
    b"host: evil\r\n",
    b"connection: close\r\n",
    b"expect: 100-continue\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"0\r\na: b\r\n\r\n",
    b"trailer: a\r\n",
    b"a: b\r\n",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"HTTP/9.9",
    b"GET ",
    b"POST ",
    b"OPTIONS ",
    b"/v1/models",
    b"/v1/completions",
    b"/admin/models",
    b"/healthz",
    b"/../",
    b"//",
    b"?",
    b"#",
    b"ffffffffffffffff",
    b"-1",
    b"+1",
    b'"model":',
    b'"stream":true,',
    b"{",
    b"}",
    b"[",
    b'"',
    b"\\u0000",
    b"\xed\xa0\x80",
    b"x-canary: a\r\n",
)


class RequestMutator:
    """Changes to requests of `seeds`. A change can turn the good ones bad."""

    def __init__(self, seeds: list[Seed]) -> None:
        short = [seed for seed in seeds if len(seed.data) <= SHORT]
        self._good = [seed.data for seed in short if seed.asks != 0]
        self._short_seeds = [seed.data for seed in short]

    def mutate(self, random_: random.Random) -> bytes:
        """One to four changes to one request, or now and then to several in a pipeline."""
        seeds = self._good if random_.random() < 0.7 else self._short_seeds
        data = mutate_bytes(random_, random_.choice(seeds), self._short_seeds, TOKENS)
        if random_.random() < 0.1:
            before = b"".join(random_.choices(self._good, k=random_.randint(1, 6)))
            data = before + data + b"".join(random_.choices(self._good, k=random_.randint(0, 3)))
        return data


def mutate_bytes(
    random_: random.Random, whole: bytes, corpus: list[bytes], tokens: tuple[bytes, ...]
) -> bytes:
    """One to four changes, and now and then a piece of one of `corpus` in it."""
    data = bytearray(whole)
    for _ in range(random_.choice((1, 1, 1, 2, 2, 3, 4))):
        # Most disagreements of parsers are in the head.
        head = max(data.find(b"\r\n\r\n"), 1)
        at = random_.randrange(head if random_.random() < 0.7 else len(data) + 1) if data else 0
        match random_.randrange(11):
            case 0:
                data[at : at + 1] = bytes([random_.randrange(256)])
            case 1 | 2:
                data[at:at] = random_.choice(tokens)
            case 3:
                del data[at : at + random_.randint(1, 20)]
            case 4:
                data[at:at] = data[at : at + random_.randint(1, 60)]
            case 5:
                other_choice = random_.choice(corpus)
                start = random_.randrange(len(other_choice) + 1)
                data[at:at] = other_choice[start : start + random_.randint(1, 200)]
            case 6:
                data[at : at + 10] = data[at : at + 10].swapcase()
            case 7:
                lines = bytes(data).split(b"\r\n")
                lines.insert(random_.randrange(len(lines)), random_.choice(lines))
                data = bytearray(b"\r\n".join(lines))
            case 8 | 9:  # where a line begins
                starts = [match.end() for match in re.finditer(rb"\r\n", data[: head + 2])] or [0]
                start = random_.choice(starts)
                data[start:start] = random_.choice(tokens)
            case _:
                del data[random_.randrange(len(data) + 1) :]
    return bytes(data)
