"""Watches an engine that runs elsewhere: whether it answers, and what it calls the model. Never writes, never decides."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from gateway.controller.engine_client import EngineClient, NoAnswerError
from gateway.routing.table import RoutedReplica
from gateway.supervision import Supervised

_TIMEOUT_S = 5.0
_MOST_BYTES = 1024 * 1024
_MOST_NAME = 512
_SHOWN_NAMES = 5
_FIRST_REST_S = 1.0
# An endpoint that stays away is asked less and less often, down to once in so many of its intervals.
_LONGEST_REST = 6


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    """What is read of an answer of /v1/models."""

    data: list[_Model]


class EndpointWatcher:
    """`replica` is where requests go, None while the engine is away; `detail` says why, then. `asked`: whether it was asked yet."""

    def __init__(
        self,
        model: str,
        endpoint: str,
        client: EngineClient,
        interval_s: float,
        stretch: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """endpoint: its base URL. stretch: how many times longer than `interval_s` it is until an engine that answers is asked again."""
        self.endpoint = endpoint
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
        served_name, detail = await self._ask()
        self.asked = True
        if served_name != (self.replica and self.replica.served_name) or detail != self._detail:
            self._detail = detail
            self.replica = (
                RoutedReplica(self.url, f"{self._model}@{self.url}", served_name) if served_name is not None else None
            )
            self._wake()
        if served_name is not None:
            self._rest_s = 0.0
            return self._interval_s * self._stretch() * random.uniform(0.9, 1.1)  # noqa: S311
        first_s, longest_s = min(_FIRST_REST_S, self._interval_s), _LONGEST_REST * self._interval_s
        self._rest_s = min(max(2 * self._rest_s, first_s), longest_s)
        return self._rest_s * random.uniform(0.75, 1.25)  # noqa: S311

    async def _ask(self) -> tuple[str | None, str]:
        """What the engine calls the model, or None and why that is not known."""
        try:
            answer = await self._client.get(f"{self.url}/v1/models", _TIMEOUT_S, _MOST_BYTES)
            if answer.status in (401, 403):
                return None, f"{self.url} answers {answer.status}: it wants a key, and takes none of ours"
            if answer.status != 200:
                return None, f"{self.url}/v1/models answers {answer.status}"
            names = [model.id for model in (await answer.read(_Models)).data]
        except NoAnswerError as error:
            return None, f"{self.url} {error}"
        if self._model in names:
            return self._model, ""
        # A name is sent with every request, and shown to people.
        usable = [name for name in names[:_SHOWN_NAMES] if name.isprintable() and 0 < len(name) <= _MOST_NAME]
        if len(names) == len(usable) == 1:
            return usable[0], ""
        return None, f"{self.url} does not serve {self._model}" + (f" but {', '.join(usable)}" if usable else "")
