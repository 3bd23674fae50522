"""`fitserve fits` on five machines, beside the models of experienced users
(tests/hub/users.yaml)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from gateway.models.catalog.hub import Hub
from gateway.models.families.registry import build_blueprint
from gateway.planner.service import model_finder
from gateway.planner.service.model_finder import (
    JudgedModel,
    ModelFinder,
    ModelSearch,
    find_models,
    fitting_parameters,
)
from gateway.planner.service.offline import OfflinePlanner
from gateway.profiles.profiles import Profiles
from tests.support.paths import HUB, ROOT
from tests.support.public_hub import catalog, config_of, public_hub
from tests.support.yaml_file import read_yaml

FIRST = 5
AGREEMENT = 0.9
COLUMNS = 7
STRUCTURES = ROOT / "gateway" / "models" / "structures"


class Pair(NamedTuple):
    """The models that users of a machine run. bits: of most weights."""

    machine: str
    use: Any
    model: str
    bits: int
    source: str
    fact: str


USERS = read_yaml(HUB / "users.yaml")
PAIRS = [Pair(str(pair[0]), *pair[1:]) for pair in USERS["pairs"]]


@pytest.fixture(scope="module")
def suggestions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """By machine and use: the base models that fit, in the order of suggestions."""
    with pytest.MonkeyPatch.context() as patch, public_hub() as hub:
        patch.setattr(model_finder, "_LIMIT_S", 600.0)
        client = Hub(hub.url(), None, tmp_path_factory.mktemp("notes"))
        planner = OfflinePlanner(Profiles(), client)
        return {
            (machine, use): bases(suggest(planner, machine, use))
            for machine, use in sorted({(pair.machine, pair.use) for pair in PAIRS})
        }


def suggest(planner: OfflinePlanner, machine: str, use: Any) -> list[JudgedModel]:
    """As `fitserve fits --for USE --hardware MACHINE`."""
    hardware = planner.machine(machine)
    search = ModelSearch("", use, 30, (), fitting_parameters(hardware[1], use))
    models, problem = find_models(planner.hub, search)
    assert problem == ""
    return ModelFinder(planner, hardware, use).judge(models, sorts_by_size=True)


def bases(judged: list[JudgedModel]) -> list[str]:
    return list(dict.fromkeys(model.base for model in judged if model.fits))


def test_the_first_suggestions_are_popular_models(
    suggestions: dict[tuple[str, str], list[str]],
) -> None:
    missing_pairs = [
        pair for pair in PAIRS if pair.model not in suggestions[pair.machine, pair.use][:FIRST]
    ]
    assert len(PAIRS) >= 40
    assert len({pair.machine for pair in PAIRS}) == 5
    assert len(missing_pairs) <= (1 - AGREEMENT) * len(PAIRS), missing_pairs


def test_every_pair_has_a_source_and_a_model_of_the_catalog() -> None:
    names = {row["name"] for row in catalog()}
    for pair in PAIRS:
        assert pair.source in USERS["sources"], pair
        assert pair.model in names, pair


def test_the_shapes_of_their_models_have_the_published_parameters() -> None:
    rows = {row["name"]: row for row in catalog()}
    for name in sorted({pair.model for pair in PAIRS}):
        config = config_of(rows[name])
        structure = STRUCTURES / f"{config['architectures'][0]}.json"
        text = structure.read_text() if structure.exists() else ""
        plan = build_blueprint(config, name, (), text)
        parameter_count = sum(
            len(item.numbers) * max(1, item.experts) * (item.k + item.bias) * sum(item.parts)
            for item in plan.linears
        ) + sum(group.count * math.prod(group.shape) for group in plan.parameters)
        assert parameter_count == pytest.approx(int(rows[name]["parameters"]), rel=0.1), name


def test_the_page_has_every_pair_and_source() -> None:
    page = (ROOT / "benchmarks" / "notebook" / "fits.md").read_text()
    assert all(USERS["sources"][pair.source] in page for pair in PAIRS)
    rows = [line for line in page.splitlines() if line.count("|") == COLUMNS + 1]
    table_rows = [
        f"| {pair.use} | {pair.model.partition('/')[2]} | {pair.bits} |" for pair in PAIRS
    ]
    assert all(any(cells in line for line in rows) for cells in table_rows)


def test_the_catalog_has_many_wrong_candidates() -> None:
    rows = catalog()
    assert len(rows) > 8 * len({pair.model for pair in PAIRS})
    assert sum(row["form"] in ("gguf", "mlx") for row in rows) > 15
    assert sum(row["chat"] == "0" for row in rows) > 30
    assert sum(int(row["parameters"]) > 600e9 for row in rows) > 10
    assert sum(row["created"] < "2025" for row in rows) > 80
