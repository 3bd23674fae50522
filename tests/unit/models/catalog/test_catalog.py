"""gateway.models.catalog.catalog: a model folder read into a ModelSpec, and the errors of a folder
that cannot be read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.domain import ModelSpec
from gateway.errors import BadModel, NeedsRemoteCode
from gateway.models.catalog.catalog import (
    CheckpointFiles,
    build_spec,
    check_weights,
    gather,
    load,
    load_drafter,
)
from gateway.models.catalog.hub import Hub
from gateway.models.tensor import Tensor
from tests.support.examples import quicker
from tests.support.model_files import (
    CONFIG,
    experts,
    layer,
    model,
    safetensors,
    sharded_model,
    write,
)

# Folders need no Hub: one that would be asked answers nothing.
NO_HUB = Hub("http://127.0.0.1:9", None, Path("/nonexistent"))


def facts(source: str | Path, *, allow_remote_code: bool = False) -> CheckpointFiles:
    return gather(str(source), None, allow_remote_code=allow_remote_code, hub=NO_HUB)


def read_or_refusal(source: Path) -> CheckpointFiles | BadModel:
    try:
        return facts(source)
    except BadModel as error:
        return error


def refusal(source: str | Path) -> BadModel:
    with pytest.raises(BadModel) as error:
        facts(source)
    assert error.value.hint, "every error says what to do"
    return error.value


@pytest.mark.anyio
async def test_a_folder_becomes_a_spec_with_the_resolved_path_as_its_source(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", model())
    (tmp_path / "link").symlink_to(folder)
    spec = load(str(tmp_path / "link"), hub=NO_HUB)
    assert isinstance(spec, ModelSpec)
    assert (spec.source, spec.revision, spec.tensors_from) == (
        str(folder.resolve()),
        None,
        "headers",
    )
    assert spec.file_bytes == len(model()["model.safetensors"])
    assert {(group.name, group.count, group.shape) for group in spec.tensors} == {
        ("model.embed_tokens.weight", 1, (256, 64)),
        ("model.layers.*.mlp.up_proj.weight", 2, (128, 64)),
        ("model.layers.*.mlp.down_proj.weight", 2, (64, 128)),
    }


def test_a_folder_may_be_written_in_several_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "org" / "name", model())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (
        folder,
        "./org/name",
        "../" + tmp_path.name + "/org/name",
        "~/org/name",
        "org/name",
    ):
        assert facts(source).source == str(folder.resolve())


@pytest.mark.parametrize(
    "source",
    [
        "",
        "llama",
        "a/b/c",
        "https://hub/a/b",
        "a b/c",
        "org/näme",
        "org/name\n",
        "\0",
        "x" * 5000,
        "\ud800",
    ],
)
def test_a_source_that_is_neither_folder_nor_repository_is_answered_with_both_forms(
    source: str,
) -> None:
    error = refusal(source)
    assert "neither a model folder nor a Hugging Face repository" in error.message
    both_forms = "A folder begins with /, ./, ../ or ~; a repository is written org/name."
    assert error.hint.startswith(both_forms)
    assert ("qwen3:8b is Qwen/Qwen3-8B" in error.hint) == (source == "llama")
    str(error).encode()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nonexistent/model", "There is no folder /nonexistent/model."),
        ("~nobody-of-this-name/x", "is not a path"),
        ("/a\0b", "is not a path"),
        ("/\ud800", "is not a path"),
        ("/" + "x" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_is_named(source: str, words: str) -> None:
    assert words in str(refusal(source))
    str(refusal(source)).encode()


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert "is not a folder" in refusal(tmp_path / "model.gguf").message
    (tmp_path / "models.yaml").touch()
    assert "fitserve apply" in refusal(tmp_path / "models.yaml").hint


def test_shards_are_those_of_the_index_and_other_files_are_ignored(tmp_path: Path) -> None:
    files = sharded_model()
    read_facts = facts(write(tmp_path, files))
    assert read_facts.tensors == {
        name: Tensor("BF16", shape) for n in (0, 1) for name, shape in layer(n).items()
    }
    assert read_facts.file_bytes == sum(
        len(data) for name, data in files.items() if name.startswith("model-")
    )


def test_model_safetensors_counts_alone_without_an_index_else_all_files_together(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        {
            "config.json": json.dumps(CONFIG).encode(),
            "a.safetensors": safetensors(layer(0)),
            "b.safetensors": safetensors(layer(1)),
        },
    )
    assert facts(tmp_path).tensors is not None
    assert len(facts(tmp_path).tensors or ()) == 4
    write(tmp_path, {"model.safetensors": safetensors(layer(0))})
    assert (facts(tmp_path).tensors or {}).keys() == layer(0).keys()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, sharded_model())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert (
        f"{tmp_path}/model-00002-of-00002.safetensors is missing, 1 of the 2 shards that"
        in refusal(tmp_path).message
    )


def test_missing_shards_are_reported_without_an_index_too(tmp_path: Path) -> None:
    names = [f"model-{number:05d}-of-00007.safetensors" for number in range(1, 8)]
    write(
        tmp_path,
        {
            "config.json": json.dumps(CONFIG).encode(),
            names[1]: safetensors(layer(0)),
            names[2]: safetensors(layer(1)),
        },
    )
    message = refusal(tmp_path).message
    assert message.startswith(
        f"{tmp_path}/{names[0]}, {tmp_path}/{names[3]}, {tmp_path}/{names[4]} and 2 more are"
        " missing, 5 of the 7"
    )
    for number, name in enumerate(names):
        write(tmp_path, {name: safetensors(layer(number))})
    assert len(facts(tmp_path).tensors or ()) == 14


@pytest.mark.parametrize(
    ("load_format", "needs_weights"),
    [("", True), ("auto", True), ("safetensors", True), ("dummy", False), ("tensorizer", False)],
)
def test_a_model_without_weights_is_started_only_where_its_engine_reads_none_here(
    tmp_path: Path, load_format: str, needs_weights: bool
) -> None:
    write(tmp_path, {"config.json": json.dumps(CONFIG).encode()})
    without = build_spec(facts(tmp_path))
    if needs_weights:
        with pytest.raises(BadModel, match=f"There are no weights in {tmp_path}") as error:
            check_weights(without, load_format)
        assert "load-format=dummy" in error.value.hint
    else:
        check_weights(without, load_format)
    write(tmp_path, model())
    check_weights(build_spec(facts(tmp_path)), load_format)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path, model() | {"../outside.safetensors": safetensors(layer(0))})
    write(
        tmp_path,
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../outside.safetensors"}}'},
    )
    assert "is missing" in refusal(tmp_path).message


@pytest.mark.parametrize("index", [b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: bytes) -> None:
    assert (
        "has no weight_map"
        in refusal(write(tmp_path, model() | {"model.safetensors.index.json": index})).message
    )


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "a.safetensors": safetensors(layer(0)),
        "b.safetensors": safetensors(layer(0)),
    }
    error = refusal(write(tmp_path, files))
    assert (
        f"{tmp_path}/b.safetensors has tensor model.layers.0.mlp.down_proj.weight, and another"
        " file has it too" in error.message
    )


def test_a_truncated_shard_is_named_with_its_full_size(tmp_path: Path) -> None:
    write(tmp_path, model())
    os.truncate(tmp_path / "model.safetensors", 70_000)
    message = refusal(tmp_path).message
    assert f"{tmp_path}/model.safetensors is not a complete safetensors file" in message
    assert "describes 98304 bytes of weights" in message


def test_a_model_without_weights_is_read_from_its_config(tmp_path: Path) -> None:
    read_facts = facts(write(tmp_path, {"config.json": json.dumps(CONFIG).encode()}))
    assert (read_facts.tensors, read_facts.file_bytes, read_facts.config) == (None, None, CONFIG)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "model-Q4_K_M.gguf"]
)
def test_weights_in_another_format_are_to_be_converted(tmp_path: Path, name: str) -> None:
    error = refusal(write(tmp_path, {name: b""}))
    assert name in error.message
    assert "Convert them to safetensors" in error.hint


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b'{\n  "a": 1,\n  "b" 2}', "in line 3, column 7"),
        (b"", "in line 1, column 1"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"[" * 100_000, "uses JSON features that are not supported"),
        (b'{"a": ' + b"9" * 5000 + b"}", "uses JSON features that are not supported"),
        (b'{"model_type": "\\ud800"}', "uses JSON features that are not supported"),
        (b"[1]", "is not a JSON object"),
        (b" " * (16 * 1024 * 1024 + 1), "over the limit of 16777216"),
    ],
)
def test_a_config_that_cannot_be_read_is_named_with_the_place(
    tmp_path: Path, config: bytes, words: str
) -> None:
    message = refusal(write(tmp_path, model() | {"config.json": config})).message
    assert words in message
    assert f"{tmp_path}/config.json" in message


def test_a_config_with_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    config = json.dumps(CONFIG | {"time_step_limit": [0.0, float("inf")]}).encode()
    assert facts(write(tmp_path, model() | {"config.json": config})).config["time_step_limit"] == [
        0.0,
        float("inf"),
    ]


def test_no_config_is_refused(tmp_path: Path) -> None:
    assert f"There is no {tmp_path}/config.json" in refusal(tmp_path).message


@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "dangle"])
def test_a_config_that_is_no_file_is_refused_at_once(tmp_path: Path, make: str) -> None:
    path = tmp_path / "config.json"
    if make == "mkdir":
        path.mkdir()
    elif make == "mkfifo":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    reason = {
        "mkdir": "is not a file",
        "mkfifo": "is not a file",
        "dangle": "cannot be read: No such file or directory",
    }[make]
    assert refusal(tmp_path).message == f"{path} {reason}."


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    assert len(facts(hub_snapshot(tmp_path)).tensors or ()) == 5


def hub_snapshot(cache: Path) -> Path:
    """A model as the library of the Hub keeps it."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    write(repository / "blobs", model())
    for name in model():
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


