"""Measurements and set-ups of other people in benchmarks/published.yaml and experts.yaml: each is
complete, has a source, and is possible on the cards that it names."""

from __future__ import annotations

import pytest

from gateway.profiles.profiles import Profiles
from tests.support.outside import Choice, Measured, experts, published_figures
from tests.support.paths import MODELS

MEASURED = published_figures()
CHOICES = experts()
CARDS = {card.name: card for card in Profiles().card_table.cards}


def is_shipped(config: str) -> bool:
    """Whether the config is there, as far as that can be seen: aiconfigurator-core is not installed
    with us."""
    where, _, name = config.partition(":")
    return where != "tests" or (MODELS / f"{name}.json").is_file()


def test_figures_cover_both_engines_and_small_and_large_machines() -> None:
    assert sum(len(case.figures) for case in MEASURED) >= 40
    assert {case.engine for case in MEASURED} == {"vllm", "sglang"}
    assert len({case.gpu for case in MEASURED}) >= 10


@pytest.mark.parametrize(
    "measured", MEASURED, ids=lambda case: f"{case.model}-{case.gpu}-{case.count}"
)
def test_the_model_and_the_card_are_known(measured: Measured) -> None:
    assert measured.gpu in CARDS
    assert is_shipped(measured.config)


def test_each_published_figure_is_listed_once() -> None:
    rows = [
        case.model_copy(update={"figures": (figure,), "note": ""})
        for case in MEASURED
        for figure in case.figures
    ]
    assert len(rows) == len({row.model_dump_json() for row in rows})


def test_throughput_follows_from_the_time_per_token() -> None:
    """Requests at once, each a token in its time: more cannot come, but for means that short
    answers bend."""
    for case in MEASURED:
        for figure in case.figures:
            if figure.output_tokens_s and figure.tpot_ms:
                assert figure.output_tokens_s <= 1.3 * figure.concurrency * 1000 / figure.tpot_ms, (
                    case.model,
                    case.gpu,
                    figure,
                )


def test_published_choices_cover_small_and_large_machines() -> None:
    assert len(CHOICES) >= 60
    assert len({(choice.machine, choice.model) for choice in CHOICES}) == len(CHOICES)
    assert len({choice.machine for choice in CHOICES}) >= 20


@pytest.mark.parametrize("choice", CHOICES, ids=lambda case: f"{case.machine}-{case.model}")
def test_a_choice_is_of_a_machine_that_has_the_gpus(choice: Choice) -> None:
    assert is_shipped(choice.config)
    cards = Profiles().hardware(choice.machine).gpus
    assert all(setting.gpus <= len(cards) for setting in choice.accepted)
    assert len(set(choice.accepted)) == len(choice.accepted)
