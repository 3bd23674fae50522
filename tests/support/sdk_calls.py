"""Calls of the official SDKs, made twice: to an engine and through the gateway. Both
answers must be equal.

`told_openai(call, url, model)` makes one call and returns the exchange on the wire: status, content
type, and the bytes of the answer with ids and times blanked, besides the class of the SDK's error.
The bytes are raw, so nothing that an SDK forgives is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai

KEY = "sk-sdk-0123456789"
VARIES = (
    (re.compile(rb'"(id|request_id|item_id|response_id)": ?"[^"]*"'), rb'"\1":""'),
    (re.compile(rb'"(created|created_at|completed_at)": ?[\d.]+'), rb'"\1":0'),
)
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
HISTORY: list[Any] = [
    {"role": "system", "content": "Be brief."},
    *MESSAGES,
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Again"},
]
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
        "required": ["city"],
    },
}
EVERY: Any = {"include_usage": True, "continuous_usage_stats": True}
FORCED: Any = {"type": "function", "function": {"name": "weather"}}


@dataclass
class WireExchange:
    """One exchange on the wire."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    error: str = ""
    source: str = field(default="", compare=False)
    sent: bytes = field(default=b"", compare=False)


class Tee(httpx2.SyncByteStream):
    def __init__(self, stream: Any, results: WireExchange) -> None:
        self._stream = stream
        self._results = results

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._results.body += piece
            yield piece

    def close(self) -> None:
        self._stream.close()


