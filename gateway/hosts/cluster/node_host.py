"""One machine of the cluster as a host: the agent's host, over the link."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

from gateway.domain import LaunchSpec, NodeView, PreparedView
from gateway.errors import AgentAway
from gateway.hosts.agent.calls import (
    Answer,
    DrainCall,
    ExpectCall,
    NodeCall,
    PortCall,
    PreparedCall,
    ReceiveCall,
    SendCall,
)
from gateway.hosts.agent.host import AgentHost

ENVIRONMENT = "{environment}"
"""The folder of the engine's environment, in commands for a machine."""
PATH_START = r'(?:^|(?<=[=":]))'
"""Precedes a path in an argument: the pattern of its place."""
ANSWER_S = 10.0
"""Seconds that a machine may be silent."""


class NodeHost(AgentHost):
    kind: str = "process"

    def __init__(self, link: Path, name: str, owner: str, answer_s: float = ANSWER_S) -> None:
        """owner: the installation of the gateway; empty: for calls that change nothing."""
        preface = json.dumps({"node": name}).encode() + b"\n"
        super().__init__(link, timeout_s=answer_s, owner=owner, preface=preface)
        self.name = name

    @property
    def answer_s(self) -> float:
        """Seconds that the machine may be silent."""
        return self._timeout_s

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        await self.final_answer(ExpectCall(spec=spec), self._timeout_s)

    async def allocate_port(self) -> int:
        return (await self.final_answer(PortCall(), self._timeout_s)).port

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return (await self.final_answer(PreparedCall(), self._timeout_s)).prepared

    async def view(self) -> NodeView | None:
        return (await self.final_answer(NodeCall(), self._timeout_s)).node

    async def drain(self, *, is_drained: bool) -> NodeView | None:
        return (await self.final_answer(DrainCall(is_drained=is_drained), self._timeout_s)).node

    def receive(
        self, call: ReceiveCall, source: NodeHost, send: SendCall
    ) -> AsyncGenerator[Answer, None]:
        """The answers to a call that reads the answers of another machine to `send`."""
        preface = json.dumps({"node": self.name, "source": source.name}).encode() + b"\n"
        return self._answers(preface + self._call_line(call) + source._call_line(send), None)

    def _unreachable_error(self, reason: str) -> AgentAway:
        return AgentAway(
            f"The machine {self.name} does not answer: {reason}.",
            hint="Run `fitserve cluster status`. Its `fitserve cluster join` has a log.",
        )
