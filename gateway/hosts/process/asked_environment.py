"""Inquiries of an engine environment: a child process of its Python, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from gateway.disk_fault import unwritten_error
from gateway.domain import EngineRef
from gateway.engines.inquiry import script
from gateway.errors import HostError
from gateway.hosts.process import child
from gateway.machine.environment import variables


async def run_inquiry_process(
    python: Path, folder: Path, document: bytes
) -> AsyncGenerator[bytes, None]:
    """The lines that `python` answers. The program writes below `folder` only. Raises HostError."""
    with _temporary_folder(folder) as work_dir:
        environment = {**variables(str(python), Path(work_dir)), "TMPDIR": work_dir}
        async with aclosing(
            child.stream_child_lines(
                script.command(str(python)),
                script.input_bytes(document),
                cwd=Path(work_dir),
                env=environment,
            )
        ) as lines:
            async for line in lines:
                yield line


def _temporary_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A new folder below `folder`. Left-overs of killed gateways are removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            if time.time() - leftover.stat().st_mtime > script.MAX_INQUIRY_S:
                shutil.rmtree(leftover, ignore_errors=True)
        return tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        fault = unwritten_error(f"The folder {folder} cannot be used", folder, error, "")
        raise HostError(fault.message, hint=fault.hint) from error


class SinglePythonHost:
    """A host with one engine under any name: the one that this Python imports."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = Path(os.path.abspath(python.expanduser()))  # noqa: PTH100 - the link in an environment says which one it is
        self._folder = folder

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine

    async def identity(self, engine: EngineRef) -> str:
        if not os.access(self._python, os.X_OK) or self._python.is_dir():
            raise HostError(
                f"{self._python} is not a program.",
                hint=(
                    f"Give the Python of the environment of {engine.kind}, such as VENV/bin/python."
                ),
            )
        return str(self._python)

    def run_inquiry(
        self,
        engine: EngineRef,  # noqa: ARG002 - a host's signature
        document: bytes,
        gpus: tuple[str, ...] = (),  # noqa: ARG002
    ) -> AsyncGenerator[bytes, None]:
        return run_inquiry_process(self._python, self._folder, document)
