"""GPU memory that models of one machine share: offers, promises and caps.

offer      memory that a model may give to another
gift       an offer that was given, and is reserved for its receiver
promise    bytes that are reserved for an engine
cap        the most bytes that a model may take
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.domain.base import Field
from gateway.domain.plan import Cap, Plan
from gateway.domain.value import Value


class Offer(Value):
    """Memory that a replica of one model could give to another model.

    surplus: KV cache that the wish of the replica does not need. sleep, stop: all memory of the
    replica, which does not serve meanwhile. A larger offer of a replica includes its smaller ones.
    """

    model: str
    kind: Literal["surplus", "sleep", "stop"]
    bytes_by_gpu: dict[str, int] = Field(description="bytes that come back, by the UUID of a GPU")
    replica: int = Field(
        0, description="the copy of the model that gives it, while the others serve"
    )
    keeps: int = Field(
        0, description="bytes of each GPU that the giver of a surplus may take afterwards"
    )
    tokens: int = Field(0, description="tokens of KV cache that the giver of a surplus keeps")
    cache_tokens_before: int = Field(0, description="tokens of KV cache before a surplus is given")
    cache_bytes_before: int = Field(0, description="bytes of KV cache before a surplus is given")
    context: int = Field(
        0,
        description=(
            "tokens of one request of the giver of a surplus; at least one request always has a"
            " place"
        ),
    )
    free_bytes_without_offer: int = Field(
        0,
        description=("bytes of each GPU that the taker of a surplus has without the offer"),
    )
    words: str = Field(description="the offer in words")


class Promise(Value):
    """GPU memory that is reserved for the engines of a model."""

    model: str
    bytes_by_gpu: dict[str, int] = Field(description="bytes by the UUID of a GPU")
    is_pinned: bool = Field(False, description="whether the model never leaves")
    words: str = Field("", description="the promise in words, with the numbers of the GPUs")


class Sharing(NamedTuple):
    """How a model shares its machine with the others."""

    cap: Cap | None = None
    """The bytes that the model may take at most, for the sake of others."""
    offers: tuple[Offer, ...] = ()
    """Memory that other models could give, in the order in which they are asked."""
    promises: tuple[Promise, ...] = ()
    """Memory that other models were promised."""
    former_gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the model's last plan."""
    leave_reason: str = ""
    """The reason that the model may have to leave its GPUs for a while; "": none."""
    plan_to_restore: Plan | None = None
    """The plan of the last engine, which something outside of the plan ended. The next start keeps
    that plan."""


NO_SHARING = Sharing()
