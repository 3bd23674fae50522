"""A pretended engine: an OpenAI-compatible HTTP server that makes up its tokens, and fails on
request.

    async with FakeEngine(EngineScript(model="demo"), print) as engine: engine.port

Standard library only, so that this one file also runs where the package is not installed (see
tests/support/fake_engine.py). Serves GET /health, /metrics, /v1/models, POST /v1/completions,
/v1/chat/completions (streamed or not), /v1/embeddings, /v1/rerank.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

WORDS = (
    "an",
    "engine",
    "without",
    "weights",
    "still",
    "has",
    "much",
    "to",
    "say",
    "of",
    "what",
    "it",
    "was",
    "asked",
)
DEAF = "told to stop, and deaf to it"
_HOLD_POLL_S = 0.1
# Seconds between two steps of a prefill.
_STEP_S = 0.005
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
}


@dataclass(frozen=True)
class EngineScript:
    """The behaviour of an engine. The default is a healthy engine that answers at once."""

    model: str | None = None
    key: str | None = None
    """The key that callers of /v1 need, as for vLLM."""
    lines: tuple[tuple[float, str], ...] = ()
    """(seconds before, line): the output before the engine listens."""
    last_words: str | None = None
    """The last output, without a newline, before an exit of its own."""
    start_delay_s: float = 0
    serve: bool = True
    exit_code: int | None = None
    """Exits by itself with this code, `exit_after_s` after its lines."""
    exit_after_s: float = 0
    ignore_term: bool = False
    """The engine prints DEAF at SIGTERM, and continues."""
    workers: int = 0
    """Processes of the engine beside its main one; they ignore SIGTERM."""
    tokens_per_second: float = 0
    """0: as fast as the client reads."""
    gibberish: bool = False
    """One token, repeated."""
    empty: bool = False
    """No token at all."""
    hang_after: int | None = None
    """After so many inference requests the next ones are never answered; /health goes on saying
    200."""
    spins: bool = False
    """Its core process uses a whole processor (in the memory twin of the host)."""
    crash_batch: int | None = None
    """A request of so many prompts at once breaks every connection, and all that follow."""
    crash_prompt: int | None = None
    """A prompt of so many tokens does the same."""
    crash_lines: tuple[str, ...] = ()
    """Printed at such a crash."""
    prefill_tokens_per_second: float = 0
    """How fast prompts are read, one after the other; 0: at once."""
    does: frozenset[str] = frozenset()
    """Its abilities, of tools, required_tools, reasoning and json_schema; other requests get
    words."""
    crash_tools: bool = False
    """A request with tools breaks every connection, and it exits by itself after that."""
    counts: tuple[tuple[str, float], ...] = ()
    """(series, how much more of it each look at /metrics finds than the one before): as if it had
    answered clients meanwhile."""
    thinks: str = ""
    """Said as thoughts before each streamed answer of a chat."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, under which the engine answers too."""
    max_model_len: int = 4096
    embed_dim: int = 8
    hold: Path | None = None
    """While this file is there, no answer goes beyond its first token."""
    hold_chat: Path | None = None
    """While this file is there, no chat is answered."""
    sleeps: Callable[[int | None], float] | None = None
    """It has vLLM's endpoints for sleep; called with a level to fall asleep, with None to wake up,
    and returns how many seconds that takes."""
    door: bool = False
    """Everything wants the key, as behind gateway/engines/common/engine_auth.py."""
    record: Path | None = None
    """Every raw request is appended here, and `closed TIME` when a client leaves before its answer
    is complete."""


