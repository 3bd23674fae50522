"""The calls of measurements that a node answers, one at a time and only on a quiet network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gateway.errors import HostError
from gateway.hosts.agent.calls import (
    Answer,
    DoneAnswer,
    ListenAnswer,
    ListenCall,
    MeasureCall,
)
from gateway.hosts.cluster.networks.ends import Listener, measure
from gateway.machine import network

_LOOK_S = 0.25
# A copy of weights, or ranks of an engine. Ray's own traffic is a thousandth.
_BUSY_BYTES_S = 4e6


class NetworkServer:
    """Answers calls on the address of a node."""

    def __init__(self, name: str, address: str) -> None:
        """name: the node's."""
        self._name = name
        self._address = address
        self._turn = asyncio.Lock()

    async def answers(self, call: ListenCall | MeasureCall) -> AsyncGenerator[Answer, None]:
        """The answers to a call. Raises HostError."""
        if self._turn.locked():
            raise HostError(
                f"{self._name} measures another network now.",
                hint="No action is needed: the gateway tries again later.",
            )
        async with self._turn:
            await self._check_traffic()
            try:
                match call:
                    case ListenCall():
                        listener = Listener(self._address)
                        try:
                            yield ListenAnswer(
                                address=self._address, port=listener.port, key=listener.key
                            )
                            await asyncio.to_thread(listener.serve)
                        finally:
                            listener.close()
                        yield DoneAnswer()
                    case MeasureCall():
                        figures = await asyncio.to_thread(
                            measure, call.address, call.port, call.key
                        )
                        yield DoneAnswer(network=figures)
            except OSError as error:
                raise HostError(
                    f"The network of {self._name} cannot be measured:"
                    f" {error.strerror or type(error).__name__}.",
                    hint="Let the machines of the cluster reach each other on all ports.",
                ) from None

    async def _check_traffic(self) -> None:
        """Refuse a measurement that would slow others down, and come out too low. Raises
        HostError."""
        interface = await asyncio.to_thread(network.find_interface, self._address)
        if interface is None:
            return
        first_count = await asyncio.to_thread(network.traffic_bytes, interface)
        await asyncio.sleep(_LOOK_S)
        last_count = await asyncio.to_thread(network.traffic_bytes, interface)
        if first_count is None or last_count is None:
            return
        rate = (last_count - first_count) / _LOOK_S
        if rate > _BUSY_BYTES_S:
            raise HostError(
                f"The network of {self._name} carries more than {_BUSY_BYTES_S / 1e6:g} MB/s now.",
                hint="No action is needed: the gateway tries again later.",
            )
