"""Forked processes are as those that begin with a new interpreter: their output, their end and
their surroundings."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import Forked, run, spawn
from tests.support.paths import ROOT
from tests.support.patience import hang_s
from tests.support.typing_terminal import TypingTerminal


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["pss"], ["plan", "/nowhere"], ["plan", ".", "--hardware", "cpu"], ["ps"]],
)
def test_a_command_does_the_same_as_in_an_interpreter_of_its_own(
    tmp_path: Path, arguments: list[str]
) -> None:
    environment = {
        **os.environ,
        "FITSERVE_DATA_DIR": str(tmp_path),
        "FITSERVE_PORT": "1",
        "COLUMNS": "60",
    }
    command = [sys.executable, "-m", "gateway.__main__", *arguments]
    plain_result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    fork_result = run(arguments, environment)
    assert (fork_result.returncode, fork_result.stdout, fork_result.stderr) == (
        plain_result.returncode,
        plain_result.stdout,
        plain_result.stderr,
    )
    assert plain_result.stdout or plain_result.stderr


def test_a_fork_is_a_process_with_the_given_environment(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import json, os, sys\njson.dump([dict(os.environ), os.getcwd(), sys.argv[1:],"
        " sys.stdin.read(), os.umask(0), os.getsid(0) == os.getpid(), __name__],"
        " sys.stdout)\nprint('é', file=sys.stderr)\nsys.exit(7)\n"
    )
    output_file, error_file = tmp_path / "said", tmp_path / "told"
    (tmp_path / "given").write_text("ü")
    umask = os.umask(0o007)
    with (
        (tmp_path / "given").open("rb") as descriptor,
        output_file.open("wb") as out,
        error_file.open("wb") as err,
    ):
        streams = (descriptor.fileno(), out.fileno(), err.fileno())
        # The folder is where Python looks first, as with -m.
        process = Forked("shown", ["a", "b"], {"ONE": "1"}, streams, folder=tmp_path)
    os.umask(umask)
    assert process.wait() == 7
    assert json.loads(output_file.read_text()) == [
        {"ONE": "1"},
        str(tmp_path),
        ["a", "b"],
        "ü",
        0o007,
        True,
        "__main__",
    ]
    assert error_file.read_text() == "é\n"


def test_the_signal_that_ends_a_fork_is_reported() -> None:
    master, slave = pty.openpty()
    process = Forked("gateway.planner.service.plan_program", (), os.environ, (slave, slave, slave))
    os.close(slave)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == process.wait() == -signal.SIGTERM
    process.kill()
    os.close(master)


def test_poll_does_not_wait_and_an_ended_process_gets_no_signal() -> None:
    master, slave = pty.openpty()
    process = Forked("gateway.planner.service.plan_program", (), os.environ, (slave, slave, slave))
    os.close(slave)
    assert process.poll() is None
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)
    os.close(master)


@pytest.mark.parametrize("asks", [False, True])
def test_a_gateway_has_its_planner_forked_too(tmp_path: Path, asks: bool) -> None:
    (tmp_path / "plans.py").write_text(
        "import asyncio, os\nfrom pathlib import Path\nfrom gateway.planner.service import"
        " plan_process\nasync def main():\n    child = await"
        " plan_process.spawn('gateway.planner.service.plan_program', {})\n    parent ="
        " int(Path(f'/proc/{child.pid}/stat').read_text().rpartition(')')[2].split()[1])\n   "
        " child.stdin.write_eof()\n    print(parent == os.getpid(), parent == os.getppid(), await"
        " child.wait())\nasyncio.run(main())\n"
    )
    path = tmp_path / "said"
    with path.open("wb") as out:
        process = Forked(
            "plans",
            (),
            {**os.environ, "PYTHONPATH": str(ROOT)},
            (0, out.fileno(), 2),
            folder=tmp_path,
            asks=asks,
        )
        assert process.wait() == 0
    assert path.read_text() == f"{not asks} {asks} 0\n"


def test_ctrl_c_is_heard_though_the_tests_run_in_the_background_of_a_shell(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    (tmp_path / "starts.py").write_text(
        "import pathlib, sys\nfrom tests.support.forked import Forked\n"
        "sys.exit(Forked('asks', (), {}, (0, 1, 2), folder=pathlib.Path(__file__).parent).wait())"
    )
    shell = ["sh", "-c", 'trap "" INT; exec "$0" "$1"', sys.executable, str(tmp_path / "starts.py")]
    result = subprocess.run(
        shell,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "True\n"


def test_a_terminal_is_its_own() -> None:
    with TypingTerminal("--help") as terminal:
        assert terminal.wait_for_exit() == 0
        assert "\r\n" in terminal.output


@pytest.mark.anyio
async def test_a_program_ends_with_its_input_and_when_it_is_killed() -> None:
    first = await spawn("gateway.planner.service.plan_program", {})
    second = await spawn("gateway.planner.service.plan_program", {})
    assert (first.returncode, second.returncode) == (None, None)
    first.stdin.write_eof()
    assert await first.wait() == first.returncode == 0
    assert await first.stdout.read() == b""
    second.kill()
    assert await second.wait() == -signal.SIGKILL
    await asyncio.wait_for(second.stdin.wait_closed(), hang_s())
