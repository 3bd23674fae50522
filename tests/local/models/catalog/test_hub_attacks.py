"""A hostile Hub over real sockets: its files neither leave the folder, nor fill memory or disk, nor
learn the token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import BadModel
from gateway.models.catalog import hub as hub_module
from gateway.models.catalog.catalog import load
from gateway.models.catalog.download import download
from gateway.models.catalog.hub import Hub
from gateway.secret import Secret
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import model, safetensors

pytestmark = pytest.mark.anyio

TOKEN = "hf_secret_of_the_test"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub({"org/name": FakeRepo(model())}) as hub:
        yield hub


def hub_of(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.url(), Secret(TOKEN), tmp_path / "cache", models=tmp_path / "models")


def plan_refusal(server: FakeHub, tmp_path: Path, revision: str | None = None) -> BadModel:
    with pytest.raises(BadModel) as error:
        load("org/name", revision=revision, hub=hub_of(server, tmp_path))
    return told_refusal(error.value)


async def fetch_refusal(server: FakeHub, tmp_path: Path) -> BadModel:
    with pytest.raises(BadModel) as error:
        await download(hub_of(server, tmp_path), "org/name", COMMIT, lambda _: None)
    return told_refusal(error.value)


def told_refusal(error: BadModel) -> BadModel:
    assert error.hint, "every error says what to do"
    assert TOKEN not in str(error)
    return error


def outside_files(tmp_path: Path) -> set[str]:
    """Files below the test's folder, but for the library's own of each download."""
    texts = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    return {name for name in texts if ".cache" not in name and not name.endswith(".lock")}


STRANGE = [
    "../evil.json",
    "..",
    ".",
    "a/../../evil.json",
    "a/./b.json",
    "/etc/evil.json",
    "a//b.json",
    "a/",
    "",
    "..\\evil.json",
    "evil\0.json",
    "evil\ud800.json",
    "a" * 2000,
]


@pytest.mark.parametrize("path", STRANGE, ids=[repr(path)[:20] for path in STRANGE])
async def test_a_listing_with_a_path_out_of_the_folder_is_refused_whole(
    server: FakeHub, tmp_path: Path, path: str
) -> None:
    server.repos["org/name"].files[path] = b"{}"
    for error in (plan_refusal(server, tmp_path), await fetch_refusal(server, tmp_path)):
        assert "can leave the repository's folder" in error.message
    assert outside_files(tmp_path) == set()
    assert {request.path.partition("/resolve/")[1] for request in server.requests} == {""}, (
        "no file was asked for"
    )


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "..", "other/model.safetensors"]
)
async def test_an_index_cannot_name_a_file_that_is_not_listed(
    server: FakeHub, tmp_path: Path, shard: str
) -> None:
    (tmp_path / "secret.safetensors").write_bytes(safetensors({"a": (1,)}))
    server.repos["org/name"].files[INDEX] = json.dumps({"weight_map": {"a": shard}}).encode()
    for error in (plan_refusal(server, tmp_path), await fetch_refusal(server, tmp_path)):
        assert "is missing" in error.message


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"sha": 5, "siblings": []}',
        b'{"sha": "main", "siblings": []}',
        json.dumps({"sha": COMMIT}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [5]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": ["a"], "size": 1}]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": True}]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": -1}]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": "5"}]}).encode(),
        json.dumps(
            {
                "sha": COMMIT,
                "siblings": [{"rfilename": f"{n}.json", "size": 1} for n in range(100_001)],
            }
        ).encode(),
    ],
    ids=[
        "empty",
        "null",
        "deep",
        "number",
        "branch",
        "no files",
        "no file",
        "no name",
        "bool",
        "negative",
        "words",
        "many",
    ],
)
def test_a_listing_that_is_none_is_refused(server: FakeHub, tmp_path: Path, listing: bytes) -> None:
    server.listing = listing or b" "
    assert "does not answer as a Hugging Face Hub does" in plan_refusal(server, tmp_path).message


def test_a_listing_without_end_is_given_up(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "LISTING_BYTES", 2**20)
    server.endless.add("listing")
    assert "does not answer as a Hugging Face Hub does" in plan_refusal(server, tmp_path).message
    # Bytes that fill the sockets' buffers are sent.
    assert server.sent_bytes() < 32 * 2**20


def test_another_commit_than_the_requested_one_is_refused(server: FakeHub, tmp_path: Path) -> None:
    server.repos["org/name"].listed_commit = "f" * 40
    assert f"instead of {COMMIT}" in plan_refusal(server, tmp_path, COMMIT).message


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("sent", ["nothing", "less", "more", "no end"])
def test_a_small_file_of_another_size_than_listed_is_refused_and_not_kept(
    server: FakeHub, tmp_path: Path, name: str, sent: str
) -> None:
    files = server.repos["org/name"].files
    files.setdefault(name, json.dumps({"weight_map": {"a": "model.safetensors"}}).encode())
    short = {
        "nothing": b"",
        "less": files[name][:-1],
        "more": files[name] + b" ",
        "no end": files[name],
    }
    server.repos["org/name"].served[name] = short[sent]
    if sent == "no end":
        server.endless.add(name)
    message = plan_refusal(server, tmp_path).message
    assert f"lists org/name/{name} with {len(files[name])} bytes and sends" in message
    assert server.sent_bytes() < 32 * 2**20
    assert not any(path.endswith(name) for path in outside_files(tmp_path))


def test_a_copy_in_the_cache_of_another_size_is_fetched_again(
    server: FakeHub, tmp_path: Path
) -> None:
    hub = hub_of(server, tmp_path)
    spec = load("org/name", hub=hub)
    (config_file,) = (tmp_path / "cache").rglob("config.json")
    config_file.write_bytes(b'{"cut": ')
    assert load("org/name", hub=hub) == spec
    assert len(server.gets("config.json")) == 2


@pytest.mark.parametrize("listed", [0, 7, 8, 2**62])
def test_weights_of_another_size_than_listed_are_not_planned(
    server: FakeHub, tmp_path: Path, listed: int
) -> None:
    server.repos["org/name"].sizes["model.safetensors"] = listed
    assert "is not a complete safetensors file" in plan_refusal(server, tmp_path).message


def test_a_header_without_end_is_read_as_far_as_it_says(server: FakeHub, tmp_path: Path) -> None:
    server.endless.add("model.safetensors")
    server.ignores_range = True
    load("org/name", hub=hub_of(server, tmp_path))
    assert server.sent_bytes() < 32 * 2**20


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "//", "gopher://127.0.0.1/", "http://[", "itself"]
)
def test_a_redirect_to_nowhere_is_an_error_that_names_the_hub(
    server: FakeHub, tmp_path: Path, name: str, target: str
) -> None:
    server.redirects[name] = (
        target if target != "itself" else f"{server.url()}/org/name/resolve/{COMMIT}/{name}"
    )
    assert (
        f"The Hugging Face Hub at {server.url()} cannot be reached, or the connection broke"
        in plan_refusal(server, tmp_path).message
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_redirect_elsewhere_takes_no_token_along(
    server: FakeHub, tmp_path: Path, name: str
) -> None:
    server.redirects[name] = f"{server.url('cdn')}/org/name/resolve/{COMMIT}/other-{name}"
    server.repos["org/name"].files[f"other-{name}"] = server.repos["org/name"].files[name]
    load("org/name", hub=hub_of(server, tmp_path))
    foreign_tokens: list[Any] = [
        request.token for request in server.requests if request.server == "cdn"
    ]
    assert foreign_tokens
    assert set(foreign_tokens) == {None}
