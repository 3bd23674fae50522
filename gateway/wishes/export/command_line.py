"""A start as one command of a shell: `env ... PROGRAM`, or `docker run`."""

from __future__ import annotations

import shlex

from gateway.domain.running import SCRATCH_OPTIONS
from gateway.wishes.export.engine_start import EngineStart


def command_line(start: EngineStart) -> list[str]:
    """The words of a command that starts the engine, by `docker run` or by `env`."""
    if start.image is None:
        return ["env", *(f"{name}={value}" for name, value in start.variables.items()), *start.argv]
    arguments = [
        "docker",
        "run",
        "--rm",
        "--init",
        "--name",
        start.name,
        "--publish",
        f"127.0.0.1:{start.port}:{start.port}",
    ]
    if start.gpus:
        # The value has its own quotes because Docker reads it as CSV.
        arguments += ["--gpus", f'"device={",".join(start.gpus)}"']
    for mount in start.mounts:
        arguments += [
            "--mount",
            f"type={mount.kind},source={mount.source},target={mount.target}"
            + (",readonly" if mount.is_read_only else ""),
        ]
    for name, value in start.variables.items():
        arguments += ["--env", f"{name}={value}"]
    arguments += [
        "--shm-size",
        str(start.shm_bytes),
        "--pids-limit",
        str(start.pids),
        "--cap-drop",
        "ALL",
    ]
    for capability in start.capabilities:
        arguments += ["--cap-add", capability]
    arguments += ["--security-opt", "no-new-privileges"]
    if start.memory_bytes is not None:
        arguments += ["--memory", str(start.memory_bytes)]
    if start.scratch is not None:
        arguments += [
            "--read-only",
            *(f"--tmpfs={folder}:{SCRATCH_OPTIONS}" for folder in start.scratch),
        ]
    return [*arguments, "--entrypoint", start.argv[0], start.image, *start.argv[1:]]


def text(start: EngineStart) -> str:
    """The command of an engine as a line for a shell."""
    return shlex.join(command_line(start))
