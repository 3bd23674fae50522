"""Machines and networks of a cluster by their short forms."""

from __future__ import annotations

import pytest

from gateway.domain import Network
from gateway.errors import BadRequest, NotFound
from gateway.profiles.cluster_forms import parse_network
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()


@pytest.mark.parametrize(
    ("form", "gpus"),
    [
        ("2xgb10", [1, 1]),
        ("2x(8xh100)", [8, 8]),
        ("2x(gb10)+(4x3090)", [1, 1, 4]),
        ("(3090)", [1]),
    ],
)
def test_a_form_names_machines(form: str, gpus: list[int]) -> None:
    cluster = PROFILES.cluster(form, None)
    assert cluster is not None
    assert [len(node.hardware.gpus) for node in cluster.nodes] == gpus
    uuids = [gpu.uuid for node in cluster.nodes for gpu in node.hardware.gpus]
    assert len(set(uuids)) == sum(gpus)


def test_a_snapshot_is_one_machine_as_ever() -> None:
    for path in (shipped_profiles() / "hardware").glob("*.json"):
        assert PROFILES.cluster(path.stem, None) is None


@pytest.mark.parametrize("form", ["6x3071", "2x(no-such)", "2xno-such"])
def test_other_texts_are_no_machines(form: str) -> None:
    assert PROFILES.cluster(form, None) is None
    with pytest.raises(NotFound):
        PROFILES.hardware(form)


@pytest.mark.parametrize("form", ["0x(3090)", "9999x(3090)"])
def test_a_cluster_has_machines_and_not_too_many(form: str) -> None:
    with pytest.raises(BadRequest):
        PROFILES.cluster(form, None)


def test_a_network_keeps_unknown_parts_unknown() -> None:
    assert parse_network("200gbit,2us,roce") == Network(bytes_s=25e9, latency_s=2e-6, rdma="roce")
    assert parse_network("10gbit") == Network(bytes_s=1.25e9)
    assert parse_network("unknown") == Network()
    for text in ("fast", "0gbit", "10gb"):
        with pytest.raises(BadRequest):
            parse_network(text)
