"""Models that a search of the Hub finds, judged by the planner for a machine."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Decision, ModelSpec, Quant, Wish
from gateway.errors import BadModel, BadRequest
from gateway.models.catalog.hub import Hub
from gateway.models.catalog.hub_search import FoundModel
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
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.found_models import (
    REPOS,
    ROWS,
    row,
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(REPOS) as fake:
        fake.listed = ROWS
        fake.variants = {name: [] for name in REPOS} | {
            "qwen/large-30b": [{"id": "other/large-30b-awq", "tags": []}]
        }
        yield fake


def judge_all(
    fake: FakeHub, notes: Path, words: str = "", use: Any = None, machine: str = "3090"
) -> list[JudgedModel]:
    client = Hub(fake.url(), None, notes)
    planner = OfflinePlanner(Profiles(), client)
    models, problem = find_models(client, ModelSearch(words, use, 20))
    assert problem == ""
    finder = ModelFinder(planner, planner.machine(machine), use)
    return finder.judge(models, sorts_by_size=not words)


def test_the_most_used_chat_model_that_fits_comes_first_and_is_a_quantized_variant(
    hub: FakeHub, tmp_path: Path
) -> None:
    models = judge_all(hub, tmp_path, use="chat")
    fitting = [model for model in models if model.fits]
    # The order is by size times downloads; the small model leaves most of the machine idle.
    assert [model.name for model in fitting] == [
        "other/large-30b-awq",
        "qwen/plain-8b",
        "qwen/eyes-8b",
        "qwen/small-1b",
    ]
    first = fitting[0]
    assert (first.base, first.form, first.gpus) == ("qwen/large-30b", "awq", 1)
    planner = OfflinePlanner(Profiles(), Hub(hub.url(), None, tmp_path))
    plan = planner.decide(model_finder._wish_for(first), "3090").plans[0]  # type: ignore[arg-type]
    assert plan.speed is not None
    assert (first.context, first.tokens_s, first.engine) == (
        plan.max_model_len.value,
        plan.speed.stream.value,
        str(plan.engine),
    )
    reasons = {model.name: model.why for model in models if not model.fits}
    assert set(reasons) == {"qwen/large-30b", "org/huge"}
    assert all("GiB" in why for why in reasons.values())


def test_the_weights_as_they_are_come_before_the_variant_on_a_larger_machine(
    hub: FakeHub, tmp_path: Path
) -> None:
    names = [model.name for model in judge_all(hub, tmp_path, use="chat", machine="8xh200")]
    assert names[0] == "org/huge"
    assert names.index("qwen/large-30b") + 1 == names.index("other/large-30b-awq")


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (
            "code",
            {
                "org/huge",
                "other/large-30b-awq",
                "qwen/eyes-8b",
                "qwen/large-30b",
                "qwen/plain-8b",
                "qwen/small-1b",
            },
        ),
        ("vision", {"qwen/eyes-8b"}),
        ("embed", {"qwen/vectors"}),
    ],
)
def test_each_use_has_models_that_can_do_it(
    hub: FakeHub, tmp_path: Path, use: str, names: set[str]
) -> None:
    assert {model.name for model in judge_all(hub, tmp_path, use=use)} == names


def test_the_finder_reports_each_read_and_planned_model(hub: FakeHub, tmp_path: Path) -> None:
    client = Hub(hub.url(), None, tmp_path)
    planner = OfflinePlanner(Profiles(), client)
    models, _ = find_models(client, ModelSearch("qwen", None, 20))
    calls: list[tuple[str, int, int]] = []
    finder = ModelFinder(planner, planner.machine("3090"), None, lambda *call: calls.append(call))
    judged = finder.judge(models, sorts_by_size=False)
    reads = [call[1:] for call in calls if call[0] == "reading"]
    plans = [call[1:] for call in calls if call[0] == "planning"]
    assert reads == [(count, len(judged)) for count in range(len(judged) + 1)]
    assert plans == [(count, len(judged)) for count in range(len(judged))]
    assert calls.index(("planning", 0, len(judged))) == len(reads)


def test_a_model_that_the_planner_stumbles_over_leaves_the_others_their_verdicts(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_on = OfflinePlanner.decide_on

    def decide(planner: OfflinePlanner, wish: Wish, *machine: Any) -> Decision:
        if wish.source == "qwen/plain-8b":
            raise ZeroDivisionError
        return decide_on(planner, wish, *machine)

    monkeypatch.setattr(OfflinePlanner, "decide_on", decide)
    models = {model.name: model for model in judge_all(hub, tmp_path, use="chat")}
    assert "ZeroDivisionError" in models["qwen/plain-8b"].why
    assert models["qwen/small-1b"].fits


def make_group(name: str, size: float, **fields: Any) -> list[JudgedModel]:
    return [JudgedModel(name, name, name, size=size, **fields)]


def make_model(name: str, downloads: float, parameters: int = 0, **fields: Any) -> FoundModel:
    return FoundModel(name, name, "", downloads, parameters, **fields)


def order(groups: list[list[JudgedModel]], models: list[FoundModel], use: Any = "chat") -> str:
    return " ".join(group[0].name for group in model_finder._sort_suggestions(groups, models, use))


def test_suggestions_are_ordered_by_the_bytes_that_users_download() -> None:
    groups = [make_group("o/a", 30.0), make_group("o/b", 60.0), make_group("o/c", 120.0)]
    models = [make_model("o/a", 9.0), make_model("o/b", 5.0), make_model("o/c", 1.0)]
    assert order(groups, models) == "o/b o/a o/c"
    # The downloads of a quantized variant count for its base.
    assert order(groups, [*models, FoundModel("q/c", "q/c", "o/c", 4.0)]) == "o/c o/b o/a"
    # Folders of this machine have none.
    assert order(groups, []) == "o/c o/b o/a"


def test_short_older_and_small_models_follow() -> None:
    groups = [
        make_group("o/short", 100.0, is_short=True),
        make_group("o/tiny", 12.0),
        make_group("o/old", 100.0),
        make_group("o/new", 100.0),
    ]
    models = [
        make_model("o/short", 9.0),
        make_model("o/tiny", 99.0, 6, created="2026-01-01"),
        make_model("o/old", 99.0, 1000, created="2025-01-01"),
        make_model("o/new", 1.0, 1001, created="2026-01-01"),
    ]
    assert order(groups, models) == "o/new o/tiny o/old o/short"
    # Embedding models may be small.
    assert order(groups, models, "embed") == "o/tiny o/new o/old o/short"
    # Another owner's model of this size is no later release.
    models[3] = make_model("p/new", 1.0, 1001, created="2026-01-01")
    groups[3] = make_group("p/new", 100.0)
    assert order(groups, models) == "o/old p/new o/tiny o/short"


def test_two_models_made_for_code_lead() -> None:
    groups = [make_group(f"o/{name}", 10.0) for name in ("a", "coder-b", "coder-c", "coder-d")]
    models = [make_model("o/a", 9.0)] + [
        make_model(f"o/coder-{name}", rate, is_for_code=True)
        for name, rate in (("b", 3.0), ("c", 2.0), ("d", 1.0))
    ]
    assert order(groups, models, "code") == "o/coder-b o/coder-c o/a o/coder-d"
    assert order(groups, models) == "o/a o/coder-b o/coder-c o/coder-d"


def test_the_hub_is_asked_for_models_of_the_size_of_the_machine(
    hub: FakeHub, tmp_path: Path
) -> None:
    planner = OfflinePlanner(Profiles(), Hub(hub.url(), None, tmp_path))
    fewest, most = fitting_parameters(planner.machine("3090")[1], "chat")
    assert (fewest, 47e9 < most < 53e9) == (most // 16, True)
    assert fitting_parameters(planner.machine("3090")[1], "embed") == (0, most)
    assert fitting_parameters(planner.machine("cpu")[1], "chat")[1] > 0
    hub.listed = [
        row | {"safetensors": {"total": total}}
        for row, total in zip(ROWS, (10**9, *[8 * 10**9] * 3, 30 * 10**9), strict=False)
    ]
    search = ModelSearch("", "chat", 20, (), (fewest, most))
    names = [model.name for model in find_models(planner.hub, search)[0]]
    assert names[0] == "qwen/large-30b"
    assert "qwen/small-1b" not in names


def test_downloads_of_a_new_repository_are_of_fewer_days(hub: FakeHub, tmp_path: Path) -> None:
    week = (datetime.now(UTC) - timedelta(days=7)).isoformat()
    hub.listed = [row("qwen/small-1b", 700) | {"createdAt": week}, row("qwen/plain-8b", 900)]
    hub.listed.append(row("qwen/base-8b", 900) | {"createdAt": "no date", "downloads": 60})
    models = find_models(Hub(hub.url(), None, tmp_path), ModelSearch("qwen", None, 5))[0]
    assert {model.name: round(model.downloads) for model in models} == {
        "qwen/small-1b": 100,
        "qwen/plain-8b": 30,
        "qwen/base-8b": 2,
    }


def test_words_keep_the_order_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    names = [model.name for model in judge_all(hub, tmp_path, "QWEN 8b")]
    assert names == ["qwen/plain-8b", "qwen/base-8b", "qwen/eyes-8b"]
    assert judge_all(hub, tmp_path, "nothing of this name") == []


def test_the_cache_and_folders_are_searched_without_the_hub(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "mine" / "deep" / "qwen-8b"
    snapshot = cache / "models--qwen--cached-8b" / "snapshots" / COMMIT
    for place in (snapshot, folder):
        place.mkdir(parents=True)
        for name, data in REPOS["qwen/plain-8b"].files.items():
            (place / name).write_bytes(data)
    offline = Hub("http://127.0.0.1:1", None, tmp_path / "notes", models=cache)
    search = ModelSearch("8B qwen", "chat", 20, (tmp_path / "mine",))
    models_of_search, problem = find_models(offline, search)
    assert "127.0.0.1:1 cannot be reached" in problem
    planner = OfflinePlanner(Profiles(), offline)
    models = ModelFinder(planner, planner.machine("3090"), "chat").judge(
        models_of_search, sorts_by_size=False
    )
    assert [(model.name, model.fits) for model in models] == [
        (str(folder), True),
        ("qwen/cached-8b", True),
    ]
    assert find_models(offline, ModelSearch("other", None, 20, (tmp_path / "mine",)))[0] == []


def test_a_model_that_cannot_be_read_is_listed_with_the_reason(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.repos["qwen/gated"] = FakeRepo({"config.json": b"{}"}, gated=True)
    hub.repos["qwen/broken"] = FakeRepo({"config.json": b"{"})
    hub.listed = [row("qwen/gated", 2), row("qwen/broken", 1), row("qwen/gone", 0)]
    hub.variants |= {"qwen/gated": [], "qwen/broken": [], "qwen/gone": []}
    reasons = {model.name: model.why for model in judge_all(hub, tmp_path, "qwen")}
    assert "is gated" in reasons["qwen/gated"]
    assert "config.json" in reasons["qwen/broken"]
    assert "no model repository qwen/gone" in reasons["qwen/gone"]


def test_models_that_are_not_read_in_time_are_said_to_be(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_finder, "_LIMIT_S", 0.0)
    models = judge_all(hub, tmp_path, "plain")
    assert [(model.name, model.why) for model in models] == [
        ("qwen/plain-8b", "It was not read in time.")
    ]


def test_a_hub_that_never_ends_an_answer_does_not_keep_the_command(tmp_path: Path) -> None:
    class SlowPlanner(OfflinePlanner):
        def spec(self, wish: Wish) -> ModelSpec:
            daemons.append(threading.current_thread().daemon)
            raise BadModel("It has no files.")

    daemons: list[bool] = []
    planner = SlowPlanner(Profiles(), Hub("http://127.0.0.1:1", None, tmp_path))
    finder = ModelFinder(planner, planner.machine("3090"), None)
    models = [FoundModel(name, f"/{name}") for name in "abc"]
    assert [model.why for model in finder.judge(models, sorts_by_size=False)] == [
        "It has no files."
    ] * 3
    assert daemons == [True] * 3


@pytest.mark.parametrize("page", [b"<html>", b"{}", b"7", b"[" * 100_000])
def test_a_page_that_is_no_list_is_not_taken_for_an_empty_one(
    hub: FakeHub, tmp_path: Path, page: bytes
) -> None:
    hub.search_answer = page
    models, problem = find_models(Hub(hub.url(), None, tmp_path), ModelSearch("a", None, 5))
    assert (models, "does not answer as a Hugging Face Hub does" in problem) == ([], True)


def test_rows_in_another_form_leave_the_others(hub: FakeHub, tmp_path: Path) -> None:
    hub.search_answer = json.dumps(
        [7, {"id": 7}, {"id": "a/b", "tags": 5}, {"id": "a/c", "tags": [{}, "gguf"]}, {"id": "a/d"}]
    ).encode()
    models, problem = find_models(Hub(hub.url(), None, tmp_path), ModelSearch("a", None, 5))
    assert ([model.name for model in models], problem) == (["a/b", "a/d"], "")


def test_folders_that_no_request_can_name_are_left_out(tmp_path: Path) -> None:
    offline = Hub("http://127.0.0.1:1", None, tmp_path / "notes")
    names = (b"plain", b"bytes-\xff", b"escape-\x1b[31m", b"line\nbreak")
    for name in names:
        folder = Path(os.fsdecode(name))
        (tmp_path / "models" / folder).mkdir(parents=True)
        (tmp_path / "models" / folder / "config.json").write_text("{}")
    models, _ = find_models(offline, ModelSearch("", None, 9, (tmp_path / "models",)))
    assert [Path(model.name).name for model in models] == ["plain"]
    for name in names[1:]:
        start = tmp_path / "models" / os.fsdecode(name)
        with pytest.raises(BadRequest, match="cannot be named in a request"):
            find_models(offline, ModelSearch("", None, 9, (start,)))


def test_a_missing_folder_is_reported_and_many_folders_are_limited(tmp_path: Path) -> None:
    offline = Hub("http://127.0.0.1:1", None, tmp_path / "notes")
    for folder in (tmp_path / "gone", Path("~no-user-of-this-machine/a"), Path("/" + "a" * 5000)):
        with pytest.raises(BadRequest, match="no folder"):
            find_models(offline, ModelSearch("", None, 5, (folder,)))
    for number in range(4):
        (tmp_path / "models" / str(number)).mkdir(parents=True)
        (tmp_path / "models" / str(number) / "config.json").write_text("{}")
    search = ModelSearch("", None, 3, (tmp_path / "models",))
    models, problem = find_models(offline, search)
    assert [Path(model.name).name for model in models] == ["0", "1", "2"]
    assert "cannot be reached" in problem
    omission = "1 model on this machine is left out. Words of a name narrow the search."
    assert problem.endswith(omission)
    assert find_models(offline, search._replace(asks_hub=False)) == (models, omission)
    assert find_models(offline, search._replace(asks_hub=False, limit=4))[1] == ""


@pytest.mark.parametrize(
    ("method", "config", "bits"),
    [
        ("awq", {"bits": 4}, 4),
        ("gptq", {"bits": 8}, 8),
        ("fp8", {"activation_scheme": "dynamic"}, 8),
        ("mxfp4", {}, 4),
        ("modelopt", {"quant_algo": "NVFP4"}, 4),
        ("compressed-tensors", {"config_groups": {"a": {"weights": {"num_bits": 4}}}}, 4),
        ("bitsandbytes", {"load_in_4bit": True}, 4),
        (
            "compressed-tensors",
            {
                "config_groups": {
                    "a": {"input_activations": {"num_bits": 8}, "weights": {"num_bits": 4}}
                },
                "kv_cache_scheme": {"num_bits": 8},
            },
            4,
        ),
    ],
)
def test_bits_of_weights_are_read_from_the_block(
    method: str, config: dict[str, Any], bits: int
) -> None:
    assert model_finder._bits(Quant(method=method, config=config)) == bits
    assert model_finder._bits(None) == 16
