"""How many examples hypothesis tries: all of them in CI, half of them where somebody waits."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    return count if os.environ.get("CI") else count // 2
