"""Watches an engine that runs elsewhere: whether it answers, and what it calls the model. Never writes, never decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gateway.access.endpoint_keys import EndpointKeys, NoKeyError
from gateway.controller.engine_client import EngineAnswer, EngineClient, NoAnswerError
from gateway.core.failures.log_lines import clean
from gateway.routing.table import RoutedReplica
from gateway.supervision import Supervised

_TIMEOUT_S = 5.0
_MOST_BYTES = 1024 * 1024
_MOST_NAME = 512
_SHOWN_NAMES = 5
_SHOWN_WORDS = 200
_FIRST_REST_S = 1.0
# An endpoint that stays away is asked less and less often, down to once in so many of its intervals.
_LONGEST_REST = 6


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    """What is read of an answer of /v1/models."""

    data: list[_Model]


class _Said(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """What is read of an error."""

    error: _Said


class EndpointKey(NamedTuple):
    """Where the key is that an endpoint wants of its callers. reference: as a wish has it; None: it wants none."""

    keys: EndpointKeys
    reference: str | None

    async def read(self) -> str | None:
        """Raises NoKeyError."""
        return None if self.reference is None else await asyncio.to_thread(self.keys.read, self.reference)


class EndpointWatcher:
    """`replica` is where requests go, None while the engine is away; `detail` says why, then: clients may read it. `asked`: whether it was asked yet."""

    def __init__(
        self,
        model: str,
        endpoint: str,
        client: EngineClient,
        interval_s: float,
        stretch: Callable[[], float],
        wake: Callable[[], None],
        key: EndpointKey,
    ) -> None:
        """endpoint: its base URL. stretch: how many times longer than `interval_s` it is until an engine that answers is asked again."""
        self.endpoint = endpoint
        self.key = key
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.replica: RoutedReplica | None = None
        self.asked = False
        self._detail = f"{self.url} is not asked yet"
        self._model = model
        self._client = client
        self._interval_s = interval_s
        self._stretch = stretch
        self._rest_s = 0.0
        self._wake = wake
        self._work = Supervised(self._look, "watching an endpoint", wake, model=model, endpoint=self.url)

    @property
    def detail(self) -> str:
        problem = self._work.setback.problem
        return self._detail if problem is None else f"{self.url} cannot be watched, {problem}"

    async def close(self) -> None:
        await self._work.close()

    async def _look(self) -> float:
        """One look; the seconds until the next one, never the same, so that many endpoints are not asked all at once."""
        replica, detail = await self._ask()
        self.asked = True
        if replica != self.replica or detail != self._detail:
            self.replica, self._detail = replica, detail
            self._wake()
        if replica is not None:
            self._rest_s = 0.0
            return self._interval_s * self._stretch() * random.uniform(0.9, 1.1)  # noqa: S311
        first_s, longest_s = min(_FIRST_REST_S, self._interval_s), _LONGEST_REST * self._interval_s
        self._rest_s = min(max(2 * self._rest_s, first_s), longest_s)
        return self._rest_s * random.uniform(0.75, 1.25)  # noqa: S311

    async def _ask(self) -> tuple[RoutedReplica | None, str]:
        """Where requests go, or None and why they cannot."""
        try:
            key = await self.key.read()
            answer = await self._client.with_key(key).get(f"{self.url}/v1/models", _TIMEOUT_S, _MOST_BYTES)
            if answer.status != 200:
                return None, await self._refusal(answer, key)
            names = [model.id for model in (await answer.read(_Models)).data]
        except NoKeyError as error:
            return None, f"the key for {self.url} cannot be read: {error}"
        except NoAnswerError as error:
            return None, f"{self.url} {error}"
        # A name is sent with every request, and shown to people.
        usable = [name for name in names[:_SHOWN_NAMES] if name.isprintable() and 0 < len(name) <= _MOST_NAME]
        if self._model not in names and not len(names) == len(usable) == 1:
            return None, f"{self.url} does not serve {self._model}" + (f" but {', '.join(usable)}" if usable else "")
        name = self._model if self._model in names else names[0]
        return RoutedReplica(self.url, f"{self._model}@{self.url}", name, key=key or ""), ""

    async def _refusal(self, answer: EngineAnswer, key: str | None) -> str:
        if answer.status not in (401, 403):
            return f"{self.url}/v1/models answers {answer.status}"
        if key is None:
            return f"{self.url} answers {answer.status}: it wants a key, and the model has no endpoint_key"
        try:
            said = clean((await answer.read(_Refusal)).error.message.encode())[:_SHOWN_WORDS]
        except NoAnswerError:
            said = ""
        # Some say the key again that they refuse.
        said = said if said.isprintable() and key not in said else ""
        return f"{self.url} refused the key: {said or f'it answers {answer.status}'}"
