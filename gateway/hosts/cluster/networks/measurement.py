"""A measurement of the network between two machines, ordered by the gateway."""

from __future__ import annotations

from contextlib import aclosing

from gateway.domain import Network
from gateway.errors import HostError
from gateway.hosts.agent.calls import ListenAnswer, ListenCall, MeasureCall
from gateway.hosts.agent.host import AgentHost

# Longer than a whole measurement.
_ANSWER_S = 40.0


async def measure_between(a: AgentHost, b: AgentHost) -> Network:
    """The network between two machines: `b` listens, and `a` connects. Raises HostError, also where
    a machine is busy."""
    async with aclosing(b.answers(ListenCall(), _ANSWER_S)) as answers:
        async for answer in answers:
            if isinstance(answer, ListenAnswer):
                call = MeasureCall(address=answer.address, port=answer.port, key=answer.key)
                network = (await a.final_answer(call, _ANSWER_S)).network
                if network is not None and network.tcp_bytes_s is not None:
                    return network
                break
    raise HostError(
        "No bytes came through between the machines.",
        hint="Check the network between them.",
    )
