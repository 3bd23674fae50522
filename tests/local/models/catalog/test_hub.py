"""gateway.models.catalog.hub and the catalog on it: repositories are planned from a few small
reads, and every refusal says what to do."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import BadModel
from gateway.models.catalog.catalog import load
from gateway.models.catalog.hub import Hub
from gateway.secret import Secret
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import layer, model, pack, safetensors, sharded_model

pytestmark = pytest.mark.anyio

TOKEN = "hf_secret_of_the_test"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # A token of the gateway's user is not the gateway's.
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    with FakeHub({"org/name": FakeRepo(model())}) as hub:
        yield hub


def hub_of(server: FakeHub, tmp_path: Path, token: str | None = None) -> Hub:
    return Hub(server.url(), Secret(token) if token else None, tmp_path / "cache")


async def refusal(
    server: FakeHub, tmp_path: Path, *, token: str | None = None, revision: str | None = None
) -> BadModel:
    with pytest.raises(BadModel) as error:
        load("org/name", revision=revision, hub=hub_of(server, tmp_path, token))
    assert error.value.hint, "every error says what to do"
    assert TOKEN not in str(error.value)
    assert error.value.__cause__ is None
    return error.value


async def test_a_repository_is_read_at_the_commit_that_its_branch_names(
    server: FakeHub, tmp_path: Path
) -> None:
    for revision in (None, "main", COMMIT):
        spec = load("org/name", revision=revision, hub=hub_of(server, tmp_path))
        assert (spec.source, spec.revision, spec.tensors_from) == ("org/name", COMMIT, "headers")
        assert spec.file_bytes == len(model()["model.safetensors"])


async def test_the_file_of_a_quantization_is_fetched_with_config_json(
    server: FakeHub, tmp_path: Path
) -> None:
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    server.repos["org/name"].files["hf_quant_config.json"] = json.dumps(file).encode()
    spec = load("org/name", hub=hub_of(server, tmp_path))
    assert spec.quant is not None
    assert spec.quant.file == "hf_quant_config.json"


async def test_planning_reads_headers_and_never_weights(server: FakeHub, tmp_path: Path) -> None:
    # The index does not name the big one.
    server.repos["org/name"].files = sharded_model() | {
        "big.safetensors": safetensors({"a": (8192, 1024)})
    }
    shard = "model-00001-of-00002.safetensors"
    server.repos["org/name"].files[shard] = safetensors(layer(0) | {"bulk": (8192, 1024)})
    spec = load("org/name", hub=hub_of(server, tmp_path))
    assert len(spec.tensors) == 3
    assert server.gets("big.safetensors") == []
    assert [request.range for request in server.gets(shard) if request.server == "cdn"] == [
        "bytes=0-65535"
    ]
    assert server.sent_bytes() < 200_000


async def test_a_mirror_that_ignores_range_is_cut_off_after_the_header(
    server: FakeHub, tmp_path: Path
) -> None:
    server.ignores_range = True
    shapes = {f"tensor.{n}": (1,) for n in range(3000)}
    server.repos["org/name"].files["model.safetensors"] = safetensors(
        shapes | {"bulk": (32 * 1024, 1024)}
    )
    spec = load("org/name", hub=hub_of(server, tmp_path))
    assert sum(group.count for group in spec.tensors) == 3001
    # Bytes that fill the sockets' buffers are sent, the other tens of megabytes are not.
    assert server.sent_bytes() < 32 * 1024 * 1024


async def test_a_second_read_of_the_same_commit_takes_its_config_from_the_cache(
    server: FakeHub, tmp_path: Path
) -> None:
    hub = hub_of(server, tmp_path)
    load("org/name", hub=hub)
    load("org/name", hub=hub)
    assert len(server.gets("config.json")) == 1


async def test_no_token_is_sent_unless_set_and_then_to_the_hub_alone(
    server: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    load("org/name", hub=hub_of(server, tmp_path))
    assert {request.token for request in server.requests} == {None}
    server.requests.clear()
    load("org/name", hub=hub_of(server, tmp_path / "other", TOKEN))
    assert {(request.server, request.token) for request in server.requests} == {
        ("hub", f"Bearer {TOKEN}"),
        ("cdn", None),
    }
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(hub_of(server, tmp_path, TOKEN))


async def test_a_missing_or_private_repository_is_refused(server: FakeHub, tmp_path: Path) -> None:
    server.repos["org/name"].private = True
    error = await refusal(server, tmp_path)
    assert (
        error.message
        == f"There is no model repository org/name at {server.url()}, or it is private."
    )
    assert "FITSERVE_HF_TOKEN" in error.hint
    assert (load("org/name", hub=hub_of(server, tmp_path, TOKEN))).revision == COMMIT


async def test_a_gated_repository_is_refused_with_the_way_to_its_licence(
    server: FakeHub, tmp_path: Path
) -> None:
    server.repos["org/name"].gated = True
    error = await refusal(server, tmp_path)
    assert "is gated" in error.message
    assert (
        error.hint
        == f"Accept it at {server.url()}/org/name and set FITSERVE_HF_TOKEN to a token of that"
        " account."
    )
    assert (load("org/name", hub=hub_of(server, tmp_path, TOKEN))).revision == COMMIT


async def test_a_wrong_token_is_reported(server: FakeHub, tmp_path: Path) -> None:
    error = await refusal(server, tmp_path, token="hf_wrong")
    assert error.message == f"{server.url()} refuses the token in FITSERVE_HF_TOKEN."


async def test_a_missing_revision_is_reported(server: FakeHub, tmp_path: Path) -> None:
    assert (
        await refusal(server, tmp_path, revision="v9")
    ).message == "org/name has no revision v9."


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (403, "refuses access to org/name"),
        (429, "limits the rate of requests"),
        (500, "answered 500 for org/name"),
        (200, "does not answer as a Hugging Face Hub does"),
    ],
)
async def test_a_hub_with_an_unexpected_answer_is_reported(
    server: FakeHub, tmp_path: Path, status: int, says: str
) -> None:
    server.answers = status
    assert says in (await refusal(server, tmp_path)).message


async def test_an_unreachable_hub_is_reported_without_its_password(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(BadModel) as error:
            load(
                "org/name", hub=Hub(f"http://user:{TOKEN}@127.0.0.1:{port}/mirror/", None, tmp_path)
            )
    assert (
        f"The Hugging Face Hub at http://127.0.0.1:{port} cannot be reached" in error.value.message
    )
    assert "give a model folder on this machine" in error.value.hint
    assert TOKEN not in str(error.value)


async def test_a_connection_that_breaks_while_a_header_is_read_is_made_again(
    server: FakeHub, tmp_path: Path
) -> None:
    server.break_off["model.safetensors"] = [0, 0]
    assert (load("org/name", hub=hub_of(server, tmp_path))).tensors_from == "headers"
    server.break_off["model.safetensors"] = [0, 0, 0]
    assert "cannot be reached, or the connection broke" in (await refusal(server, tmp_path)).message


async def test_a_file_that_is_shorter_than_its_listing_says_is_refused(
    server: FakeHub, tmp_path: Path
) -> None:
    server.repos["org/name"].files["model.safetensors"] = pack(
        {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, 4
    )
    assert (
        "org/name/model.safetensors is not a complete safetensors file"
        in (await refusal(server, tmp_path)).message
    )


async def test_a_config_that_is_too_large_is_not_even_fetched(
    server: FakeHub, tmp_path: Path
) -> None:
    server.repos["org/name"].files["config.json"] = b" " * (16 * 1024 * 1024 + 1)
    assert (
        "org/name/config.json has 16777217 bytes, over the limit"
        in (await refusal(server, tmp_path)).message
    )
    assert server.gets("config.json") == []


@pytest.mark.parametrize("repo", ["org/..", "org--x/name", "org/name.git", "-/-"])
async def test_a_name_that_no_repository_has_is_refused_without_asking(
    server: FakeHub, tmp_path: Path, repo: str
) -> None:
    with pytest.raises(BadModel, match="cannot be the name"):
        load(repo, hub=hub_of(server, tmp_path))
    assert server.requests == []


async def test_a_cache_that_cannot_be_written_is_named(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    error = await refusal(server, tmp_path)
    assert str(tmp_path / "cache") in error.message
    assert "cannot be written" in error.message


async def test_repository_code_is_named_never_read_and_needs_a_chosen_commit(
    server: FakeHub, tmp_path: Path
) -> None:
    server.repos["org/name"].files["modeling_name.py"] = b""
    hub = hub_of(server, tmp_path)
    assert load("org/name", revision=COMMIT, hub=hub).remote_code == ("modeling_name.py",)
    for revision in (None, "main", COMMIT[:39]):
        server.repos["org/name"].refs = ("main", COMMIT[:39])
        with pytest.raises(BadModel) as error:
            load("org/name", revision=revision, allow_remote_code=True, hub=hub)
        assert "only at a fixed commit" in error.value.message
        assert COMMIT in error.value.hint
    spec = load("org/name", revision=COMMIT, allow_remote_code=True, hub=hub)
    assert spec.remote_code == ("modeling_name.py",)
    assert server.gets("modeling_name.py") == []
