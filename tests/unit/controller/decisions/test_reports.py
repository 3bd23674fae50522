"""Which events lie between two looks at a model."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.controller.decisions.copies import CopyChange
from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.decisions.reports import (
    ReportedMilestones,
    ReportedModel,
    ReportedReplica,
    events_of_model,
    milestone_of_attempt,
    milestone_of_event,
)
from gateway.domain import Abilities, Ability, Attempt, Change, Failure, Offer
from gateway.domain.facts import EVENT_KINDS
from tests.support.makers import plan, wish
from tests.support.paths import ROOT

NOW = 1_000_000.0
OLD = ReportedModel(wish())


def attempt(number: int = 1, **changes: Any) -> Attempt:
    new_plan = plan()
    first_attempt = Attempt(
        id=number,
        model="m",
        replica=0,
        state="starting",
        plan=new_plan,
        fingerprint=new_plan.fingerprint,
        port=1,
        started_at=NOW - 60,
    )
    return first_attempt.evolve(**changes)


def failed_attempt(number: int = 1) -> Attempt:
    failure = Failure(
        kind="kv_too_small", phase="loading", message="too long", line="ValueError: too long"
    )
    return attempt(number, state="failed", ended_at=NOW - 1, failure=failure)


def ready(number: int = 1) -> Attempt:
    return attempt(number, state="ready", ready_at=NOW - 10, abilities=Abilities())


def model(*replicas: ReportedReplica, **changes: Any) -> ReportedModel:
    return ReportedModel(wish(), replicas=replicas, **changes)


def kinds(
    before: ReportedModel | None,
    after: ReportedModel | None,
    milestones: ReportedMilestones | None = None,
) -> list[str]:
    return [
        event.kind
        for event in events_of_model(before, after, milestones or ReportedMilestones(), NOW)
    ]


def test_equal_states_are_reported_as_no_event() -> None:
    reported_milestones = ReportedMilestones()
    now = model(ReportedReplica(0, (failed_attempt(), ready(2)), NoAction("ready"), watched=2))
    assert list(events_of_model(OLD, now, reported_milestones, NOW))
    assert list(events_of_model(now, now, reported_milestones, NOW)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, model(), ["model.added"]),
        (model(is_deleting=True), None, ["model.removed"]),
        # Between two looks it was asked for and done.
        (model(), None, ["model.removing", "model.removed"]),
        (None, None, []),
        (model(), model(is_deleting=True), ["model.removing"]),
        (model(), model(is_stopped=True), ["model.stopped"]),
        (model(is_stopped=True), model(), ["model.started"]),
        (model(), model(forgiven_at=5.0), ["model.retried"]),
        (
            model(ReportedReplica(0)),
            model(ReportedReplica(0, leaving=("idle", "no request for 5m"))),
            ["model.leaving"],
        ),
        (model(), model(copy_change=CopyChange(2, 1, "queue", "it waited")), ["model.copies"]),
        (
            model(copy_change=CopyChange(2, 1, "queue", "it waited")),
            model(copy_change=CopyChange(2, 1, "queue", "it waited")),
            [],
        ),
        (model(), model(state="ready"), ["model.state"]),
        (model(), ReportedModel(wish(min_context=7)), ["model.changed"]),
        # The commits that a plan pinned are not a change that somebody asked for, but they are
        # told.
        (model(), model(endpoints={"http://a": ""}), ["endpoint.reached"]),
        (
            model(endpoints={"http://a": ""}),
            model(endpoints={"http://a": "it does not answer"}),
            ["endpoint.lost"],
        ),
        (model(), model(endpoints={"http://a": "it does not answer"}), []),
    ],
)
def test_a_changed_model_is_reported(
    before: ReportedModel | None, after: ReportedModel | None, expected: list[str]
) -> None:
    assert kinds(before, after) == expected


def test_a_change_is_reported_at_its_beginning_and_when_it_is_given_up() -> None:
    change = Change(wish=wish(min_context=7), generation=1, at=NOW)
    model_in_change = model(change=change)
    model_without_plan = model(change=change.evolve(refusal_text="no plan"))
    (event,) = events_of_model(OLD, model_in_change, ReportedMilestones(), NOW)
    assert event.data == {"differences": [{"field": "min_context", "former": None, "present": "7"}]}
    assert kinds(model_in_change, model_without_plan) == ["model.change_refused"]
    assert kinds(model_without_plan, model_without_plan) == []
    assert kinds(OLD, model_without_plan) == ["model.changing", "model.change_refused"]


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        (ReportedReplica(0, (attempt(),)), ["plan.chosen"]),
        (ReportedReplica(0, (attempt(),), watched=1), ["plan.chosen", "engine.started"]),
        (
            ReportedReplica(0, (ready(),), watched=1),
            ["plan.chosen", "engine.started", "engine.proven", "engine.ready"],
        ),
        (ReportedReplica(0, (failed_attempt(),)), ["plan.chosen", "engine.failed"]),
        (
            ReportedReplica(0, (attempt(state="stopped", ended_at=NOW),)),
            ["plan.chosen", "engine.stopped"],
        ),
        # All that lies between two looks is told, in its order.
        (
            ReportedReplica(0, (failed_attempt(), attempt(2))),
            ["plan.chosen", "engine.failed", "plan.fallback"],
        ),
    ],
)
def test_every_step_of_a_start_is_reported_once(
    replica: ReportedReplica, expected: list[str]
) -> None:
    reported_milestones = ReportedMilestones()
    assert kinds(OLD, model(replica), reported_milestones) == expected
    # Another look, or the same start as another replica has it now: a trial that took its place.
    assert (
        kinds(
            OLD,
            model(ReportedReplica(0, replica.attempts, watched=replica.watched, is_trial=True)),
            reported_milestones,
        )
        == []
    )


def test_abilities_that_an_engine_shows_while_it_serves_are_reported_once() -> None:
    reported_milestones = ReportedMilestones()
    late = Abilities.uniform(Ability(state="proven", evidence="it did"))
    first_model = model(ReportedReplica(0, (ready(),), watched=1))
    second = model(ReportedReplica(0, (ready().evolve(abilities=late),), watched=1))
    assert kinds(OLD, first_model, reported_milestones)[-1] == "engine.ready"
    (event,) = events_of_model(first_model, second, reported_milestones, NOW)
    assert (event.kind, event.attempt) == ("engine.abilities", 1)
    assert event.data == {"abilities": late.model_dump(mode="json")}
    assert kinds(second, second, reported_milestones) == []
    # An engine that another gateway left has told them.
    assert kinds(OLD, second, reported_milestones) == []


def test_the_copy_that_leaves_is_named_among_several() -> None:
    leaves = ReportedReplica(1, leaving=("room", "it makes room for b"))
    (event,) = events_of_model(
        model(ReportedReplica(0), ReportedReplica(1)),
        model(ReportedReplica(0), leaves),
        ReportedMilestones(),
        NOW,
    )
    assert (event.kind, event.replica, event.data["why"]) == ("model.leaving", 1, "room")
    assert event.words == "Copy 2 of m is unloaded: it makes room for b."


def test_a_start_is_reported_from_the_phase_that_was_shown_last() -> None:
    reported_milestones = ReportedMilestones()
    reported_milestones.record(1, milestone_of_event("plan.chosen"))
    assert kinds(OLD, model(ReportedReplica(0, (ready(),), watched=1)), reported_milestones) == [
        "engine.started",
        "engine.proven",
        "engine.ready",
    ]
    reported_milestones = ReportedMilestones()
    reported_milestones.record(1, milestone_of_attempt(ready(), is_watched=True))
    assert kinds(
        OLD,
        model(ReportedReplica(0, (failed_attempt().evolve(ready_at=5.0),))),
        reported_milestones,
    ) == ["engine.failed"]


def test_a_failure_comes_with_its_proof_and_a_fallback_with_its_changes() -> None:
    first, failure, second = events_of_model(
        OLD, model(ReportedReplica(0, (failed_attempt(), attempt(2)))), ReportedMilestones(), NOW
    )
    assert first.data["why"]["max_model_len"] == first.data["why"]["max_model_len"] | {
        "value": plan().max_model_len.value
    }
    assert first.data["why"]["max_model_len"]["reason"]
    assert failure.data["failure"]["line"] == "ValueError: too long"
    assert (failure.at, failure.attempt) == (NOW - 1, 1)
    assert (second.data["after"], second.data["attempt_before"], second.data["differences"]) == (
        "kv_too_small",
        1,
        [],
    )


@pytest.mark.parametrize(
    ("changes", "fields", "reason"),
    [
        ({"is_deleting": True}, {}, "removed"),
        ({}, {"leaving": ("room", "it makes room for b")}, "room"),
        ({}, {"is_trial": True}, "trial"),
        ({}, {}, "replaced"),
    ],
)
def test_an_engine_that_stops_says_why(
    changes: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    reported_milestones = ReportedMilestones()
    reported_milestones.record(1, "ready")
    replica = ReportedReplica(0, (attempt(state="stopped", ended_at=NOW),), **fields)
    events = [
        event
        for event in events_of_model(
            model(**changes), model(replica, **changes), reported_milestones, NOW
        )
        if event.kind == "engine.stopped"
    ]
    assert [event.data["why"] for event in events] == [reason]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("starting", "loading the weights", ["engine.phase"]),
        # Figures that move every second are not news.
        ("compiling kernels: nvcc a.cu", "compiling kernels: nvcc b.cu", []),
        ("planning", "Downloading a/b: 1.0 MiB of 9.0 MiB (11 %)", ["weights.downloading"]),
        (
            "Downloading a/b: 1.0 MiB of 9.0 MiB (11 %)",
            "Downloading a/b: 9.0 MiB of 9.0 MiB (100 %)",
            [],
        ),
        ("Downloading a/b: 1.0 MiB", "Checking a/b: 9.0 MiB", []),
        ("Downloading a/b: 1.0 MiB", "starting the engine", ["weights.downloaded", "engine.phase"]),
        ("starting", "pulling img:v1: 0.1 of 9.0 GiB", ["engine.pulling"]),
        ("pulling img:v1: 0.1 of 9.0 GiB", "unpacking img:v1: 9.0 GiB", []),
    ],
)
def test_phases_are_reported_without_their_figures(
    before: str, after: str, expected: list[str]
) -> None:
    reported_milestones = ReportedMilestones()
    reported_milestones.record(1, "started")
    looks = [
        model(ReportedReplica(0, (attempt(),), phase=phase, watched=1)) for phase in (before, after)
    ]
    assert kinds(looks[0], looks[1], reported_milestones) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NoAction("starting"), NoAction("no_plan", "too large"), ["plan.none"]),
        (NoAction("no_plan", "too large"), NoAction("no_plan", "too large"), []),
        (NoAction("no_plan", "too large"), NoAction("no_plan", "still too large"), ["plan.none"]),
        (NoAction("starting"), NoAction("backing_off", "after oom", NOW + 20), ["engine.retry"]),
        (
            NoAction("backing_off", "after oom", NOW + 20),
            NoAction("backing_off", "after oom", NOW + 20),
            [],
        ),
        (
            NoAction("backing_off", "after oom", NOW + 20),
            NoAction("backing_off", "after oom", NOW + 40),
            ["engine.retry"],
        ),
        (NoAction("starting"), NoAction("quarantined", "5 starts failed"), ["engine.quarantined"]),
        (NoAction("ready"), NoAction("unreachable", "it is stopped"), ["engine.frozen"]),
        (NoAction("unreachable", "it is stopped"), NoAction("ready"), ["engine.answers"]),
        (NoAction("starting"), NoAction("ready"), []),
    ],
)
def test_the_wait_of_a_replica_is_reported(
    before: NoAction, after: NoAction, expected: list[str]
) -> None:
    assert (
        kinds(model(ReportedReplica(0, status=before)), model(ReportedReplica(0, status=after)))
        == expected
    )


def test_the_offers_of_others_are_reported() -> None:
    offer = Offer(model="b", kind="stop", bytes_by_gpu={"GPU-1": 5}, words="b is unloaded")
    waits = model(ReportedReplica(0, awaited_offers=(offer,)))
    (event,) = events_of_model(model(ReportedReplica(0)), waits, ReportedMilestones(), NOW)
    assert (event.kind, event.data) == ("plan.waits", {"takes": ["b is unloaded"]})
    assert kinds(waits, waits) == []


def test_reports_of_ended_starts_are_forgotten_and_those_of_others_are_not() -> None:
    reported_milestones = ReportedMilestones()
    reported_milestones.record(1, "ready")
    for number in range(2, 20_100):
        reported_milestones.record(number, "ended")
    assert reported_milestones.milestone(attempt(1)) == "ready"
    assert reported_milestones.milestone(attempt(20_000)) == "ended"
    assert len(reported_milestones._milestones) <= 20_000


def test_the_page_has_every_kind() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    strip_texts = [
        kind.strip().strip("`") for row in rows for kind in row.split(",") if "." in kind
    ]
    assert strip_texts == list(EVENT_KINDS)


def _events(before: ReportedModel, after: ReportedModel, kind: str) -> list[str]:
    return [
        event.words
        for event in events_of_model(before, after, ReportedMilestones(), NOW)
        if event.kind == kind
    ]


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ("stopped by hand", "m is stopped: stopped by hand"),
        ("stopped: no room", "m is stopped: no room"),
        ("stopped", "m is stopped."),
        ("", "m is stopped."),
    ],
)
def test_no_word_of_a_detail_is_cut_out(detail: str, words: str) -> None:
    ready_model, later_model = model(state="ready"), model(state="stopped", detail=detail)
    assert _events(ready_model, later_model, "model.state") == [words]


def test_a_plan_for_a_cpu_names_the_cpu() -> None:
    start = attempt()
    on_cpu = start.evolve(plan=start.plan.evolve(gpus=()))
    (words,) = _events(model(), model(ReportedReplica(0, (on_cpu,))), "plan.chosen")
    assert " on the CPU, context " in words
