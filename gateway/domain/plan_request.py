"""A question to the planner of a gateway, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.domain.answer import EngineAnswer, InquiryResult
from gateway.domain.decision import OpenQuestions, Rival, RuleGap
from gateway.domain.facts import Fact, TrafficSums
from gateway.domain.hardware import Cluster, Hardware
from gateway.domain.plan import Plan, Question
from gateway.domain.sharing import NO_SHARING, Offer, Sharing
from gateway.domain.wish import Wish


class RunningPlan(NamedTuple):
    """A running plan, to be compared with others.

    held_bytes: bytes that its model holds and that another plan could use, by GPU UUID.
    traffic: the rates that its engines gave to clients.
    """

    plan: Plan
    held_bytes: dict[str, int]
    traffic: tuple[TrafficSums, ...] = ()


@dataclass(frozen=True)
class PlanRequest:
    """A wish, and everything about the machine that its plan depends on.

    machine: hardware to plan for; None for this machine, or for the snapshot `machine_name`.
    machine_name: the name of a snapshot or a given machine; "": this machine.
    cluster: the nodes to plan for, of which `machine` is one; None: there is one machine.
    promised_bytes: bytes promised to engines that run or start, by GPU UUID.
    answers: the answers of engine versions about this model.
    pins: digests by image name.
    include_uninstalled: the decision also shows engines that cannot be started here, and, without a
        plan, the forms of the model that would fit.
    needs_weights: a model whose weights are not here is an error.
    include_files: the result has the files that engines are asked with.
    key_classes: how many classes of priority the keys of callers have.
    """

    wish: Wish
    machine: Hardware | None = None
    machine_name: str = ""
    promised_bytes: Mapping[str, int] = field(default_factory=dict)
    answers: tuple[tuple[Question, EngineAnswer], ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    sharing: Sharing = NO_SHARING
    running: RunningPlan | None = None
    include_uninstalled: bool = False
    needs_weights: bool = True
    include_files: bool = False
    cluster: Cluster | None = None
    key_classes: int = 1


class PlanResult(NamedTuple):
    """A decision as a gateway keeps it.

    plan: the best plan; None if there is none, and `reason` says why.
    decision: JSON of the whole decision, up to megabytes, which the gateway only passes on.
    questions: the questions to engines whose answers could change the decision.
    gaps: contradictions between answers and rules.
    rival: a better plan than the running one.
    commits: the commits of all repositories that were read, in the form of `Wish.commits`.
    needed_offers: offers of other models that the plan needs.
    learned: the facts learned from the traffic of the running plan.
    unconfirmed_repos: repositories read from the cache because the Hub did not answer.
    template: chat template for the engine; "": the model's own.
    config, tensor_headers, quant_files: files for questions to engines; empty unless requested.
    inquiry: the outcome of questions to engines.
    """

    plan: Plan | None
    reason: str
    decision: bytes = b"null"
    questions: tuple[OpenQuestions, ...] = ()
    gaps: tuple[RuleGap, ...] = ()
    rival: Rival | None = None
    commits: Mapping[str, str] = {}
    needed_offers: tuple[Offer, ...] = ()
    learned: tuple[Fact, ...] = ()
    unconfirmed_repos: tuple[str, ...] = ()
    template: str = ""
    config: bytes = b""
    tensor_headers: bytes = b""
    quant_files: bytes = b""
    inquiry: InquiryResult = InquiryResult({}, {}, {})

    @property
    def engines_to_ask(self) -> tuple[str, ...]:
        """The engines of `questions`, by name."""
        return tuple(str(questions.engine) for questions in self.questions)
