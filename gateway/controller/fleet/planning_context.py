"""The context in which a replica is planned: its wish, the memory taken by others, and the
sharing."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Offer, Sharing, Wish
from gateway.domain.sharing import NO_SHARING


class PlanningContext(NamedTuple):
    """The wish as other models leave it, bytes per GPU UUID that others may use, and the sharing.

    is_copy: another replica has a plan already, whose decision users see.
    offers_on_request: offers of other models that are made only when a request waits for this
        model.
    """

    wish: Wish
    promised_bytes: dict[str, int]
    sharing: Sharing = NO_SHARING
    is_copy: bool = False
    offers_on_request: tuple[Offer, ...] = ()
