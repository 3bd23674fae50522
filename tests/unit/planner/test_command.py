"""A command line read backwards: flags that plans write are known again, and nothing else is taken
for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Engine, Flag
from gateway.domain.engine import Warmup
from gateway.engines.common import expert_warmups
from gateway.engines.common.engine_auth import DEV_MODE, wrap_command
from gateway.errors import BadFlag
from gateway.planner.command import check_command, check_environment
from gateway.planner.flags import arguments
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine
from tests.support.versions import SGLANG, SGLANG_REF

FLAGS = {
    "dtype": Flag(type="str", choices=("auto", "half")),
    "tp": Flag(type="int", same_as="tensor-parallel-size"),
    "tensor-parallel-size": Flag(type="int"),
    "enforce-eager": Flag(type="bool"),
    "no-serve": Flag(type="bool"),
    "limits": Flag(type="json"),
    "alias": Flag(type="str", same_as="model"),
    "model": Flag(type="str", is_reserved=True),
    "middleware": Flag(type="str", is_reserved=True),
    "speculative-config": Flag(type="json", is_reserved=True),
}
SMALL = engine(flags=FLAGS, env={"A": "1"}, eager_env={"E": "1"}, user_env=("U",))
OWN = ("--model=/models/m", "--served-model-name=m", "--host=0.0.0.0", "--port=8000")


def check(*items: str, end: tuple[str, ...] = OWN, engine: Engine = SMALL) -> None:
    check_command(
        engine,
        (*engine.container_command, *items, *end),
        {},
        model="m",
        port=8000,
        folder="/models",
    )


@pytest.mark.parametrize(
    "item",
    [
        "--dtype=half",
        "--tp=2",
        "--tensor-parallel-size=2",
        "--enforce-eager",
        "--no-enforce-eager",
        "--no-serve",
        "--no-no-serve",
        '--limits={"image": 0}',
        '--speculative-config={"method": "ngram"}',
    ],
)
def test_flags_of_plans_are_known(item: str) -> None:
    check(item)


@pytest.mark.parametrize("version", SGLANG)
def test_the_switches_of_every_start_are_known(version: str) -> None:
    """Also those that no user may give, such as the store of responses."""
    sglang = Profiles().engine(f"sglang=={version}")
    switches = [f"--{name}" for name in sglang.api_switches if name in sglang.flags]
    names = {flag: sglang.spelling.get(flag, flag) for flag in ("model", "served-model-name")}
    flags = (f"--{names['model']}=/models/m", f"--{names['served-model-name']}=m", *OWN[2:])
    check(*switches, end=flags, engine=sglang)


@pytest.mark.parametrize(
    "item",
    [
        "",
        "-",
        "--",
        "--=",
        "-dtype=half",
        "dtype=half",
        "--dtype",
        "--dtype=",
        "--dtype=float64",
        "--dtyp=half",
        "--tp=x",
        "--no-tp",
        "--no-dtype=half",
        "--enforce-eager=1e",
        "--limits={",
        "--limits=[NaN]",
        "--model=/etc",
        "--alias=/etc",
        "--no-model",
        "--host=1.2.3.4",
        "--port=22",
        "--middleware=os.system",
        "--dtype=half\n--middleware=x",
        "--unknown",
        "@file",
        "--speculative-config=" + '"' * 9000,
    ],
)
def test_a_flag_that_is_in_no_plan_is_refused(item: str) -> None:
    with pytest.raises(BadFlag) as error:
        check(item)
    assert error.value.message.isprintable()


@pytest.mark.parametrize(
    "end",
    [
        (),
        OWN[:3],
        OWN[1:],
        OWN[::-1],
        ("--model=/etc", *OWN[1:]),
        ("--model=/models/../etc", *OWN[1:]),
        ("--model=/models/m\n", *OWN[1:]),
        ("--model=models/m", *OWN[1:]),
        (OWN[0], "--served-model-name=other", *OWN[2:]),
        (*OWN[:2], "--host=::", OWN[3]),
        (*OWN[:3], "--port=8001"),
        (*OWN, "--enforce-eager"),
    ],
)
def test_only_the_gateway_sets_the_end_of_a_command(end: tuple[str, ...]) -> None:
    with pytest.raises(BadFlag):
        check("--dtype=half", end=end)


def test_another_program_is_refused() -> None:
    for argv in ((), ("sh",), SMALL.container_command[:-1], ("sh", *SMALL.container_command)):
        with pytest.raises(BadFlag, match="is not that of"):
            check_command(SMALL, (*argv, *OWN), {}, model="m", port=8000, folder="/models")


def test_a_flag_in_the_spelling_of_its_engine_is_known() -> None:
    sglang = Profiles().engine(SGLANG_REF)
    check("--tp-size=2", end=("--model-path=/models/m", *OWN[1:]), engine=sglang)
    with pytest.raises(BadFlag):
        check("--tp-size=2", engine=sglang)


@given(
    st.dictionaries(
        st.sampled_from(sorted(FLAGS)),
        st.booleans() | st.integers(-2, 9) | st.text(max_size=5),
        max_size=4,
    )
)
def test_a_flag_refused_to_users_is_refused_here(args: dict[str, bool | int | str]) -> None:
    """For any value, no flag of the gateway's passes but those that plans have."""
    names = {FLAGS[name].same_as or name for name in args}
    try:
        check(*arguments(args))
    except BadFlag:
        return
    assert not names & {"model", "middleware"}


