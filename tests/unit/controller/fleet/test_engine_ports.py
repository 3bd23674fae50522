"""The ports that an engine takes on its host."""

from __future__ import annotations

from gateway.controller.fleet.engine_ports import engine_ports
from gateway.domain import EngineRef, int_choice
from tests.support.makers import plan


def test_sglang_derives_ports_for_groups_of_ranks() -> None:
    """PortArgs.init_new in sglang/srt/server_args.py: from 233 above the port on."""
    lone_plan = plan().evolve(engine=EngineRef(kind="sglang", version="0.5.23", image="i"))
    plan_of_groups = lone_plan.evolve(data_parallel=int_choice(4, "test", "test"))
    assert engine_ports(lone_plan, 8001) == {8001}
    ports = engine_ports(plan_of_groups, 8001)
    assert {8001, 8234, 8240} <= ports
    assert 8002 not in ports
    # The next port would derive some of the same.
    assert not ports.isdisjoint(engine_ports(plan_of_groups, 8002))
    vllm = plan_of_groups.evolve(engine=EngineRef(kind="vllm", version="0.33.0", image="i"))
    assert engine_ports(vllm, 8001) == {8001}