class Recorder(httpx2.HTTPTransport):
    """Keeps the last exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = WireExchange()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.exchange = WireExchange(sent=request.read())
        response = super().handle_request(request)
        self.exchange.status = response.status_code
        self.exchange.content_type = response.headers.get("content-type", "")
        self.exchange.source = response.headers.get("x-gateway-source", "")
        response.stream = Tee(response.stream, self.exchange)
        return response


OpenAICall = Callable[[openai.OpenAI, str], Any]
AnthropicCall = Callable[[anthropic.Anthropic, str], Any]


def drain(stream: Any) -> list[Any]:
    return list(stream)


OPENAI: dict[str, OpenAICall] = {
    "chat": lambda c, m: c.chat.completions.create(
        model=m, messages=MESSAGES, max_tokens=8, temperature=0, seed=1
    ),
    "chat, unicode": lambda c, m: c.chat.completions.create(
        model=m,
        messages=[{"role": "user", "content": "日本語 \u2028 🎉"}],
        max_tokens=4,
        temperature=0,
    ),
    "chat, system and history": lambda c, m: c.chat.completions.create(
        model=m,
        messages=HISTORY,
        max_tokens=4,
        temperature=0,
        stop=["."],
        presence_penalty=0.5,
        user="someone",
    ),
    "chat, streamed": lambda c, m: drain(
        c.chat.completions.create(
            model=m, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
    ),
    "chat, streamed with usage": lambda c, m: drain(
        c.chat.completions.create(
            model=m,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    ),
    "chat, usage in every chunk": lambda c, m: drain(
        c.chat.completions.create(
            model=m,
            messages=MESSAGES,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options=EVERY,
        )
    ),
    "chat, logprobs": lambda c, m: c.chat.completions.create(
        model=m, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    ),
    "chat, two choices": lambda c, m: c.chat.completions.create(
        model=m, messages=MESSAGES, max_tokens=4, temperature=0, n=2
    ),
    "chat, tools offered": lambda c, m: c.chat.completions.create(
        model=m,
        messages=MESSAGES,
        max_tokens=4,
        temperature=0,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="none",
    ),
    "chat, tool forced": lambda c, m: c.chat.completions.create(
        model=m,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice=FORCED,
    ),
    "chat, tool forced, streamed": lambda c, m: drain(
        c.chat.completions.create(
            model=m,
            messages=MESSAGES,
            max_tokens=24,
            temperature=0,
            tools=[{"type": "function", "function": TOOL}],
            tool_choice=FORCED,
            stream=True,
        )
    ),
    "completion": lambda c, m: c.completions.create(
        model=m, prompt="Hello", max_tokens=8, temperature=0
    ),
    "completion, several prompts": lambda c, m: c.completions.create(
        model=m, prompt=["a", "b c"], max_tokens=4, temperature=0
    ),
    "completion, echo and logprobs": lambda c, m: c.completions.create(
        model=m, prompt="Hello there", max_tokens=4, temperature=0, echo=True, logprobs=1
    ),
    "completion, streamed": lambda c, m: drain(
        c.completions.create(model=m, prompt="Hello", max_tokens=8, temperature=0, stream=True)
    ),
    "completion, of tokens": lambda c, m: c.completions.create(
        model=m, prompt=[1, 2, 3], max_tokens=4, temperature=0
    ),
    "extra field": lambda c, m: c.completions.create(
        model=m,
        prompt="Hello",
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True, "min_tokens": 2, "repetition_penalty": 1.0},
    ),
    # Refusals of the engine come in its own words.
    "bad parameter": lambda c, m: c.chat.completions.create(
        model=m, messages=MESSAGES, max_tokens="many"
    ),  # type: ignore[call-overload]
    "too long a prompt": lambda c, m: c.completions.create(
        model=m, prompt="word " * 20_000, max_tokens=4
    ),
    "no messages": lambda c, m: c.post("/chat/completions", body={"model": m}, cast_to=object),
}

# Refusals of the gateway itself: the SDK must take them for the same error.
OPENAI_REFUSED: dict[str, OpenAICall] = {
    "unknown model": lambda c, _: c.chat.completions.create(model="nobody", messages=MESSAGES),
    "unknown path": lambda c, m: c.post("/no/such", body={"model": m}, cast_to=object),
}

OPENAI_VECTORS: dict[str, OpenAICall] = {
    "embedding": lambda c, m: c.embeddings.create(model=m, input="Hello", encoding_format="float"),
    "embeddings": lambda c, m: c.embeddings.create(
        model=m, input=["Hello", "there"], encoding_format="float"
    ),
    "embedding in base64": lambda c, m: c.embeddings.create(model=m, input="Hello"),
}

OPENAI_RESPONSES: dict[str, OpenAICall] = {
    "response": lambda c, m: c.responses.create(
        model=m, input="Hello", max_output_tokens=8, temperature=0, store=False
    ),
    "response, streamed": lambda c, m: drain(
        c.responses.create(
            model=m, input="Hello", max_output_tokens=8, temperature=0, store=False, stream=True
        )
    ),
}

ANTHROPIC: dict[str, AnthropicCall] = {
    "message": lambda c, m: c.messages.create(
        model=m, messages=MESSAGES, max_tokens=8, extra_body={"temperature": 0}
    ),
    "message, system": lambda c, m: c.messages.create(
        model=m, system="Be brief.", messages=MESSAGES, max_tokens=4, extra_body={"temperature": 0}
    ),
    "message, streamed": lambda c, m: drain(
        c.messages.create(
            model=m, messages=MESSAGES, max_tokens=8, extra_body={"temperature": 0}, stream=True
        )
    ),
    "count of tokens": lambda c, m: c.messages.count_tokens(model=m, messages=MESSAGES),
}

# Refusals of the engine, with OpenAI's words.
ANTHROPIC_UNREADABLE: AnthropicCall = lambda c, m: c.post(  # noqa: E731
    "/v1/messages", body={"model": m, "messages": MESSAGES}, cast_to=object
)

ANTHROPIC_REFUSED: dict[str, AnthropicCall] = {
    "unknown model": lambda c, _: c.messages.create(model="nobody", messages=MESSAGES, max_tokens=4)
}


def openai_client(url: str, key: str = KEY, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        timeout=options.pop("timeout", 120),
        **options,
    )


def anthropic_client(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=url, api_key=KEY, max_retries=0, timeout=options.pop("timeout", 120), **options
    )


def told_openai(call: OpenAICall, url: str, model: str, key: str = KEY) -> WireExchange:
    recorder = Recorder()
    with (
        httpx2.Client(transport=recorder) as wire,
        openai_client(url, key, http_client=wire) as client,
    ):
        return _told_by(lambda: call(client, model), recorder, openai.APIError)


def told_anthropic(call: AnthropicCall, url: str, model: str, key: str = KEY) -> WireExchange:
    recorder = Recorder()
    # The key as a bearer: the SDK sends it beside its own header.
    headers = {"authorization": f"Bearer {key}"}
    with (
        httpx2.Client(transport=recorder) as wire,
        anthropic_client(url, http_client=wire, default_headers=headers) as client,
    ):
        return _told_by(lambda: call(client, model), recorder, anthropic.APIError)


def _told_by(call: Callable[[], Any], recorder: Recorder, errors: type[Exception]) -> WireExchange:
    try:
        call()
    except errors as error:
        recorder.exchange.error = type(error).__name__
    report = recorder.exchange
    for pattern, blank in VARIES:
        report.body = pattern.sub(blank, report.body)
    return report
