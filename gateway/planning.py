"""From a wish to a decision: reads the model, looks at the machine, and asks the planner, which is pure.

`decide_with` is one decision for a model that was read; `MachinePlanner` plans for the machine of a gateway that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.catalog.catalog import read, read_drafter
from gateway.catalog.hub import Hub
from gateway.core.facts.scope import standing
from gateway.core.planner.decide import decide
from gateway.core.speculative.drafter import Drafter
from gateway.domain import Decision, Engine, Fact, Hardware, ModelSpec, Wish
from gateway.errors import BadModel, NoPlan
from gateway.hosts.process.environment import is_installed
from gateway.profiles import Profiles

# Only for types: a command must not pay for what a gateway needs.
if TYPE_CHECKING:
    from gateway.machine.gpu_watch import GpuWatch
    from gateway.settings import Settings


def decide_with(
    profiles: Profiles,
    engines: Sequence[Engine],
    spec: ModelSpec,
    drafter: Drafter | None,
    hardware: Hardware,
    wish: Wish,
    facts: Iterable[Fact] = (),
    claims: Mapping[str, int] | None = None,
    hardware_name: str = "this machine",
) -> Decision:
    """The decision for a model and a machine, by the rules and the facts of the profiles, and by `facts`. Raises BadFlag."""
    rules, known = profiles.rules(engines), (*profiles.facts, *facts)
    return decide(spec, hardware, engines, wish, known, claims, hardware_name, rules, drafter, profiles.gpus)


@dataclass(frozen=True)
class MachinePlanner:
    """Plans for this machine. `gateway.controller.planner` is its contract.

    installed_only: engines run as processes here, so only an engine that is installed can be planned.
    """

    settings: Settings
    profiles: Profiles
    hub: Hub
    gpus: GpuWatch
    installed_only: bool

    async def hardware(self) -> Hardware:
        return await asyncio.to_thread(self.gpus.hardware, self.settings.data)

    async def decide(self, wish: Wish, facts: list[Fact], claims: Mapping[str, int], hardware: str | None = None) -> Decision:
        if wish.source is None:
            raise BadModel(f"The model {wish.name} is an endpoint; there is nothing to plan.", hint="Give a `source` instead.")
        machine = self.profiles.hardware(hardware) if hardware else await self.hardware()
        spec = await read(wish.source, revision=wish.revision, allow_remote_code=wish.policy.allow_remote_code, hub=self.hub)
        engines = self.profiles.engines(wish.engines, device="cuda" if machine.gpus else "cpu")
        if self.installed_only and hardware is None:
            engines = self._installed(engines, wish)
        learned = standing(facts, machine.driver, self.profiles.images)
        drafter = await read_drafter(wish.drafter, hub=self.hub) if wish.drafter else None
        name = hardware or "this machine"
        return decide_with(self.profiles, engines, spec, drafter, machine.without_lost_gpus(), wish, learned, claims, name)

    def _installed(self, engines: list[Engine], wish: Wish) -> list[Engine]:
        """Those of the engines that are installed. Raises NoPlan that says how to install one."""
        here = [engine for engine in engines if is_installed(self.settings.data, engine)]
        if not here:
            wanted = engines[0].ref if engines else "an engine"
            raise NoPlan(
                f"No engine that could serve {wish.name} is installed here.",
                hint=f"Run `fitserve engine install {wanted}`; this machine has no Docker Engine to run containers.",
            )
        return here
