"""Compiled code of engines is kept until it takes too much room."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.hosts.process.caches import Caches


def test_the_cache_unused_for_longest_goes_first_and_one_in_use_never(tmp_path: Path) -> None:
    caches = Caches(tmp_path, most_bytes=250)
    paths = [
        caches.path(Path("engines") / version, "installed once", cache)
        for version in ("v1", "v2")
        for cache in ("a", "b")
    ]
    assert len({*paths}) == 4
    for age, path in enumerate(paths):
        assert caches.make(path, {"KERNELS": "kernels"}) == {
            "HOME": str(path),
            "KERNELS": str(path / "kernels"),
        }
        (path / "kernels/one").write_bytes(b"x" * 100)
        os.utime(path, (1000 + age, 1000 + age))
    caches.trim({paths[0]})
    assert [path.exists() for path in paths] == [True, False, False, True]
    caches.remove(Path("engines/v1"))
    assert [path.exists() for path in paths] == [False, False, False, True]