@pytest.mark.parametrize("name", model())
@pytest.mark.parametrize("layout", ["a folder", "a snapshot", "snapshots of nobody"])
def test_a_file_that_is_a_link_out_of_the_model_is_not_read(
    tmp_path: Path, name: str, layout: str
) -> None:
    other_folder = write(tmp_path / "elsewhere", model())
    folder = tmp_path / "snapshots" / "name"
    if layout == "a snapshot":
        folder = hub_snapshot(tmp_path)
    elif layout == "a folder":
        folder = tmp_path / "model"
    write(
        folder,
        (
            {file_name: data for file_name, data in model().items() if file_name != name}
            if layout != "a snapshot"
            else {}
        ),
    )
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(other_folder / name)
    assert f"{folder / name} is a link to a file outside of" in refusal(folder).message


@pytest.mark.parametrize(
    ("files", "places"),
    [
        (model(auto_map={"AutoModel": "modeling_x.X"}), ("auto_map in config.json",)),
        (
            model() | {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["t.T", null]}}'},
            ("auto_map in tokenizer_config.json",),
        ),
        (
            model() | {"modeling_x.py": b"", "configuration_x.py": b""},
            ("configuration_x.py", "modeling_x.py"),
        ),
    ],
)
def test_code_of_the_model_is_reported(
    tmp_path: Path, files: dict[str, bytes], places: tuple[str, ...]
) -> None:
    assert facts(write(tmp_path, files)).remote_code == places


