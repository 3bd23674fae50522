"""A model request of a user, checked for contradictions."""

from __future__ import annotations

from itertools import combinations

from pydantic import ConfigDict, Field

from gateway.domain import Wish
from gateway.domain.endpoint_url import endpoint_url
from gateway.errors import BadRequest
from gateway.secret import MASK
from gateway.wishes.shown_wish import hidden_setting


class ModelRequest(Wish):
    """A model to serve. `endpoint` is short for one entry in `endpoints`."""

    # Built now: FastAPI looks at the model of a body before anything is validated with it.
    model_config = ConfigDict(defer_build=False)

    endpoint: str | None = Field(None, max_length=2048)

    def wish(self) -> Wish:
        """The wish of the request. Raises BadRequest for contradictions."""
        fields = self.model_dump(exclude={"endpoint"})
        endpoints = tuple(self.endpoints) + ((self.endpoint,) if self.endpoint else ())
        if bool(self.source) == bool(endpoints):
            raise BadRequest(
                "A model needs either a `source` (a folder or a Hugging Face repository to run) or"
                " an `endpoint` (an engine that runs elsewhere).",
                hint="Give exactly one of them.",
                param="source",
            )
        try:
            # The same engine, written in two ways, is one.
            endpoints = tuple(dict.fromkeys(endpoint_url(endpoint) for endpoint in endpoints))
        except ValueError as error:
            raise BadRequest(
                str(error), hint="Give one like http://127.0.0.1:9200/v1.", param="endpoint"
            ) from None
        if self.endpoint_key is not None and not endpoints:
            raise BadRequest(
                "A key for endpoints is named, and the model runs here.",
                hint="Give an `endpoint`, or no key.",
                param="endpoint_key",
            )
        if endpoints and self.loras:
            raise BadRequest(
                "An engine that runs elsewhere has adapters of its own.",
                hint="Give them to that engine.",
                param="loras",
            )
        if endpoints and self.chat_template is not None:
            raise BadRequest(
                "An engine that runs elsewhere has a chat template of its own.",
                hint="Give it to that engine.",
                param="chat_template",
            )
        for low, high in combinations(("min_context", "context", "max_context"), 2):
            minimum = getattr(self, low)
            maximum = getattr(self, high)
            if minimum and maximum and minimum > maximum:
                raise BadRequest(
                    f"{low} is larger than {high}: {minimum} and {maximum} tokens.",
                    hint="Swap or drop one.",
                    param=low,
                )
        wish = Wish.model_validate(fields | {"endpoints": endpoints})
        if (setting := hidden_setting(wish)) is not None:
            raise BadRequest(
                f"{setting} has the text {MASK} in the place of a secret, which is not shown.",
                hint="Give the secret itself.",
                param=setting,
            )
        return wish
