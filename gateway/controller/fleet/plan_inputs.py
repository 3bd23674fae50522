"""The inputs of plans, and the changes that may give a plan to a model without one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.controller.fleet.planning_context import PlanningContext
from gateway.domain import Hardware
from gateway.domain.units import MIB

# Free memory moves a little all the time. A plan needs more than this share of a device.
_BAND_SHARE = 1 / 50
_MIN_BAND_BYTES = 256 * MIB
_GPU_FIELDS = (
    "uuid",
    "name",
    "capability",
    "total_bytes",
    "memory_kind",
    "mig",
    "loss_reason",
    "reservation_reason",
)
_MACHINE_FIELDS = ("arch", "cpu_features", "ram_total_bytes", "shm_bytes", "driver", "cuda_driver")

FreeMemory = dict[str, tuple[int, int]]
"""Free and all bytes of each device; "" is the host."""


class Knowledge(NamedTuple):
    """Digests of facts and engines.

    engines: the digest of installed engines, of learned versions and of facts that may allow a
        plan.
    refusals: the digests of facts that only rule plans out.
    """

    engines: int
    refusals: frozenset[int]

    def may_help(self, former_state: Knowledge) -> bool:
        """Whether the changed inputs could allow a plan. Additional refusals alone cannot."""
        return self.engines != former_state.engines or bool(former_state.refusals - self.refusals)


class PlanInputs(NamedTuple):
    """The inputs of a model's plans other than its wish and its neighbours.

    files: a digest of the files of the model.
    """

    machine: tuple[Any, ...]
    free_memory: FreeMemory
    knowledge: Knowledge
    files: int = 0

    def may_help(self, former_state: PlanInputs) -> bool:
        """Whether a model without a plan by the former inputs may have one by these."""
        return (
            (self.machine, self.files) != (former_state.machine, former_state.files)
            or self.knowledge.may_help(former_state.knowledge)
            or has_more_memory(self.free_memory, former_state.free_memory)
        )


class ContextState(NamedTuple):
    """The context that a model was planned in: a digest of offers and wish, and the neighbours.

    inputs_digest: the digest of offers and wish; None if the context changed while the plan was
        made, so any other plan may help.
    """

    inputs_digest: int | None
    promised_bytes: dict[str, int]
    holders: frozenset[str]

    def may_help(self, former_state: ContextState) -> bool:
        """Whether a plan may be possible that was not. More promised bytes never allow one."""
        return (
            self.inputs_digest != former_state.inputs_digest
            or bool(former_state.holders - self.holders)
            or any(
                self.promised_bytes.get(name, 0) < size
                for name, size in former_state.promised_bytes.items()
            )
        )


class PlanBasis(NamedTuple):
    """All that the plan of one replica was made of. answers: those of engines, and its pins."""

    inputs: PlanInputs
    context_state: ContextState
    answers: tuple[object, ...]

    def may_help(self, former_state: PlanBasis) -> bool:
        """Whether this basis could give a plan to a replica that had none with the former basis."""
        return (
            self.answers != former_state.answers
            or self.context_state.may_help(former_state.context_state)
            or self.inputs.may_help(former_state.inputs)
        )


class FailedPlanning(NamedTuple):
    """A plan that found nothing.

    waits_for_request: see `ReplicaState`.
    at: monotonic seconds.
    """

    basis: PlanBasis
    reason: str
    waits_for_request: bool
    at: float


def machine_and_memory(hardware: Hardware) -> tuple[tuple[Any, ...], FreeMemory]:
    """The fixed values of a machine that plans depend on, and its free memory."""
    fixed_fields = (
        tuple(getattr(hardware, name) for name in _MACHINE_FIELDS),
        tuple(tuple(getattr(gpu, name) for name in _GPU_FIELDS) for gpu in hardware.gpus),
    )
    free_memory = {"": (hardware.ram_available_bytes, hardware.ram_total_bytes)}
    free_memory |= {
        gpu.uuid: (gpu.free_bytes, gpu.total_bytes or 0)
        for gpu in hardware.gpus
        if gpu.free_bytes is not None
    }
    return fixed_fields, free_memory


def context_state(context: PlanningContext) -> ContextState:
    """The state of a context."""
    sharing = context.sharing
    values = (context.wish, sharing.cap, *sharing.offers, *context.offers_on_request)
    return ContextState(
        hash(
            (
                *(value.model_dump_json() if value is not None else "" for value in values),
                sharing.former_gpus,
                sharing.leave_reason,
                sharing.plan_to_restore.fingerprint if sharing.plan_to_restore is not None else "",
                context.is_copy,
            )
        ),
        dict(context.promised_bytes),
        frozenset(holder.model for holder in sharing.promises),
    )


def has_more_memory(
    current_memory: Mapping[str, tuple[int, int]], former_memory: FreeMemory
) -> bool:
    """Whether a device is new, or has clearly more free memory. Less never allows a plan."""
    return any(
        name not in former_memory
        or free_bytes - former_memory[name][0] > max(_MIN_BAND_BYTES, total * _BAND_SHARE)
        for name, (free_bytes, total) in current_memory.items()
    )
