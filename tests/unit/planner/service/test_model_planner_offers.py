"""Memory that other models give on the machines of a cluster."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.domain import Network, Offer, Sharing, Wish
from gateway.domain.plan_request import PlanRequest, RunningPlan
from gateway.planner.nodes.free_memory import cluster_beside
from gateway.planner.parallel import drop_engines
from gateway.planner.service.machine_planner import _join_nodes
from gateway.planner.service.offline import OfflinePlanner
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from tests.support.makers import GIB
from tests.support.paths import MODELS

HELD_BYTES = 21 * GIB


@pytest.fixture
def wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wish:
    shutil.copy(MODELS / "llama-3.1-8b.json", tmp_path / "config.json")
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    return Wish(name="m", source=str(tmp_path), engines=("vllm",), context=4096)


def full_request(wish: Wish) -> PlanRequest:
    """A request on two machines, each with one GPU that an engine fills."""
    cluster = build_cluster([Profiles().hardware("3090")] * 2, Network())
    uuids = [gpu.uuid for node in cluster.nodes for gpu in node.hardware.gpus]
    cluster = cluster_beside(
        cluster, drop_engines(_join_nodes(cluster), dict.fromkeys(uuids, -HELD_BYTES))
    )
    return PlanRequest(
        wish,
        machine=_join_nodes(cluster),
        promised_bytes=dict.fromkeys(uuids, HELD_BYTES),
        cluster=cluster,
        needs_weights=False,
    )


def test_a_model_takes_the_place_that_another_model_leaves_on_its_machine(wish: Wish) -> None:
    request = full_request(wish)
    planner = OfflinePlanner.read_environment()
    assert not planner.decide_request(request).plans
    uuid = [*request.promised_bytes][1]
    offer = Offer(model="other", kind="stop", bytes_by_gpu={uuid: HELD_BYTES}, words="other stops")
    decision = planner.decide_request(replace(request, sharing=Sharing(offers=(offer,))))
    assert [(row.model, row.kind, row.bytes_by_gpu) for row in decision.taken_offers] == [
        ("other", "stop", offer.bytes_by_gpu)
    ]
    assert decision.plans[0].gpus == (uuid,)
    assert [row.node for row in decision.plans[0].nodes] == ["node-2"]


def test_a_running_plan_is_compared_without_its_own_memory(wish: Wish) -> None:
    request = full_request(wish)
    planner = OfflinePlanner.read_environment()
    empty_cluster = build_cluster([Profiles().hardware("3090")] * 2, Network())
    first_request = PlanRequest(
        wish, machine=_join_nodes(empty_cluster), cluster=empty_cluster, needs_weights=False
    )
    running_plan = planner.decide_request(first_request).plans[0]
    (uuid,) = running_plan.gpus
    promised_bytes = {name: size for name, size in request.promised_bytes.items() if name != uuid}
    running = RunningPlan(running_plan, {uuid: HELD_BYTES})
    later_request = replace(request, promised_bytes=promised_bytes, running=running)
    assert planner.decide_request(later_request).plans[0].gpus == (uuid,)