def test_code_beside_a_drafter_needs_leave(tmp_path: Path) -> None:
    write(tmp_path, model(auto_map={"AutoModel": "modeling_x.X"}))
    with pytest.raises(NeedsRemoteCode, match=r"auto_map in config\.json") as error:
        load_drafter(str(tmp_path), hub=NO_HUB)
    assert error.value.code == "needs_remote_code"
    assert (
        error.value.hint
        == "Add it with policy.allow_remote_code=true if you trust it, pinned to a commit."
    )


def test_a_tokenizer_config_without_code_needs_no_leave(tmp_path: Path) -> None:
    assert (
        facts(
            write(tmp_path, model() | {"tokenizer_config.json": b'{"model_max_length": 1}'})
        ).remote_code
        == ()
    )


@pytest.mark.parametrize(
    ("files", "architecture", "hint"),
    [
        ({}, "LlamaForCausalLM", None),
        ({}, "BertModel", None),
        ({"modules.json": b"[]"}, "Qwen3ForCausalLM", "embed"),
        ({"config_sentence_transformers.json": b"{}"}, "Qwen3ForCausalLM", "embed"),
        ({"1_Pooling/config.json": b"{}"}, "Qwen3ForCausalLM", "embed"),
    ],
)
def test_an_embedding_model_is_told_by_its_files(
    tmp_path: Path, files: dict[str, bytes], architecture: str, hint: str | None
) -> None:
    assert facts(write(tmp_path, model(architectures=[architecture]) | files)).task_hint == hint


def test_names_that_are_not_unicode_can_be_said(tmp_path: Path) -> None:
    write(tmp_path, model())
    (tmp_path / os.fsdecode(b"\xff.py")).touch()
    assert facts(tmp_path).remote_code == ("\\udcff.py",)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=quicker(60),
)
@given(st.sampled_from(sorted(sharded_model())), st.binary(max_size=200))
def test_random_bytes_in_any_file_are_a_bad_model_if_they_matter(
    tmp_path: Path, name: str, data: bytes
) -> None:
    outcome = read_or_refusal(write(tmp_path, sharded_model() | {name: data}))
    if isinstance(outcome, BadModel):
        assert name in outcome.message
        assert name != "consolidated.safetensors"
    else:
        assert outcome.tensors


