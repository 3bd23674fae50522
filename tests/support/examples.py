"""How many examples a random test tries: all in CI, half elsewhere, an eighth with QUICK."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """The number of examples to try where CI tries `count`."""
    return count if os.environ.get("CI") else quicker(count // 2)


def quicker(count: int) -> int:
    """The number of examples to try where every machine tries `count`: a quarter with QUICK."""
    return max(3, count // 4) if os.environ.get("QUICK") else count
