"""Posts events to the URLs of FITSERVE_WEBHOOK, following https://www.standardwebhooks.com.

Each event is one POST, in order, and signed if there is a secret. A delivery is repeated until the
receiver accepts it or the event is a day old.

The store has the last delivered event of each URL. So events from a time when the receiver or the
gateway was away are delivered later, as far as they are kept. An event may come twice, with the
same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import random
import time
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from gateway.controller.events.event_log import EventLog, RecordedEvent
from gateway.controller.watch.engine_client import EngineClient, NoAnswerError
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.secret import Secret
from gateway.settings import Settings, signing_key
from gateway.store.store import Store
from gateway.supervision import SupervisedTask

log = Logger("fitserve.webhook")

_TIMEOUT_S = 15.0
# The waits of the specification begin with 5 s too.
_FIRST_REST_S = 5.0
_MAX_REST_S = 300.0
_GIVE_UP_S = 86400.0
_LISTEN_S = 3600.0
_GONE_STATUS = 410


class Webhook:
    """The delivery to one URL. `patterns` are the kinds of events to send."""

    def __init__(
        self,
        url: Secret,
        key: Secret | None,
        patterns: tuple[str, ...],
        events: EventLog,
        store: Store,
    ) -> None:
        self._url = url
        self._key = key
        self._patterns = patterns
        self._events = events
        self._table = store.events
        self._sender = store.instance
        # The path and query of a URL may be secrets, so logs have neither.
        url_parts = urlsplit(url.reveal())
        self._receiver = f"{url_parts.scheme}://{url_parts.hostname}"
        self._reader = hashlib.sha256(url.reveal_bytes()).hexdigest()[:16]
        self._number: int | None = None
        self._failures = 0
        self._client = EngineClient(1)
        self._telling = SupervisedTask(
            self._deliver_batch, "delivering events to a webhook", receiver=self._receiver
        )

    async def close(self) -> None:
        await self._telling.close()

    async def _deliver_batch(self) -> float | None:
        """Deliver some events. Returns the seconds until the next look."""
        if self._number is None:
            cursor = await asyncio.to_thread(self._table.cursor, self._reader)
            # A new receiver begins with this gateway's start.
            self._number = cursor if cursor is not None else self._events.at_start
            if cursor is None:
                # Undelivered events would be skipped after the next start without this note.
                await self._record_delivery(self._number)
        batch = await self._events.events_after(self._number)
        if batch.has_gap:
            log.warning(
                "events were removed before their delivery to a webhook", receiver=self._receiver
            )
        for event in batch.events:
            if self._wants_event(event):
                if not await self._deliver(event):
                    return None
                await self._record_delivery(event.number)
            self._number = event.number
        has_moved = batch.number != self._number
        self._number = batch.number
        if batch.events or batch.has_gap or has_moved:
            await self._record_delivery(batch.number)
        elif not self._events.is_over(batch.number):
            await self._events.wait_for_events(_LISTEN_S)
        else:
            return None
        return 0

    def _wants_event(self, event: RecordedEvent) -> bool:
        return any(fnmatchcase(event.kind, pattern) for pattern in self._patterns)

    async def _record_delivery(self, number: int) -> None:
        # The event is sent again after a restart. The log has reported the full disk.
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(self._table.record_cursor, self._reader, number)

    async def _deliver(self, event: RecordedEvent) -> bool:
        """Deliver the event. Returns whether it is done with; False: the receiver wants no more."""
        at = datetime.fromtimestamp(event.at, UTC).isoformat()
        body = msgspec.json.encode(
            {"type": event.kind, "timestamp": at, "data": msgspec.Raw(event.text)}
        )
        name = f"evt_{self._sender}_{event.number}"
        while True:
            try:
                lines = headers(name, int(time.time()), body, self._key)
                answer = await self._client.send(self._url.reveal(), body, lines, _TIMEOUT_S)
                problem = (
                    "" if 200 <= answer.status < 300 else f"answers with status {answer.status}"
                )
            except NoAnswerError as error:
                answer = None
                problem = str(error)
            if not problem:
                if self._failures:
                    log.info("a webhook accepts events again", receiver=self._receiver)
                self._failures = 0
                return True
            if answer is not None and answer.status == _GONE_STATUS:
                log.warning("a webhook wants no more events", receiver=self._receiver)
                return False
            self._failures += 1
            if self._failures == 1:
                log.warning(
                    "a webhook accepts no events; the delivery is repeated",
                    receiver=self._receiver,
                    problem=problem,
                )
            if time.time() - event.at > _GIVE_UP_S:
                log.warning(
                    "an event was too old for a webhook, and is skipped",
                    receiver=self._receiver,
                    event_id=event.number,
                    kind=event.kind,
                )
                return True
            rest_s = min(_MAX_REST_S, _FIRST_REST_S * 2 ** min(self._failures - 1, 16))
            await asyncio.sleep(rest_s * random.uniform(0.75, 1.25))  # noqa: S311


def headers(name: str, at: int, body: bytes, key: Secret | None) -> bytes:
    """The header lines of one message. key: as in FITSERVE_WEBHOOK_SECRET.

    Source: standard-webhooks/spec/standard-webhooks.md, "Signature scheme" and "Webhook metadata".
    """
    lines = f"webhook-id: {name}\r\nwebhook-timestamp: {at}\r\n"
    if key is not None:
        signature = base64.b64encode(
            hmac.digest(signing_key(key), f"{name}.{at}.".encode() + body, "sha256")
        ).decode()
        lines += f"webhook-signature: v1,{signature}\r\n"
    return lines.encode()


def webhooks(settings: Settings, events: EventLog, store: Store) -> list[Webhook]:
    """The webhooks that the settings name."""
    return [
        Webhook(url, settings.webhook_secret, settings.webhook_kinds, events, store)
        for url in settings.webhook_urls
    ]
