"""The nodes of a cluster with the free memory that a plan may count on. Pure."""

from __future__ import annotations

from gateway.domain import Cluster, Hardware, Node


def cluster_beside(cluster: Cluster, machine: Hardware) -> Cluster:
    """The cluster whose GPUs have as much free memory as those of the machine, by UUID.

    machine: the GPUs of all nodes, or of some, without the engines that a plan takes away.
    """
    free_bytes = {gpu.uuid: gpu.free_bytes for gpu in machine.gpus}

    def adjust(node: Node) -> Node:
        machine = node.hardware
        if all(free_bytes.get(gpu.uuid, gpu.free_bytes) == gpu.free_bytes for gpu in machine.gpus):
            return node
        gpus = (
            gpu.evolve(free_bytes=free_bytes.get(gpu.uuid, gpu.free_bytes)) for gpu in machine.gpus
        )
        return node.evolve(hardware=machine.evolve(gpus=tuple(gpus)))

    return cluster.evolve(nodes=tuple(map(adjust, cluster.nodes)))
