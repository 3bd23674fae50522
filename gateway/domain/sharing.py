"""GPU memory that models of one machine share: offers, holdings, and a model's part."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.domain.base import Field
from gateway.domain.plan import Cap, Plan
from gateway.domain.value import Value


class Offer(Value):
    """Memory that a replica of one model could give to another model.

    surplus: KV cache that its wish does not need. sleep, stop: all memory, and the replica does not
    serve meanwhile. A larger offer of a replica includes its smaller ones.
    """

    model: str
    how: Literal["surplus", "sleep", "stop"]
    gives: dict[str, int] = Field(description="bytes that come back, by the UUID of a GPU")
    replica: int = Field(
        0, description="the copy of the model that gives it, while the others serve"
    )
    keeps: int = Field(
        0, description="of a surplus: bytes of each GPU that the model then may take"
    )
    tokens: int = Field(0, description="of a surplus: tokens of KV cache that stay")
    of_tokens: int = Field(0, description="of a surplus: tokens of KV cache that there are")
    of_bytes: int = Field(0, description="of a surplus: bytes of KV cache that there are")
    context: int = Field(
        0, description="of a surplus: tokens of a whole request, of which one always has room"
    )
    beside: int = Field(
        0,
        description=(
            "of a surplus that is taken: bytes of each GPU that the one who takes it has without it"
        ),
    )
    words: str = Field(description="the same for people")


class Holding(Value):
    """The memory of the machine's GPUs that a model's engines were promised."""

    model: str
    gives: dict[str, int] = Field(description="bytes by the UUID of a GPU")
    pinned: bool = Field(False, description="it never leaves")
    words: str = Field("", description="the same for people, with the numbers of the GPUs")


class Sharing(NamedTuple):
    """How a model shares its machine. cap: what it keeps to. offers: what others could give, in the
        order in which it is asked of them.
    holders: the others. home: UUIDs of the GPUs that it had last. leaves: why it may have to leave
    its GPUs for a while; "": it does not. restored: the plan that it had until something
    outside of the plan ended its engine. Its next start keeps that plan.
    """

    cap: Cap | None = None
    offers: tuple[Offer, ...] = ()
    holders: tuple[Holding, ...] = ()
    home: tuple[str, ...] = ()
    leaves: str = ""
    restored: Plan | None = None


NO_SHARING = Sharing()
