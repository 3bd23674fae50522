"""Flags: typed, allow-listed, one argument each, and no way out of the list."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.domain import Engine, Flag, Scalar
from gateway.errors import BadFlag
from gateway.planner.flags import arguments, check_args
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine as make_engine
from tests.support.versions import SGLANG_REF, VLLM_REF

FLAGS = {
    "max-model-len": Flag(type="int"),
    "max-num-seqs": Flag(type="int"),
    "rank": Flag(type="int", choices=("8", "16")),
    "tensor-parallel-size": Flag(type="int"),
    "kv-cache-memory-bytes": Flag(type="int"),
    "gpu-memory-utilization": Flag(type="float"),
    "enforce-eager": Flag(type="bool"),
    "quiet": Flag(type="bool", choices=("True",)),
    "dtype": Flag(type="str", choices=("auto", "half")),
    "role": Flag(type="str"),
    "hf-overrides": Flag(type="json"),
    "rope": Flag(type="json", keys=("rope_scaling",)),
    "host": Flag(type="str", is_reserved=True),
    "model": Flag(type="str"),
    "api-key": Flag(type="str", is_reserved=True),
}
SMALL = make_engine(flags=FLAGS)
PROFILES = Profiles()
ENGINES = [SMALL, *(PROFILES.engine(ref) for ref in PROFILES.engine_files)]
# Ways that have led out of such lists elsewhere.
ESCAPES: list[Any] = [
    "--log-file",
    "-c",
    "--role",
    "x --host=0.0.0.0",
    "--role=x",
    "role=x",
    "$(reboot)",
    "`id`",
    "a;b",
    "a\nb",
    "\0",
    "\r",
]
ESCAPES += [
    "\u2010\u2010role",
    "\u2014role",
    "\uff0d\uff0drole",
    "--",
    "-",
    "",
    "a\u2028b",
    "\x85",
    "\x7f",
    "\u202e",
    "\ud800",
    "x" * 10**5,
    "no-role",
]
ESCAPES += ["host", "--host", "api_key", "--api-key", "model", "port", "served-model-name",
    "config", "-O3", "hf-overrides.x"]  # fmt: skip
NUMBERS: list[Any] = [
    0,
    -1,
    2**63,
    -(10**400),
    10**5000,
    1e308,
    float("nan"),
    float("inf"),
    True,
    "1e400",
    "-0",
    "0x10",
    "١٢",
]
JSONS = [
    "{}",
    "[1, 2]",
    '{"a": "\\u0000\\n"}',
    "[NaN]",
    "[1e999]",
    "{",
    "[" * 5000,
    '{"a":\n\t1}',
    "1",
    "null",
    '"x"',
    "9" * 5000,
]
NAMES = st.sampled_from(
    [*FLAGS, *(f"--{name}" for name in FLAGS), *(name.replace("-", "_") for name in FLAGS)]
)
VALUES = (
    st.sampled_from([*ESCAPES, *NUMBERS, *JSONS, "8192", "true", "auto", "half", "8"])
    | st.text()
    | st.integers()
    | st.floats()
)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.ref)
@given(st.data())
def test_only_known_flags_come_out_of_any_arguments(engine: Engine, data: st.DataObject) -> None:
    flag_names = NAMES if engine is SMALL else st.sampled_from(sorted(engine.flags))
    args = data.draw(
        st.dictionaries(
            flag_names | st.sampled_from(ESCAPES) | st.text(), VALUES | st.booleans(), max_size=3
        )
    )
    try:
        arguments_of_plan = check_args(engine, args)
    except BadFlag as error:
        message, hint = str(error), error.param
    else:
        message, hint = "", "args"
        items = arguments(arguments_of_plan)
        assert len(items) == len(args)
        for item in items:
            name = re.fullmatch(r"--(no-)?([a-z0-9-]+?)(=.*)?", item)
            assert name is not None
            flag = engine.flags[name[2]]
            assert not flag.is_reserved
            assert flag.type == "bool" or name[1] is None
            assert (name[3] is None) == (flag.type == "bool")
            assert item.isprintable()
            assert len(item) < 9000
            item.encode()
    assert hint == "args"
    assert message.isprintable()
    assert len(message) < 4000


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.ref)
def test_flags_of_the_gateway_are_always_refused(engine: Engine) -> None:
    names = [name for name, flag in engine.flags.items() if flag.is_reserved] + [
        name for name in ("model",) if name in engine.flags
    ]
    assert names
    for name in names:
        for spelling in (name, f"--{name}", name.replace("-", "_")):
            with pytest.raises(BadFlag, match="cannot be given"):
                check_args(engine, {spelling: "1"})


@pytest.mark.parametrize("engine", ENGINES[1:], ids=lambda engine: engine.ref)
def test_the_flags_of_a_launch_are_closed_in_every_profile(engine: Engine) -> None:
    launch = [
        engine.spelling.get(name, name) for name in ("model", "served-model-name", "host", "port")
    ]
    assert all(engine.flags[name].is_reserved for name in launch)


@pytest.mark.parametrize(
    ("given_as", "near"),
    [
        ("max-model-length", "max-model-len"),
        ("--max_num_seq", "max-num-seqs"),
        ("enforce-eagre", "enforce-eager"),
    ],
)
def test_an_unknown_flag_names_the_nearest(given_as: str, near: str) -> None:
    with pytest.raises(BadFlag, match=f"did you mean {near}"):
        check_args(SMALL, {given_as: 1})
    with pytest.raises(BadFlag, match=r"has no flag 'zzz'\.$"):
        check_args(SMALL, {"zzz": 1})


def test_a_flag_of_another_engine_gets_the_name_of_this_engine() -> None:
    profiles = Profiles()
    with pytest.raises(BadFlag, match=r"has no flag 'max-model-len'; here it is context-length\."):
        check_args(profiles.engine(SGLANG_REF), {"max-model-len": 1})
    with pytest.raises(
        BadFlag, match=r"has no flag 'mem_fraction_static'; here it is gpu-memory-utilization\."
    ):
        check_args(profiles.engine(VLLM_REF), {"mem_fraction_static": 0.5})


TYPED: list[tuple[str, Scalar, Scalar]] = [
    ("max-model-len", "8192", 8192),
    ("max-model-len", "1e3", 1000),
    ("max-model-len", 8192.0, 8192),
    ("rank", "8", 8),
    ("gpu-memory-utilization", "0.5", 0.5),
    ("gpu-memory-utilization", 1, 1.0),
    ("enforce-eager", "true", True),
    ("enforce-eager", "False", False),
    ("enforce-eager", "", True),
    ("enforce-eager", False, False),
    ("quiet", True, True),
    ("dtype", "half", "half"),
    ("role", 5, "5"),
    ("role", "x=--host y", "x=--host y"),
    ("hf-overrides", '{"a":\n [1]}', '{"a": [1]}'),
    ("hf-overrides", '["\\u00e9"]', '["\\u00e9"]'),
]


@pytest.mark.parametrize(("name", "value", "typed"), TYPED)
def test_a_value_takes_the_type_of_its_flag(name: str, value: Scalar, typed: Scalar) -> None:
    arguments_of_plan = check_args(SMALL, {name: value})
    assert arguments_of_plan == {name: typed}
    assert type(arguments_of_plan[name]) is type(typed)


SIZES = [
    ("vllm", "8k", 8000),
    ("vllm", "8K", 8192),
    ("vllm", " 25.6k", 25600),
    ("vllm", "1M", 1048576),
    ("sglang", "1M", 1000000),
    ("sglang", "1Mi", 1048576),
]


@pytest.mark.parametrize(("kind", "value", "number"), SIZES)
def test_a_whole_number_has_the_magnitude_that_the_engine_reads(
    kind: str, value: str, number: int
) -> None:
    flags = {"max-num-batched-tokens": Flag(type="int")}
    engine = SMALL.evolve(kind=kind, flags=flags, spelling={})
    assert check_args(engine, {"max-num-batched-tokens": value}) == {
        "max-num-batched-tokens": number
    }


WRONG: list[tuple[str, Scalar, str]] = [
    ("max-model-len", "8x", "takes a whole number, not '8x'"),
    ("max-model-len", "k", "takes a whole number, not 'k'"),
    ("max-model-len", "-8k", "takes a whole number, not '-8k'"),
    ("max-model-len", "8Ki", "takes a whole number, not '8Ki'"),
    ("max-model-len", "9" * 400 + "T", "takes a whole number"),
    ("max-model-len", "9" * 300 + "T", "takes a whole number"),
    ("gpu-memory-utilization", "1k", "takes a number"),
    ("max-model-len", 1.5, "takes a whole number"),
    ("max-model-len", True, "takes a whole number"),
    ("max-model-len", "nan", "takes a whole number"),
    ("max-model-len", 10**400, "not a huge number"),
    ("max-model-len", 0, "at least 1"),
    ("max-model-len", -1, "at least 1"),
    ("max-num-seqs", 10**9, "at most 1000000"),
    ("tensor-parallel-size", 0, "at least 1"),
    ("kv-cache-memory-bytes", -1, "at least 1"),
    ("gpu-memory-utilization", "1.5", "at most 1"),
    ("gpu-memory-utilization", 0, "at least 0.01"),
    ("gpu-memory-utilization", "inf", "takes a number"),
    ("enforce-eager", 1, "takes true or false"),
    ("enforce-eager", "maybe", "takes true or false"),
    ("quiet", False, "cannot be 'False'"),
    ("rank", 9, "one of: 8, 16"),
    ("dtype", "halt", "did you mean half?"),
    ("role", True, "takes a text"),
    ("role", "a\nb", "cannot be printed"),
    ("role", "x" * 9000, "too long"),
    ("hf-overrides", "{", "takes a JSON object or list"),
    ("hf-overrides", "3", "takes a JSON object or list"),
    ("hf-overrides", "[NaN]", "takes a JSON object or list"),
    ("hf-overrides", "[" * 5000, "takes a JSON object or list"),
    ("hf-overrides", "[" + "0," * 4090 + "0]", "too long"),
    ("rope", "[]", "takes a JSON object, not a list"),
    ("rope", '{"rope_scaling": {}, "auto_map": {}}', "cannot set 'auto_map'"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_is_refused_with_the_flags_values(
    name: str, value: Scalar, words: str
) -> None:
    with pytest.raises(BadFlag) as error:
        check_args(SMALL, {name: value})
    assert words in str(error.value)
    assert f"--{name}" in error.value.message
    assert error.value.hint


def test_a_flag_in_two_spellings_is_refused() -> None:
    with pytest.raises(BadFlag, match="given twice"):
        check_args(SMALL, {"max-model-len": 1, "--max_model_len": 2})


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@example([{"a": "\n"}])
def test_json_keeps_its_meaning_in_one_plain_line(value: Any) -> None:
    text = json.dumps({"a": value})
    if len(text) > 4000:
        return
    (item,) = arguments(check_args(SMALL, {"hf-overrides": text}))
    assert json.loads(item.removeprefix("--hf-overrides=")) == {"a": value}
    assert item.isascii()
    assert item.isprintable()
