"""Listening sockets that somebody else has opened, for workers."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from gateway.proxy.workers.sockets import assign_sockets


@pytest.mark.parametrize(
    ("sockets", "workers", "expected"),
    [
        (2, 2, [[0], [1]]),
        (4, 2, [[0, 2], [1, 3]]),
        (3, 2, [[0, 2], [1]]),
        (1, 3, [[0], [0], [0]]),
        (2, 3, [[0], [1], [0]]),
    ],
)
def test_each_socket_has_a_worker_and_each_worker_a_socket(
    sockets: int, workers: int, expected: list[list[int]]
) -> None:
    with ExitStack() as stack:
        resources = [stack.enter_context(socket.socket()) for _ in range(sockets)]
        assert [
            [resources.index(socket_of_worker) for socket_of_worker in sockets_of_worker]
            for sockets_of_worker in assign_sockets(resources, workers)
        ] == expected
