"""A machine as the probe reads it, the errors of its GPUs, and several machines as a cluster.

A reading that the machine does not give is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gateway.domain.base import ConfigDict, Field
from gateway.domain.value import MAX_BYTES, Value


class GpuProcess(Value):
    pid: int
    name: str | None = None
    used_bytes: int | None = None


class Pcie(Value):
    """A PCIe link, now and at best: an idle card lowers its generation."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class Gpu(Value):
    index: int
    uuid: str
    name: str
    capability: str | None = Field(
        None,
        pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$",
        description='CUDA compute capability, for example "8.6"',
    )
    total_bytes: int | None = Field(None, ge=1, le=MAX_BYTES)
    free_bytes: int | None = Field(None, ge=0, le=MAX_BYTES)
    memory_kind: Literal["dedicated", "unified"] = "dedicated"
    mig: bool | None = None
    pcie: Pcie = Pcie()
    processes: tuple[GpuProcess, ...] | None = None
    loss_reason: str | None = Field(
        None, description="why nothing is started on it: what failed", alias="lost"
    )
    reservation_reason: str | None = Field(
        None,
        exclude_if=lambda reason: reason is None,
        description="why nothing is started on it: the setting that keeps it from fitserve",
        alias="kept",
    )
    host_bytes: int | None = Field(
        None,
        ge=0,
        le=MAX_BYTES,
        exclude_if=lambda count: count is None,
        description=(
            "bytes that stay free for the host where GPU and host share memory, by"
            " FITSERVE_HOST_BYTES"
        ),
    )


class Link(Value):
    """How GPUs `a` and `b` (indices) reach each other."""

    a: int
    b: int
    nvlinks: int | None = Field(None, description="active NVLink links between the two")
    p2p: bool | None = Field(None, description="whether the driver says peer-to-peer reads work")
    p2p_status: str | None = Field(None, description="the driver's reason when they do not")


ASSUMED_CARD = "taken for"
"""Begins the note on a machine's name that several cards fit."""


class Hardware(Value):
    """A host. gpus: empty on a CPU-only machine."""

    schema_: Literal["fitserve.hardware/1"] = Field("fitserve.hardware/1", alias="schema")
    arch: str
    cpu_name: str | None = None
    cpu_cores: int
    cpu_features: tuple[str, ...] = Field(
        (), description="instruction sets that decide kernels: avx2, avx512f, amx_bf16"
    )
    ram_total_bytes: int = Field(ge=0, le=MAX_BYTES)
    ram_available_bytes: int = Field(ge=0, le=MAX_BYTES)
    shm_bytes: int | None = None
    disk_free_bytes: int | None = None
    driver: str | None = Field(None, max_length=64)
    cuda_driver: str | None = Field(
        None, description='highest CUDA version of the driver, for example "13.0"'
    )
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = Field((), description="readings that failed, and why")

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    def usable(self) -> Hardware:
        """The machine without GPUs that are lost or reserved for others."""
        return self.select_gpus(
            lambda gpu: gpu.loss_reason is None and gpu.reservation_reason is None
        )

    def select_gpus(self, predicate: Callable[[Gpu], bool]) -> Hardware:
        """The machine with the GPUs that the predicate accepts, and the links between them."""
        gpus = tuple(gpu for gpu in self.gpus if predicate(gpu))
        indices = {gpu.index for gpu in gpus}
        links = tuple(link for link in self.links if link.a in indices and link.b in indices)
        return self.evolve(gpus=gpus, links=links)


RdmaKind = Literal["infiniband", "roce", "none"]


class RdmaPort(Value):
    """The RDMA of a network interface. bytes_s: the rate of the port by its driver."""

    kind: RdmaKind
    bytes_s: float | None = Field(None, gt=0, le=1e15)


class Network(Value):
    """A connection between two nodes. None: not known."""

    bytes_s: float | None = Field(
        None, gt=0, le=1e15, description="bytes per second of one direction"
    )
    latency_s: float | None = Field(
        None, ge=0, le=10, description="seconds that a small message takes one way"
    )
    rdma: RdmaKind | None = Field(
        None, description="whether a node reads another node's memory without its processor"
    )
    tcp_bytes_s: float | None = Field(
        None,
        gt=0,
        le=1e15,
        exclude_if=lambda rate: rate is None,
        description="bytes per second of one direction that TCP carried in a measurement",
    )


class NodeLink(Network):
    """The network between the nodes `a` and `b`, by name."""

    a: str
    b: str
    measured_at: float | None = Field(
        None,
        exclude_if=lambda time: time is None,
        description="time of the measurement in Unix seconds",
    )


class Node(Value):
    """A machine of a cluster."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")
    hardware: Hardware
    address: str | None = Field(
        None, max_length=253, description="where other nodes reach it; None: not known"
    )
    interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.:@-]{1,15}$",
        description="network interface of that address, by name; None: not known",
    )
    rdma: RdmaPort | None = Field(
        None,
        exclude_if=lambda port: port is None,
        description="RDMA of that interface; None: not known",
    )
    ports: tuple[int, ...] = Field((), description="ports that are in use there")
    weights: tuple[str, ...] = Field(
        (), description="models whose weights are on its disk, as `source` or `source@revision`"
    )


class Cluster(Value):
    """Several nodes with unique names and GPUs.

    network: the network between nodes that `links` does not name.
    """

    schema_: Literal["fitserve.cluster/1"] = Field("fitserve.cluster/1", alias="schema")
    nodes: tuple[Node, ...] = Field(min_length=1, max_length=1024)
    links: tuple[NodeLink, ...] = ()
    network: Network = Network()

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Xid(Value):
    """An error number of NVIDIA's driver."""

    meaning: str = Field(alias="means")
    action: str = Field(description="step that NVIDIA's catalog asks for first")
    loses_gpu: bool = Field(
        description="the GPU does no work until it was reset; else only the application is hurt",
        alias="lost",
    )


class XidTable(Value):
    """The meaning of each error number of NVIDIA's driver (profiles/xids.yaml)."""

    source: str
    xids: dict[int, Xid]
