"""Memory that one model gives to another, for a plan that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Attempt, Instance, Offer


class OfferTransfers:
    """Has models give the offers that others wait for, and notifies the receivers.

    `measures` is `StartGate.measures`, and `shrink` is `ReplicaSteps.shrink`.
    """

    def __init__(
        self,
        fleet: Fleet,
        measures: Callable[[Collection[str], str], bool],
        shrink: Callable[[ManagedModel, Offer, Collection[str]], None],
    ) -> None:
        self._fleet = fleet
        self._measures = measures
        self._shrink = shrink

    def request_offers(self, model: ManagedModel, instances: Collection[Instance]) -> None:
        """Have other models give the offers that this one waits for.

        A replica whose offers are all given is planned. An unexpected error stays with the model.
        """
        if model.setback.rest_s:
            return
        try:
            for replica in model.replicas:
                self._request_offers(replica, instances)
        except Exception as error:
            model.setback.record_failure(error)

    def _request_offers(self, replica: ReplicaState, instances: Collection[Instance]) -> None:
        # Each giver is asked, even if another one has not given.
        missing_offers = [
            offer
            for offer in replica.planning.awaited_offers
            if not self._is_settled(offer, replica.model, instances)
        ]
        if replica.planning.awaited_offers and not missing_offers:
            replica.planning.accept_offers(
                tuple(
                    offer
                    for offer in replica.planning.awaited_offers
                    if self._fleet.has_given(offer, replica.model)
                )
            )

    def _is_settled(self, offer: Offer, requester: str, instances: Collection[Instance]) -> bool:
        """Whether the giver has given the offer, or never will. Otherwise the gift is started."""
        giver = self._fleet.models.get(offer.model)
        if giver is None or offer.replica >= len(giver.replicas):
            return True
        replica = giver.replicas[offer.replica]
        if offer.kind != "surplus":
            return _is_away(replica, offer)
        if giver.is_deleting:
            return True
        if replica.attempt is None or replica.is_busy:
            return not replica.is_busy
        if giver.no_giving_until_s > time.monotonic():
            return True
        if _has_shrunk(replica.attempt, offer):
            return not _is_larger_engine_running(replica, replica.attempt, instances)
        if self._may_shrink(giver, replica, replica.attempt):
            self._shrink(giver, *self._fleet.combined_offer(giver, offer, requester))
        return False

    def _may_shrink(self, giver: ManagedModel, replica: ReplicaState, attempt: Attempt) -> bool:
        """Whether the replica may be replaced by a smaller one now.

        The copies of a model shrink one at a time, so that the others serve.
        """
        siblings = (sibling for sibling in giver.replicas if sibling is not replica)
        return (
            giver.trial is None
            and not giver.has_pending_changes
            and not _is_any_replaced(siblings)
            and not self._measures(attempt.plan.gpus, attempt.instance_name)
        )


def _is_away(replica: ReplicaState, offer: Offer) -> bool:
    """Whether a copy has left its GPUs, by the way that its offer names."""
    is_gone = replica.attempt is None or (offer.kind == "sleep" and replica.is_asleep)
    return is_gone and replica.eviction is None and not replica.is_busy


def _has_shrunk(attempt: Attempt, offer: Offer) -> bool:
    return attempt.plan.cap is not None and attempt.plan.cap.bytes <= offer.keeps


def _is_larger_engine_running(
    replica: ReplicaState, attempt: Attempt, instances: Iterable[Instance]
) -> bool:
    """Whether an engine of an earlier attempt runs. Until its end no reading of the GPU shows the
    gift."""
    former_names = {
        past_attempt.instance_name
        for past_attempt in replica.attempts
        if past_attempt.id != attempt.id
    }
    return any(
        instance.name in former_names and instance.state == "running" for instance in instances
    )


def _is_any_replaced(copies: Iterable[ReplicaState]) -> bool:
    return any(
        copy.succession.unrouted_at is not None
        or (copy.succession.awaits_successor and copy.attempt is not None)
        for copy in copies
    )
