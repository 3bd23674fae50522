"""A cluster under writers: a partition that heals, a head that dies, and a machine that
starts no engines."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster_partition import Partition
from tests.e2e.written_cluster import WrittenCluster, kill_head, written_cluster
from tests.support.cluster_nodes import obstacle
from tests.support.patience import HANG_S, Patience

LEASE_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[WrittenCluster]:
    """Skips the test where namespaces or Ray are missing."""
    if reason := obstacle():
        pytest.skip(reason)
    with written_cluster(random.Random(1), lease_s=LEASE_S) as cluster:
        cluster.begin(writers=1)
        yield cluster


def test_a_partition_that_heals_leaves_no_twin_orphan_or_lost_change(
    cluster: WrittenCluster,
) -> None:
    times = Partition(cluster, random.Random(1), LEASE_S).run(seconds=1)
    assert min(times.engines) > 0, "nothing was left to stop"


def test_a_killed_head_takes_no_engine_and_no_change_along(cluster: WrittenCluster) -> None:
    kill_head(cluster)


def test_models_leave_a_drained_machine_with_their_next_start(cluster: WrittenCluster) -> None:
    cluster.fill()
    second_node = cluster.nodes.second
    engines = cluster.engines_of(second_node)
    drain(cluster)
    try:
        cluster.add_model("kept")
        cluster.await_models()
        # Engines that run go on.
        assert cluster.engines_of(second_node) == engines
        for step in ("stop", "start"):
            for model in cluster.gateway.read("/admin/models")["data"]:
                path = f"/admin/models/{model['name']}/{step}"
                cluster.gateway.client.post(path).raise_for_status()
        patience = Patience(2 * HANG_S)
        while cluster.engines_of(second_node) or cluster.serving_instances() is None:
            assert not patience.is_over(), "an engine stays on the drained machine"
            time.sleep(patience.pause_s(0.1))
    finally:
        drain(cluster, "--undo")
    cluster.add_model("new")
    cluster.await_health("the machine starts engines again")
    assert len(cluster.engines_of(second_node)) == 1
    for name in ("kept", "new"):
        cluster.gateway.client.delete(f"/admin/models/{name}").raise_for_status()


def drain(cluster: WrittenCluster, *options: str) -> None:
    result = cluster.nodes.head.fitserve("cluster", "drain", cluster.nodes.second.name, *options)
    assert result.returncode == 0, result.stderr
