"""The ledger of the kill storm finds a made-up loss, orphan and twin, so its zeros can fail."""

from __future__ import annotations

from tests.e2e.ledger import Entry, KeyOrder, Ledger, LiveModel, ModelOrder, Order, strays

MODEL: Entry = ("models", "m")
KEY: Entry = ("keys", "k")


def ledger_of_two() -> Ledger:
    """A ledger with an acknowledged model and key."""
    ledger = Ledger()
    ledger.begin(MODEL, ModelOrder(512))
    ledger.acknowledge(MODEL)
    ledger.begin(KEY, KeyOrder())
    ledger.acknowledge(KEY)
    return ledger


def test_a_state_that_agrees_with_its_orders_is_not_a_loss() -> None:
    state: dict[Entry, list[Order]] = {MODEL: [ModelOrder(512)], KEY: [KeyOrder()]}
    assert ledger_of_two().losses(state) == []
    assert ledger_of_two().count == 2


def test_a_lost_addition_is_counted() -> None:
    assert len(ledger_of_two().losses({MODEL: [ModelOrder(512)]})) == 1
    assert len(ledger_of_two().losses({})) == 2


def test_a_lost_value_and_a_lost_stop_are_counted() -> None:
    ledger, key = ledger_of_two(), {KEY: [KeyOrder()]}
    assert ledger.losses({MODEL: [ModelOrder(256)], **key})
    ledger.begin(MODEL, ModelOrder(512, stopped=True))
    ledger.acknowledge(MODEL)
    assert ledger.losses({MODEL: [ModelOrder(512)], **key})
    assert not ledger.losses({MODEL: [ModelOrder(512, stopped=True)], **key})


def test_a_lost_removal_is_counted() -> None:
    ledger = ledger_of_two()
    ledger.begin(KEY, None)
    ledger.acknowledge(KEY)
    assert ledger.losses({MODEL: [ModelOrder(512)], KEY: [KeyOrder()]})
    # So is an entry that nobody asked for.
    assert Ledger().losses({KEY: [KeyOrder()]})


def test_a_change_without_an_answer_may_have_happened_or_not() -> None:
    ledger, key = ledger_of_two(), {KEY: [KeyOrder()]}
    ledger.begin(MODEL, None)
    assert ledger.is_unsure(MODEL)
    assert not ledger.losses({MODEL: [ModelOrder(512)], **key})
    assert not ledger.losses(key)
    assert ledger.losses({MODEL: [ModelOrder(256)], **key})
    ledger.settle(key)
    assert not ledger.is_unsure(MODEL)
    assert ledger.losses({MODEL: [ModelOrder(512)], **key})


def test_a_refusal_changes_nothing_and_a_contradicting_one_is_kept() -> None:
    ledger = ledger_of_two()
    ledger.begin(KEY, None)
    ledger.refuse(KEY, "404")
    assert ledger.denials == ["k: 404"]
    assert ledger.order(KEY) == KeyOrder()
    assert ledger.changes(KEY) == 2


def test_engines_of_live_attempts_are_no_strays() -> None:
    stray_engines = strays({"m-1": [10]}, [LiveModel(frozenset({"m-1"}), 1)])
    assert stray_engines == (frozenset(), frozenset())
    changing = LiveModel(frozenset({"m-1", "m-2"}), 2)
    assert strays({"m-1": [10], "m-2": [11]}, [changing]) == (frozenset(), frozenset())


def test_an_orphan_is_counted() -> None:
    assert strays({"m-1": [10]}, []).orphans == {"m-1"}


def test_twins_are_counted() -> None:
    model = LiveModel(frozenset({"m-1", "m-2"}), 1)
    assert strays({"m-1": [10], "m-2": [11]}, [model]).twins == {"m-1", "m-2"}
    # A second family of processes of the same instance is a twin too.
    assert strays({"m-1": [10, 11]}, [model]).twins == {"m-1"}