class RequestRefused(Exception):
    """An error answer as vLLM gives it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": "BadRequestError", "param": None, "code": status}
        }


_BACKLOG = 100
Answer = dict[str, Any] | AsyncIterator[dict[str, Any]] | str | None
"""A JSON body, the chunks of a stream, a text, or an empty body."""


class FakeEngine:
    """The server. `log` gets one line per request, as engines print them. `port` is known once it
    listens."""

    def __init__(
        self,
        script: EngineScript,
        log: Callable[[str], None],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.script = script
        self.log = log
        self.host = host
        self.port = port
        self.requests = 0
        self.cached = 0
        self.looks = 0
        self.sleeping = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self._reading = asyncio.Lock()
        self.connections: set[Connection] = set()
        self.dead = False
        self.exit = asyncio.Event()
        self._listener: socket.socket
        self._accepting: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> FakeEngine:
        try:
            self._listener = socket.create_server((self.host, self.port), backlog=_BACKLOG)
        except OSError as error:  # in asyncio's words, which are those of real engines
            text = (
                f"error while attempting to bind on address {(self.host, self.port)}:"
                f" {os.strerror(error.errno or 0).lower()}"
            )
            raise OSError(error.errno, text) from None
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self

    def _accept(self) -> None:
        """Not by a server of asyncio's: when closed, that leaks the connection that it was
        accepting (3.11, Server._attach)."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # gone again
            connection, _ = self._listener.accept()
            task: asyncio.Task[object] = loop.create_task(
                loop.connect_accepted_socket(lambda: Connection(self), connection)
            )
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.abort()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        # The connection that was being accepted is made, and breaks.
        await asyncio.gather(*self._accepting, return_exceptions=True)
        while self.connections:
            await asyncio.sleep(0)

    def abort(self) -> None:
        """Die: open connections break, and new ones at once."""
        self.dead = True
        for connection in tuple(self.connections):
            connection.abort()

    # --- answers ---

    def admit(self, path: str, headers: dict[str, str]) -> None:
        """Raises RequestRefused where the key is missing."""
        key = self.script.key
        if (
            key is not None
            and (self.script.door or path.startswith("/v1"))
            and headers.get("authorization") != f"Bearer {key}"
        ):
            raise RequestRefused(401, "Unauthorized")

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Raises RequestRefused."""
        if (method, path) == ("GET", "/health"):
            return None
        self.log(f'INFO:     "{method} {path} HTTP/1.1"')
        if self.script.sleeps is not None and path.partition("?")[0] in (
            "/sleep",
            "/wake_up",
            "/is_sleeping",
        ):
            return await self._sleep(method, *path.partition("?")[::2])
        if (method, path) == ("GET", "/metrics"):
            self.looks += 1
            lines = [
                f'{series}{{engine="0"}} {more * self.looks}\n'
                for series, more in self.script.counts
            ]
            return f"vllm:kv_cache_usage_perc {self.cached}\n{''.join(lines)}"
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": self.script.model, "object": "model", "created": 0, "owned_by": "fake"}
            return {
                "object": "list",
                "data": [{**model, "max_model_len": self.script.max_model_len}],
            }
        routes = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/embeddings": self._embed,
        }
        routes["/v1/rerank"] = self._rerank
        if path not in routes:
            raise RequestRefused(404, f"There is no {path}.")
        if method != "POST":
            raise RequestRefused(405, "Method Not Allowed")
        try:
            document = json.loads(body)
            if document.get("model") not in (None, self.script.model, *self.script.adapters):
                raise RequestRefused(404, f"The model `{document['model']}` does not exist.")
            self.requests += 1
            # Its scheduler is paused: new requests wait.
            await self._awake.wait()
            if self.script.hang_after is not None and self.requests > self.script.hang_after:
                await asyncio.Event().wait()
            return await routes[path](document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestRefused(400, f"The body is not what {path} takes: {error!r}") from None

    async def _sleep(self, method: str, path: str, query: str) -> Answer:
        """As vllm/entrypoints/serve/dev/sleep/api_router.py of 0.26.0, with the executor's states
        (vllm/v1/executor/abstract.py)."""
        if method != ("GET" if path == "/is_sleeping" else "POST"):
            raise RequestRefused(405, "Method Not Allowed")
        assert self.script.sleeps is not None
        if path == "/is_sleeping":
            return {"is_sleeping": bool(self.sleeping)}
        if path == "/sleep" and not self.sleeping:
            self._awake.clear()
            self.sleeping = int(
                dict(part.partition("=")[::2] for part in query.split("&") if part).get(
                    "level", "1"
                )
            )
            await asyncio.sleep(self.script.sleeps(self.sleeping))
        elif path == "/wake_up" and self.sleeping:
            await asyncio.sleep(self.script.sleeps(None))
            self.sleeping = 0
            self._awake.set()
        return None

    async def _completion(self, request: dict[str, Any]) -> Answer:
        prompts = request.get("prompt", "")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        return await self._generate(
            Reply(self.script, request, [count_tokens(prompt) for prompt in prompts], chat=False)
        )

    async def _chat(self, request: dict[str, Any]) -> Answer:
        messages = request["messages"]
        while self.script.hold_chat is not None and self.script.hold_chat.exists():
            await asyncio.sleep(_HOLD_POLL_S)
        if self.script.crash_tools and request.get("tools"):
            self.abort()
            self.exit.set()
        message = message_for_apps(self.script.does, request)
        if message is not None:
            choice = {
                "index": 0,
                "message": {"role": "assistant", **message},
                "finish_reason": "stop",
            }
            return {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": self.script.model,
                "choices": [choice],
            }
        length = sum(count_tokens(str(message.get("content", ""))) for message in messages)
        return await self._generate(Reply(self.script, request, [length], chat=True))

    async def _generate(self, reply: Reply) -> Answer:
        script = self.script
        batch = script.crash_batch is not None and len(reply.prompt_lengths) >= script.crash_batch
        if batch or (
            script.crash_prompt is not None and max(reply.prompt_lengths) >= script.crash_prompt
        ):
            for line in script.crash_lines:
                self.log(line)
            self.abort()
            await asyncio.Event().wait()
        if self.script.prefill_tokens_per_second:
            async with self._reading:
                await self._prefill(max(reply.prompt_lengths))
        return reply.stream() if reply.requests.get("stream") else await reply.whole()

    async def _prefill(self, tokens: int) -> None:
        """Cache so many tokens, by the clock: a busy machine makes the steps larger."""
        began, cached_tokens, before = time.monotonic(), 0, self.cached
        while cached_tokens < tokens:
            await asyncio.sleep(_STEP_S)
            seconds = time.monotonic() - began
            cached_tokens = min(tokens, int(seconds * self.script.prefill_tokens_per_second))
            self.cached = before + cached_tokens

    async def _embed(self, request: dict[str, Any]) -> dict[str, Any]:
        texts = request.get("input", "")
        if isinstance(texts, str) or (texts and isinstance(texts[0], int)):
            texts = [texts]
        data = []
        for index, text in enumerate(texts):
            raw = [math.sin(len(text) + 1.0 + place) for place in range(self.script.embed_dim)]
            norm = math.sqrt(sum(x * x for x in raw))
            data.append(
                {"object": "embedding", "index": index, "embedding": [x / norm for x in raw]}
            )
        token_count = sum(map(count_tokens, texts))
        return {
            "object": "list",
            "data": data,
            "model": self.script.model,
            "usage": {"prompt_tokens": token_count, "total_tokens": token_count},
        }

    async def _rerank(self, request: dict[str, Any]) -> dict[str, Any]:
        scores = [
            0.5 if self.script.gibberish else 1 / (1 + len(document))
            for document in request["documents"]
        ]
        pairs = sorted(enumerate(scores), key=lambda pair: -pair[1])
        results = [{"index": index, "relevance_score": score} for index, score in pairs]
        return {"id": "rerank", "model": self.script.model, "results": results}


def message_for_apps(does: frozenset[str], request: dict[str, Any]) -> dict[str, Any] | None:
    """The message for a request that needs one of the abilities; None: the engine answers with
    words."""
    tool_set = "required_tools" if request.get("tool_choice") == "required" else "tools"
    if request.get("tools") and tool_set in does:
        function = request["tools"][0]["function"]
        call = {"name": function["name"], "arguments": json.dumps(fitting(function["parameters"]))}
        return {
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
    if request.get("response_format") and "json_schema" in does:
        return {"content": json.dumps(fitting(request["response_format"]["json_schema"]["schema"]))}
    if request.get("chat_template_kwargs") and "reasoning" in does:
        return {"content": "9.8 is larger.", "reasoning": "They ask for the larger one."}
    return None


def fitting(schema: dict[str, Any]) -> dict[str, Any]:
    """An object that fits a schema of lists of words, and of booleans."""
    return {name: field.get("enum", [True])[0] for name, field in schema["properties"].items()}


def count_tokens(prompt: str | list[int]) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


class Reply:
    """The made-up answer to one generation request: one choice per prompt. Raises RequestRefused
    when a prompt does not fit."""

    def __init__(
        self,
        script: EngineScript,
        requests: dict[str, Any],
        prompt_lengths: list[int],
        *,
        chat: bool,
    ) -> None:
        self.script = script
        self.requests = requests
        self.chat = chat
        self.prompt_lengths = prompt_lengths
        self.completion_tokens = 0
        self.max_tokens = int(
            requests.get("max_completion_tokens") or requests.get("max_tokens") or 16
        )
        self.finish_reason = "stop" if script.empty else "length"
        self.head = {
            "id": f"cmpl-{time.monotonic_ns()}",
            "created": int(time.time()),
            "model": script.model,
        }
        for length in prompt_lengths:
            if length + self.max_tokens > script.max_model_len:
                raise RequestRefused(
                    400,
                    f"This model's maximum context length is {script.max_model_len} tokens."
                    f" However, you requested {self.max_tokens} output tokens and your prompt"
                    f" contains {length} input tokens, for a total of {length + self.max_tokens}"
                    " tokens.",
                )

    async def tokens(self) -> AsyncIterator[str]:
        for number in range(0 if self.script.empty else self.max_tokens):
            await asyncio.sleep(
                1 / self.script.tokens_per_second if self.script.tokens_per_second else 0
            )
            while number and self.script.hold is not None and self.script.hold.exists():
                await asyncio.sleep(_HOLD_POLL_S)
            self.completion_tokens += 1
            yield "!" if self.script.gibberish else " " + WORDS[number % len(WORDS)]

    async def whole(self) -> dict[str, Any]:
        async def generate() -> list[str]:
            return [token async for token in self.tokens()]

        choices = []
        # Side by side, as engines compute a batch.
        for index, tokens in enumerate(
            await asyncio.gather(*(generate() for _ in self.prompt_lengths))
        ):
            text = "".join(tokens)
            body = (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            choices.append(
                {
                    "index": index,
                    **body,
                    "logprobs": self.logprobs(tokens),
                    "finish_reason": self.finish_reason,
                }
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        frame = {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion"}
        for index in range(len(self.prompt_lengths)):
            if self.chat:
                yield {
                    **frame,
                    "choices": [
                        {
                            "index": index,
                            "delta": {"role": "assistant", "content": ""},
                            "finish_reason": None,
                        }
                    ],
                }
                if self.script.thinks:
                    thought = {"delta": {"reasoning": self.script.thinks}}
                    yield {**frame, "choices": [{"index": index, **thought, "finish_reason": None}]}
            async for token in self.tokens():
                body: dict[str, Any] = (
                    {"delta": {"content": token}} if self.chat else {"text": token}
                )
                choice = {
                    "index": index,
                    **body,
                    "logprobs": self.logprobs([token]),
                    "finish_reason": None,
                }
                yield {**frame, "choices": [choice]}
            last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            yield {
                **frame,
                "choices": [{"index": index, **last, "finish_reason": self.finish_reason}],
            }
        if (self.requests.get("stream_options") or {}).get("include_usage"):
            yield {**frame, "choices": [], "usage": self.usage()}

    def logprobs(self, tokens: list[str]) -> dict[str, Any] | None:
        if self.requests.get("logprobs") in (None, False):
            return None
        if self.chat:
            return {
                "content": [
                    {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}
                    for token in tokens
                ]
            }
        return {
            "tokens": tokens,
            "token_logprobs": [-0.5] * len(tokens),
            "top_logprobs": None,
            "text_offset": [0] * len(tokens),
        }

    def usage(self) -> dict[str, int]:
        token_count = sum(self.prompt_lengths)
        return {
            "prompt_tokens": token_count,
            "completion_tokens": self.completion_tokens,
            "total_tokens": token_count + self.completion_tokens,
        }


class Connection(asyncio.Protocol):
    """One client: requests one after the other, each answered by a task that is cancelled when the
    client leaves."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.buffer = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.engine.connections.add(self)
        if self.engine.dead:  # it was accepted just before
            self.transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self.engine.connections.discard(self)
        self.writable.set()
        if self.task is not None and not self.task.done():
            self.task.cancel()
            self._record(f"closed {time.time():.3f}\n".encode())

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.task is None or self.task.done():
            self._next()

    def _next(self, _future: object = None) -> None:
        """Take one whole request (Content-Length framing) out of the buffer and answer it."""
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0 or self.transport.is_closing():
            return
        first, *rest = bytes(self.buffer[:end]).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)
        }
        length = end + 4 + int(headers.get("content-length", "0"))
        if len(self.buffer) < length:
            return
        raw = bytes(self.buffer[:length])
        del self.buffer[:length]
        self._record(raw + b"\n")
        method, target, _ = first.split(" ", 2)
        keep = headers.get("connection", "").lower() != "close"
        self.task = asyncio.ensure_future(
            self._respond(method, target.partition("?")[0], raw[end + 4 :], headers, keep=keep)
        )
        self.task.add_done_callback(self._next)

    async def _respond(
        self, method: str, path: str, body: bytes, headers: dict[str, str], *, keep: bool
    ) -> None:
        with suppress(asyncio.CancelledError):
            try:
                self.engine.admit(path, headers)
                answer = await self.engine.answer(method, path, body)
            except RequestRefused as error:
                self._write_whole(error.status, error.body)
            else:
                if answer is None or isinstance(answer, dict | str):
                    self._write_whole(200, answer)
                else:
                    await self._write_stream(answer)
            if not keep:
                self.transport.close()

    def _write_whole(self, status: int, value: dict[str, Any] | str | None) -> None:
        text = (
            value or ""
            if not isinstance(value, dict)
            else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        )
        kind, body = "text/plain" if isinstance(value, str) else "application/json", text.encode()
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length:"
            f" {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    async def _write_stream(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream;"
            b" charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        async for chunk in chunks:
            await self._write_chunk(
                b"data: "
                + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
                + b"\n\n"
            )
        await self._write_chunk(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    async def _write_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writable.wait()

    def _record(self, data: bytes) -> None:
        if self.engine.script.record is not None:
            with self.engine.script.record.open("ab") as file:
                file.write(data)
