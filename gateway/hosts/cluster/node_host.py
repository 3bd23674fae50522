"""One machine of the cluster as a host: the agent's host, over the link."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.domain import LaunchSpec, NodeView, PreparedView
from gateway.hosts.agent.calls import DrainCall, ExpectCall, NodeCall, PortCall, PreparedCall
from gateway.hosts.agent.host import AgentHost

ENVIRONMENT = "{environment}"
"""The folder of the engine's environment, in commands for a machine."""
_ANSWER_S = 10.0


class NodeHost(AgentHost):
    kind: str = "process"

    def __init__(self, link: Path, name: str, owner: str) -> None:
        """owner: the installation of the gateway; empty: for calls that change nothing."""
        preface = json.dumps({"node": name}).encode() + b"\n"
        super().__init__(link, timeout_s=_ANSWER_S, owner=owner, preface=preface)
        self.name = name

    async def expect(self, spec: LaunchSpec) -> None:
        await self.final_answer(ExpectCall(spec=spec), _ANSWER_S)

    async def allocate_port(self) -> int:
        return (await self.final_answer(PortCall(), _ANSWER_S)).port

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return (await self.final_answer(PreparedCall(), _ANSWER_S)).prepared

    async def view(self) -> NodeView | None:
        return (await self.final_answer(NodeCall(), _ANSWER_S)).node

    async def drain(self, *, drained: bool) -> NodeView | None:
        return (await self.final_answer(DrainCall(drained=drained), _ANSWER_S)).node
