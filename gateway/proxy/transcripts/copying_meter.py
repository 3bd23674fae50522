"""A meter that also copies requests and their answers.

The data plane calls its meter anyway, so a gateway without transcripts pays nothing for them: it
has another meter. Answers of covered requests go to the client through an `AnswerCopy`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy.meter import UNTOLD, Meter
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.transcripts.answer_copy import AnswerCopy
from gateway.proxy.transcripts.exchange_copy import MAX_REQUEST_BYTES, ExchangeCopy, frame_copy

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange
    from gateway.proxy.transcripts.copy_link import CopyLink
    from gateway.proxy.transcripts.transcript_setup import TranscriptSetup

_OK = 2
_ERROR_STATUS = 400


class CopiedRequest:
    """A request of which a copy is made, while it runs.

    body: empty where it is too large, or a form.
    answer: None before an engine was asked.
    has_head: the answer's head is in the copy.
    routed_at: time of the loop of the last send to an engine.
    """

    __slots__ = ("answer", "body", "has_head", "queued_s", "replica", "routed_at", "size")

    def __init__(self, exchange: Exchange) -> None:
        body = exchange.upload.body
        self.size = max(len(body), exchange.received_bytes)
        is_kept = exchange.endpoint.body == "json" and len(body) <= MAX_REQUEST_BYTES
        self.body = bytes(body) if is_kept else b""
        self.answer: AnswerCopy | None = None
        self.has_head = True
        self.queued_s = 0.0
        self.routed_at = 0.0
        self.replica = ""


class CopyingMeter(Meter):
    """Counts by another meter, and sends copies of covered requests."""

    def __init__(self, meter: Meter, setup: TranscriptSetup, link: CopyLink) -> None:
        self.link = link
        self._meter = meter
        self._setup = setup

    def count_start(self, exchange: Exchange) -> None:
        self._meter.count_start(exchange)
        if not self._setup.covers(exchange.key, exchange.model):
            return
        request = self._request_of(exchange)
        now = exchange.plane.loop.time()
        request.queued_s += _present_wait_s(exchange, now)
        request.routed_at = now
        if exchange.replica is not None:
            request.replica = exchange.replica.id
        answer = exchange.answer
        request.has_head = not answer.has_sent_sse_head
        request.answer = answer.writer = AnswerCopy(answer.writer)

    def count_first_byte(self, exchange: Exchange) -> None:
        self._meter.count_first_byte(exchange)

    def count_refusal(self, exchange: Exchange, error: FitserveError) -> None:
        self._meter.count_refusal(exchange, error)
        if self._setup.covers(exchange.key, exchange.model):
            self._send(exchange, error.status, "refused", error.code)

    def count_rejection(self, error: FitserveError, id_: str, address: str) -> None:
        self._meter.count_rejection(error, id_, address)

    def count_end(self, exchange: Exchange) -> None:
        self._meter.count_end(exchange)

    def count_completion(self, exchange: Exchange) -> None:
        self._meter.count_completion(exchange)
        if not self._setup.covers(exchange.key, exchange.model):
            return
        if exchange.outcome != "refused":
            self._send(exchange, exchange.answer.status, exchange.outcome, "")
        else:
            # `count_refusal` follows, mostly after the end of the wait.
            now = exchange.plane.loop.time()
            self._request_of(exchange).queued_s += _present_wait_s(exchange, now)

    def samples(self) -> Iterator[Sample]:
        yield "fitserve_transcripts_total", ("dropped",), self.link.dropped_count

    def _request_of(self, exchange: Exchange) -> CopiedRequest:
        request: CopiedRequest | None = getattr(exchange, "copied", None)
        if request is None:
            request = exchange.copied = CopiedRequest(exchange)
        return request

    def _send(self, exchange: Exchange, status: int, outcome: str, error: str) -> None:
        request = self._request_of(exchange)
        now = exchange.plane.loop.time()
        started_at = exchange.started_at or now
        answer = b"" if request.answer is None else request.answer.content()
        is_copied = bool(answer) and status < _ERROR_STATUS
        if not is_copied:
            # The form of an error changes on its way, past the copy.
            answer = b"".join(exchange.tail)
        prompt, completion, cached_tokens = exchange.usage if status // 100 == _OK else UNTOLD
        self.link.send(
            frame_copy(
                ExchangeCopy(
                    id=exchange.id,
                    key=exchange.key.name,
                    model=exchange.model,
                    replica=request.replica,
                    endpoint=exchange.endpoint.name,
                    path=exchange.endpoint.path,
                    started_at=time.time() - (now - started_at),
                    queued_s=request.queued_s + _present_wait_s(exchange, now),
                    routed_s=_seconds_since(started_at, request.routed_at),
                    first_byte_s=_seconds_since(started_at, exchange.first_byte_at),
                    duration_s=now - started_at,
                    status=status,
                    outcome=outcome,
                    error=error,
                    is_stream=exchange.answer.has_events,
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    cached_tokens=cached_tokens,
                    request=request.body,
                    request_bytes=max(request.size, exchange.received_bytes),
                    answer=answer,
                    has_head=is_copied and request.has_head,
                    is_chunked=is_copied and exchange.answer.accepts_chunked,
                    answer_bytes=exchange.sent_bytes,
                    is_cut=request.answer is not None and request.answer.is_cut,
                )
            )
        )


def _seconds_since(started_at: float, moment: float) -> float | None:
    """The seconds to a moment; None: it was not reached."""
    return moment - started_at if moment else None


def _present_wait_s(exchange: Exchange, now: float) -> float:
    """Seconds that the request waits in the queue; 0 outside of it."""
    queued_at = exchange.queued_at
    return now - queued_at if queued_at is not None else 0.0
