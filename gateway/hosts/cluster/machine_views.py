"""The machines of a cluster as users see them, from Ray's states and the node services. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.domain import MachineView, Node, NodeView


def machine_views(states: Mapping[str, str], views: Iterable[NodeView]) -> Sequence[MachineView]:
    """The machines that Ray knows, by name. states: as `node_states` gives them."""
    view_by_name = {view.name: view for view in views}
    return [
        _machine_view(name, state, view_by_name.get(name)) for name, state in sorted(states.items())
    ]


def node_of(view: NodeView) -> Node:
    """The machine for the planner."""
    return Node(
        name=view.name,
        hardware=view.hardware,
        address=view.address,
        interface=view.interface,
        rdma=view.rdma,
        ports=view.ports,
        weights=view.weights,
    )


def _machine_view(name: str, state: str, view: NodeView | None) -> MachineView:
    if view is None:
        return MachineView(name=name, state="no node service" if state == "alive" else state)
    return MachineView(
        name=name,
        state="drained" if view.is_drained else "ready",
        address=view.address,
        gpus=tuple(gpu.name for gpu in view.hardware.gpus),
        engines=view.engines,
        owner=view.owner,
    )