_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=quicker(100),
)
@given(
    st.dictionaries(
        st.sampled_from([*CONFIG, "auto_map", "quantization_config"]), _VALUES, max_size=4
    )
)
def test_any_json_object_as_config_gives_facts_or_a_bad_model(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    outcome = read_or_refusal(write(tmp_path, model(**changes)))
    if isinstance(outcome, CheckpointFiles):
        assert ("auto_map in config.json" in outcome.remote_code) == bool(changes.get("auto_map"))
        assert outcome.config.keys() == CONFIG.keys() | changes.keys()


@pytest.mark.anyio
async def test_ten_times_the_tensors_cost_not_much_more_than_ten_times_the_work(
    tmp_path: Path,
) -> None:
    """In CPU time, the best of several: work that grows with the square would cost a hundred
    times."""

    async def cost(shards: int) -> float:
        folder = write(tmp_path / str(shards), experts(shards))
        cpu_times = []
        for _ in range(3):
            began = time.process_time()
            spec = load(str(folder), hub=NO_HUB)
            cpu_times.append(time.process_time() - began)
        assert [group.count for group in spec.tensors] == [shards * 1000]
        return min(cpu_times)

    assert await cost(20) < 40 * await cost(2)


def test_a_sentence_model_is_no_longer_than_its_own_file_says(tmp_path: Path) -> None:
    def longest(content: bytes) -> int:
        folder = write(tmp_path / "model", {**model(), "sentence_bert_config.json": content})
        return load(str(folder), hub=NO_HUB).max_position

    assert longest(b'{"max_seq_length": 7}') == 7
    assert longest(b'{"max_seq_length": 9999}') == 512
    assert longest(b'{"max_seq_length": null}') == 512


@pytest.mark.parametrize("files", [model(), sharded_model()], ids=["in one file", "in two"])
def test_more_tensors_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    folder = write(tmp_path, files)
    count = len(facts(folder).tensors or ())
    for module in ("catalog", "safetensors"):
        monkeypatch.setattr(f"gateway.models.catalog.{module}.MAX_TENSORS", count - 1)
    assert f"{count - 1}" in refusal(folder).message
    for module in ("catalog", "safetensors"):
        monkeypatch.setattr(f"gateway.models.catalog.{module}.MAX_TENSORS", count)
    assert len(facts(folder).tensors or ()) == count


def test_a_folder_with_more_files_than_any_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, model())
    monkeypatch.setattr("gateway.models.catalog.files.MAX_FILES", 1)
    assert "holds more than 1 files" in refusal(folder).message


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": b"J", "tokenizer_config.json": b'{"chat_template": "T"}'}, "J"),
        ({"chat_template.json": b'{"chat_template": "C"}',
            "tokenizer_config.json": b'{"chat_template": "T"}'}, "C"),
        ({"tokenizer_config.json": b'{"chat_template": "T"}'}, "T"),
        (
            {
                "tokenizer_config.json": (
                    b'{"chat_template": [{"name": "default", "template": "D"},'
                    b' {"name": "tool_use", "template": "U"}]}'
                )
            },
            "D\nU",
        ),
        ({"tokenizer_config.json": b"{}"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_chat_template_is_read_where_engines_look(
    tmp_path: Path, files: dict[str, bytes], template: str | None
) -> None:
    assert load(str(write(tmp_path, {**model(), **files})), hub=NO_HUB).chat_template == template


def test_tokens_beside_the_vocabulary_are_read_in_small_files(tmp_path: Path) -> None:
    config = (
        b'{"added_tokens_decoder": {"7": {"content": "<think>"}, "8": {"content": 3}, "9": "x"}}'
    )
    files = {"tokenizer_config.json": config, "added_tokens.json": b'{"</think>": 8}'}
    assert load(str(write(tmp_path, {**model(), **files})), hub=NO_HUB).added_tokens == (
        "</think>",
        "<think>",
    )


def test_the_files_of_a_quantization_are_read_with_config_json(tmp_path: Path) -> None:
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    files = model() | {"hf_quant_config.json": json.dumps(file).encode()}
    spec = load(str(write(tmp_path / "a", files)), hub=NO_HUB)
    assert spec.quant is not None
    assert (spec.quant.method, spec.quant.file) == ("modelopt", "hf_quant_config.json")
    assert facts(tmp_path / "a").quant_files == {"hf_quant_config.json": file}
    damaged = model() | {"hf_quant_config.json": b"{"}
    assert "hf_quant_config.json is not JSON" in refusal(write(tmp_path / "b", damaged)).message
