"""All commands together: the help, and the cost of an import."""

from __future__ import annotations

import re
import subprocess
import sys

from gateway.cli.registry import SECTIONS
from tests.support.paths import ROOT

# Each takes longer to import than all of the program's own words.
HEAVY = {"rich", "yaml", "httpx", "fastapi", "uvicorn", "docker", "huggingface_hub", "asyncio"}


def test_the_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gateway.__main__", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Talk with MODEL" in result.stdout
    lines = result.stdout.splitlines()
    for title, commands in SECTIONS.items():
        assert f"{title}:" in lines
        assert set(commands) <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert [line for line in lines[1:] if line.endswith("...")] == []
    modules = set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE))
    assert "gateway.cli.registry" in modules
    assert modules & HEAVY == set()


def test_the_help_names_each_value_by_a_noun_in_capitals() -> None:
    commands = ["plan", "demo", "run", "export", "usage", "engine install", "facts rm"]
    pages = [help_page(command.split()) for command in commands]
    usages = [page.splitlines()[0].partition("[OPTIONS] ")[2] for page in pages]
    arguments = ["MODELS...", "[MODEL]...", "MODEL [PROMPT]...", "NAME", "", "[ENGINE]", "NUMBER"]
    assert usages == arguments
    options = [
        match
        for page in pages
        for match in re.findall(r"^  (?:-\w, )?--([\w-]+) (\S.*?)(?:  |$)", page, re.MULTILINE)
        if not match[1].startswith("/")
    ]
    assert ("format", "argv|compose|kubernetes") in options
    assert ("from", "DATE") in options
    assert ("from", "FOLDER") in options
    assert [name for name, value in options if not re.fullmatch("[A-Z=]+", value)] == ["format"]


def help_page(command: list[str]) -> str:
    arguments = [sys.executable, "-m", "gateway.__main__", *command, "--help"]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout


def test_one_command_imports_no_other() -> None:
    program = (
        "import sys\n"
        "from gateway.cli.registry import add_commands\n"
        "from gateway.cli.main import app\n"
        "add_commands(app, 'plan')\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name for name in result.stdout.split() if name.startswith("gateway.cli.commands.")}
    assert modules == {"gateway.cli.commands.plan"}
