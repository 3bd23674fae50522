"""A file of models: right as a whole, mistakes with line and column, secrets in no error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Wish
from gateway.domain.wish import Policy
from gateway.errors import BadRequest
from gateway.wishes.model_request import ModelRequest
from gateway.wishes.models_file import load, schema
from tests.support.paths import ROOT
from tests.support.yaml_file import read_yaml

EXAMPLE = ROOT / "docs" / "models.example.yaml"


def file(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text)
    return path


def mistakes(folder: Path, text: str) -> list[str]:
    """Line, column and words of each."""
    path = file(folder, text)
    with pytest.raises(BadRequest) as error:
        load(path)
    head, *lines, schema = error.value.message.splitlines()
    assert (head, "config schema" in schema) == (
        f"{path.name} has mistakes, so nothing is changed:",
        True,
    )
    return [line.removeprefix(f"{path}:") for line in lines]


def test_a_written_file_gives_the_models_that_are_wished_for(tmp_path: Path) -> None:
    text = (
        "x-shared: &shared {context: 4096}\nmodels:\n  a/b:c:\n    <<: *shared\n    source:"
        " ./tiny\n    loras: {l: ./l}\n    policy: {keep_alive: 5m}\n  far: {endpoint:"
        " 'http://h:1/v1'}\n"
    )
    wishes = load(file(tmp_path, text)).wishes
    assert wishes == {
        "a/b:c": Wish(
            name="a/b:c",
            source=str(tmp_path / "tiny"),
            loras={"l": str(tmp_path / "l")},
            context=4096,
            policy=Policy(keep_alive=300),
        ),
        "far": Wish(name="far", endpoints=("http://h:1/v1",)),
    }
    assert load(file(tmp_path, "models: {}\n")).wishes == {}


def test_names_are_read_as_text(tmp_path: Path) -> None:
    """YAML has `no` for False, 1.10 for 1.1 and 12:30 for 750."""
    names = ["no", "On", "null", "007", "1.10", "12:30", "1_000", "2026-01-01"]
    text = "\ufeffmodels:\r\n" + "".join(f"  {name}: {{source: x/y}}\r\n" for name in names)
    assert list(load(file(tmp_path, text)).wishes) == names


def laughs(kind: str) -> str:
    """A few lines that are 10^9 values."""
    lines = [f"x-{n}: &l{n} " + kind % ", ".join([f"*l{n - 1}"] * 10) for n in range(1, 10)]
    return "x-0: &l0 {a: 1}\n" + "\n".join(lines) + "\nmodels: {}\n"


@pytest.mark.parametrize(
    ("text", "expected_mistakes"),
    [
        (
            "models:\n  a:\n    source: x/y\n    contex: 1\n",
            ["4:5: there is no key `contex`; `context` may be meant"],
        ),
        (
            "models:\n  a:\n    source: x/y\n    tensor-parallel: 2\n",
            ["4:5: there is no key `tensor-parallel`; `tensor_parallel` may be meant"],
        ),
        (
            "models:\n  a:\n    source: x/y\n    ttl: 60\n    keep_alive: 5m\n",
            [
                "4:5: there is no key `ttl`: write `policy: {keep_alive: 300s}`",
                "5:5: `keep_alive` stands below `policy`: write `policy: {keep_alive: ...}`",
            ],
        ),
        (
            "groups: {}\nmodels:\n  a: {cmd: vllm serve x/y, max-model-len: 9}\n",
            [
                "1:1: there is no key `groups`: models share the GPUs as they fit",
                "3:7: there is no key `cmd`: the plan makes the command",
                "3:28: there is no key `max-model-len`: write `context`",
            ],
        ),
        (
            "models:\n  a: {repo_id: x/y, quantization: awq}\n",
            [
                "2:7: there is no key `repo_id`: write `source`",
                "2:21: there is no key `quantization`; known are aliases, args,",
            ],
        ),
        ("model:\n  a: {}\n", ["1:1: there is no key `model`; `models` may be meant"]),
        (
            "models:\n  a:\n    source: x/y\n    policy:\n      pined: true\n",
            ["5:7: there is no key `pined`; `pinned` may be meant"],
        ),
        (
            "models:\n  a: {source: x/y, context: many}\n",
            ["2:20: a.context: a number of tokens looks like 8192, 32k (32,768) or 1m"],
        ),
        (
            "models:\n  a:\n    source: x/y\n    policy:\n      keep_alive: soon\n",
            ["5:7: a.policy.keep_alive: a duration looks like"],
        ),
        (
            "models:\n  a:\n    source: x/y\n    gpus: some\n",
            ["4:5: a.gpus: must be 'all' or 'few' or a whole number or a list"],
        ),
        ("models:\n  a: {}\n", ["2:3: A model needs either a `source`"]),
        (
            "models:\n  a:\n    min_context: 9\n    source: x/y\n    max_context: 8\n",
            ["3:5: min_context is larger than max_context"],
        ),
        ("models:\n  a: x/y\n", ["2:3: a has to be a mapping"]),
        ("models: [a]\n", ["1:1: `models` has to be a mapping"]),
        ("- a\n", ["1:1: the file has to be a mapping"]),
        (
            "models:\n  a: {source: x/y}\n  a: {source: x/z}\n",
            ["3:3: the key 'a' stands here twice"],
        ),
        ("models:\n  a b: {source: x/y}\n", ["2:3: 'a b' cannot be a model's name"]),
        (
            "models:\n  a: {source: x/y}\n  b: {source: x/y, aliases: [a]}\n",
            ["3:3: b and a are both called a"],
        ),
        ("models:\n  a: {source: x/y\n", ["3:1: this is not YAML"]),
        ("models: &m\n  a: *m\n", ["1:1: with its aliases this is more than"]),
        (laughs("[%s]"), ["1:1: with its aliases this is more than"]),
        (laughs("{<<: [%s]}"), ["1:1: with its aliases this is more than"]),
        ("x-a: " + "[" * 5000, ["1:1: this is nested too deeply"]),
        ("models:\n  a: {source: x/\0y}\n", ["2:17: this character may not be in YAML"]),
        (
            "models:\n  a: {source: ~no-such-user/y, loras: {b: ~no-such-user/b}}\n",
            ["2:7: this cannot be a f", "2:40: this cannot be a f"],
        ),
        (
            'models:\n  a: {source: "./a\\0b", loras: [{}]}\n',
            ["2:7: this cannot be a folder: embedded null byte"],
        ),
        (
            "models:\n  a: {source: '${file:~no-such-user/y}'}\n",
            ["2:7: '~no-such-user/y' cannot be read"],
        ),
        # No model is removed because a file is being written, or was cut off by a full disk.
        ("", ["1:1: there are no models"]),
        ("# nothing yet\n", ["1:1: there are no models"]),
        ("models:\n", ["1:1: there are no models"]),
        (
            "models:\n  a: {source: x/y, contex: 1}\n  b: {sorce: x/y}\n",
            [
                "2:20: there is no key `contex`; `context` may be meant",
                "3:7: there is no key `sorce`; `source` may be meant",
            ],
        ),
    ],
)
def test_every_mistake_is_reported_with_its_place_and_the_nearest_key(
    tmp_path: Path, text: str, expected_mistakes: list[str]
) -> None:
    mistake_list = mistakes(tmp_path, text)
    assert len(mistake_list) == len(expected_mistakes), mistake_list
    assert all(
        line.startswith(words) for line, words in zip(mistake_list, expected_mistakes, strict=True)
    ), mistake_list


def test_flags_of_engines_are_led_to_args_within_a_model_only(tmp_path: Path) -> None:
    flag_words = "flags of engines stand below `args`"
    (mistake,) = mistakes(tmp_path, "models:\n  a: {source: x/y, quantization: awq}\n")
    assert mistake.endswith(flag_words)
    (mistake,) = mistakes(tmp_path, "quantization: awq\nmodels:\n  a: {source: x/y}\n")
    assert flag_words not in mistake


def test_a_name_that_cannot_be_hides_no_other_mistake(tmp_path: Path) -> None:
    (file := tmp_path / "models.yaml").write_text(
        "models:\n  'bad name': {source: ./a}\n  m: {sorce: ./a}\n"
    )
    with pytest.raises(BadRequest) as error:
        load(file)
    assert re.findall(r":(\d+:\d+): ", str(error.value)) == ["2:3", "3:7"]


def test_secrets_come_from_elsewhere_and_are_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "s3cret!value")
    (tmp_path / "held").write_text("8\n")
    text = (
        "models:\n  a:\n    source: x/y\n    env: {NCCL_DEBUG: '${env:OF_THE_TEST}'}\n    args:"
        " {max-num-seqs: '${file:held}'}\n"
    )
    document = load(file(tmp_path, text))
    assert document.wishes["a"].env == {"NCCL_DEBUG": "s3cret!value"}
    assert document.wishes["a"].args == {"max-num-seqs": "8"}
    assert (
        document.references.hide_values("NCCL_DEBUG s3cret!value")
        == "NCCL_DEBUG ${env:OF_THE_TEST}"
    )
    for wrong in (
        "image: '${env:OF_THE_TEST}'",
        "endpoint: 'http://u:${env:OF_THE_TEST}@h'",
        "gpus: '${env:OF_THE_TEST}'",
    ):
        assert "s3cret" not in str(
            mistakes(tmp_path, f"models:\n  a:\n    source: x/y\n    {wrong}\n")
        )
    (mistake,) = mistakes(tmp_path, "models:\n  a:\n    source: '${env:NOT_SET}'\n")
    assert mistake == "3:5: the variable NOT_SET is not set"
    (mistake,) = mistakes(tmp_path, "models:\n  a: {source: '${file:/no/such}'}\n")
    assert mistake == "2:7: '/no/such' cannot be read: No such file or directory"


def test_a_file_that_is_far_too_long_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="it is longer than"):
        load(file(tmp_path, "models: {}\n#" + "x" * 5_000_000))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        load(tmp_path / "models.yaml")


def test_the_example_documents_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in yaml_references():
        monkeypatch.setenv(name, "NCCL_NET,ENV")
    load(EXAMPLE)
    models: dict[str, Any] = read_yaml(EXAMPLE)["models"]
    keys = {key for model in models.values() for key in model}
    assert keys == set(ModelRequest.model_fields) - {"name"}
    assert {key for model in models.values() for key in model.get("policy", {})} == set(
        Policy.model_fields
    )
    # Each key has a comment, on its line or above it.
    lines = EXAMPLE.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        is_explained = "#" in line or above.strip().startswith("#")
        assert is_explained or not line.strip() or re.fullmatch(r"(  )?[\w-]+:", line), line


def yaml_references() -> list[str]:
    return re.findall(r"\$\{env:(\w+)\}", EXAMPLE.read_text())


def test_the_schema_describes_the_read_fields() -> None:
    new_schema = schema()
    model = new_schema["$defs"]["Model"]
    assert set(model["properties"]) == set(ModelRequest.model_fields) - {"name"}
    assert model["additionalProperties"] is False
    assert new_schema["properties"]["models"]["additionalProperties"] == {"$ref": "#/$defs/Model"}
    assert all(
        reference.startswith("#/$defs/")
        and reference.removeprefix("#/$defs/") in new_schema["$defs"]
        for reference in references(new_schema)
    )


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own_references = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own_references + [
            reference for part in value.values() for reference in references(part)
        ]
    return (
        [reference for part in value for reference in references(part)]
        if isinstance(value, list)
        else []
    )
