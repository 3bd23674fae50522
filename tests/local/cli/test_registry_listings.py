"""Every command that prints a list for people and programs, against a gateway on a socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import fitserve
from tests.support.documented import program
from tests.support.run_scripts import script
from tests.support.running import Running, model_folder, running

pytestmark = pytest.mark.anyio

# Commands with --json and without a required word that this machine or gateway has nothing for.
NOT_HERE = {
    ("calibrate",): "GPUs are measured in tests/local/calibration",
    ("cluster", "status"): "a cluster is asked in tests/contract/test_cluster.py",
    ("fits",): "the Hub is asked in tests/local/test_documented_commands.py",
    ("search",): "the Hub is asked in tests/local/test_documented_commands.py",
    ("engine", "learn"): "an engine is asked in tests/e2e/test_inquiry.py",
    ("backup",): "an archive is written in tests/local/cli/commands/files/test_backup.py",
    ("config", "check"): "it checks a file of models, in tests/local/cli/test_main.py",
    ("events",): "each line is JSON, see tests/local/cli/commands/test_events.py",
}
# Words of commands with a required word, for the model `m` of the gateway.
WORDS = {
    ("show",): ("m",),
    ("export",): ("m",),
}


def listing_commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of each command with --json that needs no further word, or one of WORDS."""
    commands: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        words = (*path, name)
        if hasattr(command, "commands"):
            commands += listing_commands(command, words)
        elif has_json(command) and words not in NOT_HERE:
            needs_word = any(row.required for row in command.params)
            if words in WORDS or not needs_word:
                commands.append((*words, *WORDS.get(words, ())))
    return commands


def has_json(command: Any) -> bool:
    return any("--json" in row.opts for row in command.params)


COMMANDS = listing_commands(program())


async def assert_prints(gateway: Running, *words: str) -> str:
    """The output of a command, which may refuse but not crash."""
    result = await asyncio.to_thread(fitserve, *words, FITSERVE_URL=gateway.url)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode in (0, 1, 3), f"{words}: {result.returncode}\n{result.stderr}"
    assert result.stdout or result.stderr
    return result.stdout if result.returncode == 0 else ""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
async def test_a_listing_is_printed_for_people_and_for_programs(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        await assert_prints(gateway, *words)
        if output := await assert_prints(gateway, *words, "--json"):
            json.loads(output)


def test_the_listings_are_those_of_the_program() -> None:
    assert len(COMMANDS) >= 10
    assert {("ps",), ("list",), ("df",), ("usage",), ("keys", "ls")} <= set(COMMANDS)
    assert {("facts", "ls"), ("engine", "ls"), ("show", "m")} <= set(COMMANDS)
