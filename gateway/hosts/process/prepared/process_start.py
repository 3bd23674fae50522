"""Starts of engines as a prepared process needs them, and whether its environment agrees. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

GPUS = "CUDA_VISIBLE_DEVICES"
_ENGINE_PREFIXES = ("VLLM_", "SGLANG_", "SGL_")
"""Prefixes of variables that only the Python code of engines reads."""
_MODULE = re.compile(r'run_module\("([\w.]+)"')


@dataclass(frozen=True)
class ProcessStart:
    """One start of an engine process.

    identity: a value that changes when the environment is reinstalled.
    key_env: the variable with the engine's key, which only the engine gets.
    exit_file: the file for its exit code.
    forked_calls, kernel_warmups, kernel_builds: the fields of LaunchSpec.
    """

    engine: str
    identity: str
    model: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    key_env: str | None
    cwd: str
    log: str
    exit_file: str
    forked_calls: tuple[str, ...] = ()
    kernel_warmups: tuple[str, ...] = ()
    kernel_builds: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str | None:
        """The module that `PYTHON -m MODULE` or the door of engine_auth.py runs; None: another
        command."""
        if len(self.argv) < 3 or self.argv[1] not in ("-m", "-c"):
            return None
        if self.argv[1] == "-m":
            return self.argv[2]
        match = _MODULE.search(self.argv[2])
        return match[1] if match is not None else None

    @property
    def open_env(self) -> dict[str, str]:
        """The environment without the engine's key."""
        return {name: value for name, value in self.env.items() if name != self.key_env}

    def slot(self, code: str) -> str:
        """The name of the prepared process for this start. code: identity of its program."""
        parts = [self.engine, self.identity, code, self.argv[0], self.module, self.open_env]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def matches_environment(
    prepared_env: Mapping[str, str],
    start: ProcessStart,
    read: Collection[str],
) -> bool:
    """Whether a process that was prepared with one environment may become this engine.

    read: the variables that modules looked up while they were imported. Another value of these
    would have had an effect by now. Native code may have read any other variable, except for those
    of the engine's Python code, and for the choice of GPUs: no driver has been opened.
    """
    differences = {
        name
        for name in {*prepared_env, *start.env}
        if prepared_env.get(name) != start.env.get(name)
    }
    return all(
        name not in read and (name in (GPUS, start.key_env) or name.startswith(_ENGINE_PREFIXES))
        for name in differences
    )
