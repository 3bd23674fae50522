"""The context in which a replica is planned: its wish, the memory taken by others, and the
sharing."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Offer, Sharing, Wish
from gateway.domain.plan import UNSHARED


class PlanningContext(NamedTuple):
    """The wish as other models leave it, bytes per GPU UUID that others may use, and the sharing.

    `copy`: another replica has a plan already, and its decision is shown. `if_asked` are offers
    that others make, in time, once a request waits for the model.
    """

    wish: Wish
    claims: dict[str, int]
    sharing: Sharing = UNSHARED
    copy: bool = False
    if_asked: tuple[Offer, ...] = ()
