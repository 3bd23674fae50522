"""What a replica is planned with: the wish, what the others leave of the machine, and how it is
shared with them."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Offer, Sharing, Wish
from gateway.domain.plan import ALONE


class PlanningContext(NamedTuple):
    """What a replica is planned with: its model's wish, as the others leave it, bytes per GPU UUID
        that others may use, and how it shares
    the GPUs with them. copy: it is planned like a replica that has a plan; what else could be done
    was said of that one. if_asked: what others would give, each when its time has come, once a
    request waits for the model."""

    wish: Wish
    claims: dict[str, int]
    sharing: Sharing = ALONE
    copy: bool = False
    if_asked: tuple[Offer, ...] = ()
