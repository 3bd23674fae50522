"""Exemption of the start's objects from garbage collection, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from gateway.garbage import exempt_start_objects

class Node:
    pass

gc.disable()
cycle = Node()
cycle.other = cycle
reference = weakref.ref(cycle)
del cycle
table = [[] for _ in range(10_000)]
exempt_start_objects()
print(reference() is None, gc.get_freeze_count() >= 10_000, len(gc.get_objects()) < 1_000)
"""


def test_start_objects_are_exempt_and_their_garbage_is_collected() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["True"] * 3
