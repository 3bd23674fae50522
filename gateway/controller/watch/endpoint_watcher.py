"""The watcher of an engine elsewhere: its health, and its name for the model.

Never writes, never decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from gateway.controller.watch.engine_client import EngineClient, EngineResponse, NoAnswerError
from gateway.diagnosis.lines.log_lines import clean
from gateway.file_reading import PATIENCE_S, FileReader
from gateway.proxy.access.endpoint_keys import EndpointKeys, NoKeyError
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.secret import Secret
from gateway.supervision import SupervisedTask

_TIMEOUT_S = 5.0
_MAX_BYTES = 1024 * 1024
_MAX_NAME_CHARACTERS = 512
_SHOWN_NAMES_MAX = 5
_SHOWN_CHARACTERS_MAX = 200
_FIRST_REST_S = 1.0
# The wait for an unreachable endpoint grows up to this number of intervals.
_MAX_REST_FACTOR = 6


# States of a model at another fitserve gateway: recovers without a request, is loaded by a request,
# or never.
_RECOVERING_STATES = frozenset({"starting", "verifying", "backing_off", "stopping"})
_LOADABLE_STATES = frozenset({"asleep", "stopped", "no_plan"})
_DEAD_STATES = frozenset({"quarantined", "unreachable"})


class _Model(msgspec.Struct):
    """A model in the list of an endpoint.

    `state` and `wait_s` come from another fitserve gateway.
    """

    id: str
    owned_by: Any = None
    state: Any = None
    wait_s: Any = None

    @property
    def state_there(self) -> str:
        """The model's state there; "ready" where unknown."""
        is_known = (
            self.owned_by == "fitserve"
            and isinstance(self.state, str)
            and self.state in _RECOVERING_STATES | _LOADABLE_STATES | _DEAD_STATES
        )
        return self.state if is_known else "ready"

    @property
    def state_here(self) -> str:
        """The endpoint's state here; "" if requests make no sense."""
        if self.state_there in _LOADABLE_STATES:
            return "asleep" if self.wait_s or self.state_there == "asleep" else ""
        return "" if self.state_there in _DEAD_STATES else self.state_there


class _Models(msgspec.Struct):
    """The part of a /v1/models answer that is read."""

    data: list[_Model]


class _ErrorBody(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """The part of an error answer that is read."""

    error: _ErrorBody


class EndpointKey(NamedTuple):
    """The place of an endpoint's key. `reference` is that of the wish; None: no key is needed.
    `patience_s`: the time for its file system."""

    keys: EndpointKeys
    reference: str | None
    patience_s: float = PATIENCE_S

    def read(self) -> Secret | None:
        """The key, or None. Blocks. Raises NoKeyError."""
        return None if self.reference is None else self.keys.read(self.reference)


class _EndpointState(NamedTuple):
    """The route to a model on an endpoint, and its state there.

    replica: None if the endpoint cannot serve the model now; `detail` then has the reason.
    """

    replica: RoutedReplica | None
    state: str
    detail: str


def _unreachable(reason: str) -> _EndpointState:
    return _EndpointState(None, "unreachable", reason)


class EndpointWatcher:
    """Watches an engine elsewhere, and gives its route.

    `replica` is the route, None while the engine is away; `detail` says why, and clients may
    read it.

    `state` is the model's state there. `was_contacted`: the endpoint was called at least once.
    """

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
        """`endpoint` is a base URL. `stretch` gives the factor by which the interval of a healthy
        engine grows."""
        self.endpoint = endpoint
        self.key = key
        self.url = endpoint.rstrip("/").removesuffix("/v1")
        self.replica: RoutedReplica | None = None
        self.state = "unreachable"
        self.was_contacted = False
        self._detail = f"{self.url} was not checked yet"
        self._key_reader = FileReader(key.read, key.patience_s)
        self._model = model
        self._client = client
        self._interval_s = interval_s
        self._stretch = stretch
        self._rest_s = 0.0
        self._wake = wake
        self._work = SupervisedTask(
            self._check_endpoint, "watching an endpoint", wake, model=model, endpoint=self.url
        )

    async def _read_key(self) -> Secret | None:
        """The key, read by a separate thread of this watcher, so that a hanging mount stops nothing
        else. Raises NoKeyError."""
        if self.key.reference is None:
            return None
        try:
            return await self._key_reader.result()
        except OSError as error:
            raise NoKeyError(f"its file: {error.strerror}") from None

    @property
    def detail(self) -> str:
        problem = self._work.setback.problem
        return self._detail if problem is None else f"{self.url} cannot be watched, {problem}"

    async def close(self) -> None:
        await self._work.close()

    async def _check_endpoint(self) -> float:
        """Ask the endpoint for its models once, and note the answer. Returns the seconds until the
        next check, with jitter, so that endpoints are not called at the same time."""
        replica, state, detail = await self._query()
        self.was_contacted = True
        if (replica, state, detail) != (self.replica, self.state, self._detail):
            self.replica = replica
            self.state = state
            self._detail = detail
            self._wake()
        if replica is not None:
            self._rest_s = 0.0
            return self._interval_s * self._stretch() * random.uniform(0.9, 1.1)  # noqa: S311
        first_s = min(_FIRST_REST_S, self._interval_s)
        longest_s = _MAX_REST_FACTOR * self._interval_s
        self._rest_s = min(max(2 * self._rest_s, first_s), longest_s)
        return self._rest_s * random.uniform(0.75, 1.25)  # noqa: S311

    async def _query(self) -> _EndpointState:
        """The state of the endpoint now."""
        try:
            key = await self._read_key()
            answer = await self._client.keyed_client(key).get(
                f"{self.url}/v1/models", _TIMEOUT_S, _MAX_BYTES
            )
            if answer.status != 200:
                return _unreachable(await self._refusal(answer, key))
            models = {model.id: model for model in (await answer.read(_Models)).data}
        except NoKeyError as error:
            return _unreachable(f"the key for {self.url} cannot be read: {error}")
        except NoAnswerError as error:
            return _unreachable(f"{self.url} {error}")
        # A name is sent with every request, and shown to people.
        usable = [
            name
            for name in islice(models, _SHOWN_NAMES_MAX)
            if name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARACTERS
        ]
        if self._model not in models and not len(models) == len(usable) == 1:
            other_models = f" but {', '.join(usable)}" if usable else ""
            return _unreachable(f"{self.url} does not serve {self._model}{other_models}")
        name = self._model if self._model in models else usable[0]
        if not models[name].state_here:
            reason = f"{self.url} has {name}, which is {models[name].state_there} there"
            return _unreachable(reason)
        replica = RoutedReplica(
            self.url, f"{self._model}@{self.url}", name, key=key, is_remote=True
        )
        return _EndpointState(replica, models[name].state_here, "")

    async def _refusal(self, answer: EngineResponse, key: Secret | None) -> str:
        if answer.status not in (401, 403):
            return f"{self.url}/v1/models answers {answer.status}"
        if key is None:
            return (
                f"{self.url} answers {answer.status}: it needs a key, and the model has no"
                " endpoint_key"
            )
        try:
            message = clean((await answer.read(_Refusal)).error.message.encode())
        except NoAnswerError:
            message = ""
        # Some servers repeat the key that they refuse.
        text = message[:_SHOWN_CHARACTERS_MAX]
        text = text if text.isprintable() and key.hidden_in(message) == message else ""
        return f"{self.url} refused the key: {text or f'it answers {answer.status}'}"