@pytest.mark.parametrize(
    ("env", "passes"),
    [
        ({}, True),
        ({"A": "1", "E": "1", "U": "anything", "NCCL_P2P_DISABLE": "1"}, True),
        ({"A": "2"}, False),
        ({"E": "0"}, False),
        ({"PATH": "/models"}, False),
        ({"U": "a\nb"}, False),
        ({"U": "\0"}, False),
        ({"A=1\nB": "1"}, False),
    ],
)
def test_the_environment_is_that_of_profile_and_plan(env: dict[str, str], passes: bool) -> None:
    if passes:
        check_environment(SMALL, env)
        return
    with pytest.raises(BadFlag):
        check_environment(SMALL, env)


def test_the_quiet_flag_is_known_by_its_whole_name_alone() -> None:
    quiet = engine(
        flags={**FLAGS, "hush": Flag(type="str", is_reserved=True)},
        quiet=("--hush", "/health", "/metrics"),
    )
    check("--hush", "/health", "/metrics", "--dtype=half", engine=quiet)
    check("--dtype=half", engine=quiet)
    for items in (
        ("--hush", "/health", "/etc"),
        ("--dtype=half", "--hush", "/health", "/metrics"),
        ("--hush=/etc",),
    ):
        with pytest.raises(BadFlag):
            check(*items, engine=quiet)


def test_an_engine_whose_endpoints_for_development_are_open_is_behind_its_door() -> None:
    sleeps = SMALL.evolve(key_env="KEY", has_sleep_mode=True)
    env = dict([DEV_MODE])
    plain_command = sleeps.container_command
    command_with_door = wrap_command(sleeps.container_command, "KEY")

    def check_behind(argv: tuple[str, ...], env: dict[str, str]) -> None:
        check_command(sleeps, (*argv, *OWN), env, model="m", port=8000, folder="/models")

    check_behind(command_with_door, env)
    check_environment(sleeps, env)
    for argv, engine_env in (
        (plain_command, env),
        (command_with_door, {}),
        (command_with_door[:3], env),
        ((*command_with_door[:2], "pass", command_with_door[3]), env),
    ):
        with pytest.raises(BadFlag):
            check_behind(argv, engine_env)
    for engine_of, engine_env in ((SMALL, env), (sleeps, {DEV_MODE[0]: "2"})):
        with pytest.raises(BadFlag):
            check_environment(engine_of, engine_env)


def test_a_start_may_leave_out_the_warm_ups_that_the_profile_names() -> None:
    warmup = Warmup(shapes="served.warm:SHAPES", min_capability="9.0")
    engine_with_warmups = SMALL.evolve(
        key_env="KEY", has_sleep_mode=True, expert_warmups={"router": warmup}
    )
    door = wrap_command(engine_with_warmups.container_command, "KEY")
    for program, env in ((engine_with_warmups.container_command, {}), (door, dict([DEV_MODE]))):
        skipping = expert_warmups.wrap_command(program, engine_with_warmups, "router")
        for argv in (program, skipping):
            check_command(
                engine_with_warmups, (*argv, *OWN), env, model="m", port=8000, folder="/models"
            )
        for engine_of, argv in (
            (engine_with_warmups.evolve(expert_warmups={}), skipping),
            (engine_with_warmups, (*skipping[:2], f"{skipping[2]}pass", *skipping[3:])),
        ):
            with pytest.raises(BadFlag):
                check_command(engine_of, (*argv, *OWN), env, model="m", port=8000, folder="/models")
    with pytest.raises(BadFlag):
        check_environment(engine_with_warmups, {expert_warmups.VARIABLE: "router"})
