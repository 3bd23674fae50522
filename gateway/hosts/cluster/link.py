"""The link: a process that calls the machines through Ray, for programs of this user.

A connection to its socket is one call: a line `{"node": NAME}`, then the line of
`gateway.hosts.agent.calls`. Answers pass unread. Only the line `{"node": ""}` asks for the nodes.
After `{"node": NAME, "source": OTHER}` a third line is a call to OTHER, whose answer goes from
machine to machine and follows the call to NAME.

Ray ends a process that loses the head for a minute, and takes its signals. The gateway is
therefore not a client of Ray. The actors belong to this process: nothing of ours lives longer in
Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from gateway.hosts.agent.agent_server import listen
from gateway.hosts.cluster.ray_start import RESOURCE
from gateway.hosts.cluster.relay import CallClosures, Relay, absence_line
from gateway.hosts.peer import peer_user

_POLL_S = 0.25
_SILENCE_S = 10.0
_MAX_LINE_BYTES = 1024 * 1024


class LinkServer:
    """Answers calls of this user's programs to the machines.

    `ray`: the module, connected to the cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._relays: dict[str, Any] = {}
        self._closures = CallClosures()
        self._nodes: dict[str, dict[str, Any]] = {}

    async def read_nodes(self) -> None:
        """Read the nodes that Ray knows."""
        nodes: dict[str, dict[str, Any]] = {}
        for node in await asyncio.to_thread(self._ray.nodes):
            name = next((key for key in node["Resources"] if key.startswith(RESOURCE)), "")
            if not node["Alive"] or not name:
                continue
            name = name.removeprefix(RESOURCE)
            address = node["NodeManagerAddress"]
            if name in nodes:
                nodes[name]["state"] = f"{nodes[name]['address']} and {address} have one name"
            else:
                nodes[name] = {"name": name, "address": address, "state": "alive"}
        for name in self._relays.keys() - nodes.keys():
            # Its actor could wait for the machine, and calls with it.
            self._ray.kill(self._relays.pop(name))
        self._nodes = nodes

    async def poll_nodes(self) -> None:
        """Look all the time. Returns when the head has not answered for long: another one has
        another identity, so this client is of no more use."""
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while loop.time() - answered_at < _SILENCE_S:
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_SILENCE_S):
                    await self.read_nodes()
                answered_at = loop.time()
            await asyncio.sleep(_POLL_S)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if peer_user(writer.get_extra_info("socket")) in (0, os.getuid()):
                await self._answer_call(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer_call(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        message = json.loads(await reader.readuntil(b"\n"))
        name = str(message["node"])
        source = str(message.get("source", ""))
        if not name:
            writer.write(json.dumps([*self._nodes.values()]).encode() + b"\n")
            await writer.drain()
            return
        line = await reader.readuntil(b"\n")
        source_line = await reader.readuntil(b"\n") if source else b""
        relay_task = asyncio.ensure_future(self._pass(name, line, writer, source, source_line))
        disconnect_task = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({relay_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relay_task, disconnect_task):
                task.cancel()
            await asyncio.gather(relay_task, disconnect_task, return_exceptions=True)

    async def _pass(
        self,
        name: str,
        line: bytes,
        writer: asyncio.StreamWriter,
        source: str,
        source_line: bytes,
    ) -> None:
        """Pass a call to the agent of a machine, and its answers back to the gateway."""
        relay: Any = None
        call: Any = None
        number = 0
        try:
            if absence := self._absence_reason(name) or (source and self._absence_reason(source)):
                writer.write(absence_line(absence))
                return
            relay = self._relay(name)
            feed = (self._relay(source), source_line) if source else ()
            call = relay.call.remote(line, *feed)
            number, chunk = await call
            call = None
            while chunk:
                writer.write(chunk)
                await writer.drain()
                chunk = await relay.read.remote(number) if number else b""
            number = 0
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.ActorDiedError):
                self._relays.pop(name, None)
            writer.write(
                absence_line(f"The machine {name} does not answer: {type(error).__name__}.")
            )
        finally:
            if number:
                relay.close.remote(number)
            elif call is not None:
                self._closures.close(relay, call)
            with contextlib.suppress(OSError):
                await writer.drain()

    def _absence_reason(self, name: str) -> str:
        """The reason why a machine cannot be called, in words; empty: there is none."""
        node = self._nodes.get(name)
        if node is not None and node["state"] == "alive":
            return ""
        reason = node["state"] if node is not None else "Ray does not know it"
        return f"The machine {name} is not in the cluster: {reason}."

    def _relay(self, name: str) -> Any:
        if name not in self._relays:
            options = {
                "num_cpus": 0,
                "resources": {RESOURCE + name: 0.001},
                "max_restarts": -1,
                "max_concurrency": 10_000,
            }
            self._relays[name] = self._ray.remote(Relay).options(**options).remote()
        return self._relays[name]


async def _wait_for_parent(stdin: int) -> None:
    """Wait for the end of the program that started this one."""
    while await asyncio.to_thread(os.read, stdin, 1024):
        pass


async def _run_link(ray: Any, path: Path) -> None:
    link = LinkServer(ray)
    await link.read_nodes()
    server = await asyncio.start_unix_server(link.serve, sock=listen(path), limit=_MAX_LINE_BYTES)
    poll_task = asyncio.ensure_future(link.poll_nodes())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    parent_task = asyncio.ensure_future(_wait_for_parent(sys.stdin.fileno()))
    async with server:
        await asyncio.wait({parent_task, poll_task}, return_when=asyncio.FIRST_COMPLETED)
    # Threads of both may never end.
    os._exit(0)


def main() -> None:
    head, path = sys.argv[1:]
    import ray

    ray.init(
        address=head,
        namespace="fitserve",
        log_to_driver=False,
        configure_logging=False,
        logging_level="ERROR",
    )
    # The actors end with the process.
    asyncio.run(_run_link(ray, Path(path)))


if __name__ == "__main__":
    main()
