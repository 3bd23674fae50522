"""A head with Redis behind it dies: engines and changes are as they were."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.e2e.written_cluster import kill_head, written_cluster
from tests.support.cluster_nodes import obstacle


def test_a_killed_head_with_redis_takes_no_engine_and_no_change_along() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    if shutil.which("redis-server") is None:
        pytest.skip("no Redis server is installed")
    with written_cluster(random.Random(1), has_redis=True) as cluster:
        cluster.begin(writers=1)
        kill_head(cluster)
