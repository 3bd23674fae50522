"""RDMA of interfaces, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.domain import RdmaPort
from gateway.machine.rdma import rdma_port


class System:
    """Files of /sys and /dev."""

    def __init__(self, folder: Path) -> None:
        self.system, self.devices = folder / "sys", folder / "dev"
        self.devices.mkdir()

    def write(self, path: str, text: str = "") -> None:
        file = self.system / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def add_interface(self, name: str, port: int = 0) -> None:
        self.write(f"class/net/{name}/dev_port", str(port))

    def add_device(
        self,
        name: str,
        interface: str,
        layer: str = "Ethernet",
        state: str = "4: ACTIVE",
        rate: str = "200 Gb/sec (4X HDR)",
        node_type: str = "1: CA",
        port: int = 1,
    ) -> None:
        device = f"class/infiniband/{name}"
        self.write(f"{device}/node_type", node_type)
        self.write(f"{device}/device/infiniband_verbs/uverbs-{name}/dev")
        self.write(f"{device}/device/net/{interface}/address")
        self.write(f"{device}/ports/{port}/state", state)
        self.write(f"{device}/ports/{port}/link_layer", layer)
        self.write(f"{device}/ports/{port}/rate", rate)
        file = self.devices / "infiniband" / f"uverbs-{name}"
        file.parent.mkdir(exist_ok=True)
        file.touch()

    def port(self, interface: str) -> RdmaPort | None:
        return rdma_port(interface, self.system, self.devices)


@pytest.fixture
def system(tmp_path: Path) -> System:
    files = System(tmp_path)
    files.add_interface("eth0")
    files.add_interface("enp1s0f0np0")
    return files


def test_an_unknown_interface_has_unknown_rdma(system: System) -> None:
    assert system.port("eth7") is None


def test_an_interface_without_a_device_has_none(system: System) -> None:
    assert system.port("eth0") == RdmaPort(kind="none")
    system.add_device("mlx5_0", "enp1s0f0np0")
    assert system.port("eth0") == RdmaPort(kind="none")


@pytest.mark.parametrize(("layer", "kind"), [("Ethernet", "roce"), ("InfiniBand", "infiniband")])
def test_the_layer_of_an_active_port_is_its_kind(system: System, layer: str, kind: str) -> None:
    system.add_device("mlx5_0", "enp1s0f0np0", layer)
    port = system.port("enp1s0f0np0")
    assert port is not None
    assert (port.kind, port.bytes_s) == (kind, 25e9)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "1: DOWN"},
        {"state": "2: INIT"},
        {"node_type": "4: RNIC"},
        {"layer": "Unspecified"},
        {"port": 2},
    ],
    ids=str,
)
def test_a_port_that_carries_no_data_counts_as_none(system: System, fields: dict[str, str]) -> None:
    system.add_device("mlx5_0", "enp1s0f0np0", **fields)  # type: ignore[arg-type]
    assert system.port("enp1s0f0np0") == RdmaPort(kind="none")


def test_a_device_that_engines_cannot_open_counts_as_none(system: System) -> None:
    system.add_device("mlx5_0", "enp1s0f0np0")
    (system.devices / "infiniband/uverbs-mlx5_0").unlink()
    assert system.port("enp1s0f0np0") == RdmaPort(kind="none")


def test_an_unreadable_rate_stays_unknown(system: System) -> None:
    system.add_device("mlx5_0", "enp1s0f0np0", rate="")
    assert system.port("enp1s0f0np0") == RdmaPort(kind="roce")


def test_a_bond_has_the_port_of_an_interface_below_it(system: System) -> None:
    system.add_interface("bond0")
    system.write("class/net/bond0/lower_enp1s0f0np0/mtu", "9000")
    system.add_device("mlx5_0", "enp1s0f0np0")
    assert system.port("bond0") == RdmaPort(kind="roce", bytes_s=25e9)
