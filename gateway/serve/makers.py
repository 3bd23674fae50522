"""Which replica made which response of `/v1/responses`: only that one can go on from it."""

from __future__ import annotations

from collections import OrderedDict

from gateway.errors import NotFound
from gateway.serve.auth import Key

MAKERS = 10_000


class Makers:
    """By the id of the response; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def made(self, response: str, model: str, replica_id: str) -> None:
        self._of[response] = (model, replica_id)
        if len(self._of) > MAKERS:
            self._of.popitem(last=False)

    def replica_of(self, response: str) -> str | None:
        """The id of the replica that made it, None where that is not known."""
        made = self._of.get(response)
        return made[1] if made is not None else None

    def model_of(self, response: str, key: Key) -> str:
        """The model that made it, for who has `key`. Raises NotFound."""
        made = self._of.get(response)
        if made is None or not key.sees(made[0]):
            raise NotFound(
                f"There is no response {response}.", hint="Responses are kept by the engine that made them, while it runs."
            )
        return made[0]
