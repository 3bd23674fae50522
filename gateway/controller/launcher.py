"""The effects that the loop starts for a replica: plan, launch. Each may take minutes and reports how far it is.

Nothing here decides or records; what an effect finds goes back to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.catalog.catalog import read, read_drafter
from gateway.catalog.hub import Hub
from gateway.core.facts.scope import standing
from gateway.core.planner.decide import decide
from gateway.core.planner.flags import launch_spec
from gateway.domain import Attempt, Decision, Engine, Fact, Hardware, LaunchSpec, ModelRef, Mount, Wish
from gateway.errors import BadModel, NoPlan
from gateway.hosts.host import Host
from gateway.machine.gpu_watch import GpuWatch, without_lost_gpus
from gateway.profiles import Profiles
from gateway.settings import Settings

Report = Callable[[str], None]


@dataclass(frozen=True)
class Launcher:
    """Bundles what the effects need: where profiles, models and engines come from, and where they run."""

    settings: Settings
    profiles: Profiles
    hub: Hub
    host: Host
    gpus: GpuWatch

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        return await asyncio.to_thread(self.gpus.hardware, self.settings.data)

    async def decide(self, wish: Wish, facts: list[Fact], claims: Mapping[str, int], hardware: str | None = None) -> Decision:
        """Read the model, look at the machine (or at a snapshot) and plan. Raises BadModel, BadFlag, NotFound."""
        if wish.source is None:
            raise BadModel(f"The model {wish.name} is an endpoint; there is nothing to plan.", hint="Give a `source` instead.")
        machine = self.profiles.hardware(hardware) if hardware else await self.hardware()
        spec = await read(wish.source, revision=wish.revision, allow_remote_code=wish.policy.allow_remote_code, hub=self.hub)
        engines = self.profiles.engines(wish.engines, device="cuda" if machine.gpus else "cpu")
        if self.host.kind == "process" and hardware is None:
            engines = self._installed(engines, wish)
        rules = self.profiles.rules(engines)
        known = (*self.profiles.facts, *standing(facts, machine.driver, self.profiles.images))
        drafter = await read_drafter(wish.drafter, hub=self.hub) if wish.drafter else None
        return decide(
            spec,
            without_lost_gpus(machine),
            engines,
            wish,
            known,
            claims,
            hardware or "this machine",
            rules,
            drafter,
            self.profiles.gpus,
        )

    def _installed(self, engines: list[Engine], wish: Wish) -> list[Engine]:
        """As processes only installed engines can run; naming none of them must say how to get one."""
        here = [engine for engine in engines if (engine_dir(self.settings, engine) / ".complete").is_file()]
        if not here:
            wanted = engines[0].ref if engines else "an engine"
            raise NoPlan(
                f"No engine that could serve {wish.name} is installed here.",
                hint=f"Run `fitserve engine install {wanted}`; this machine has no Docker Engine to run containers.",
            )
        return here

    async def launch(self, attempt: Attempt, report: Report, *, allow_remote_code: bool) -> None:
        """Bring engine and weights here and start the engine. Raises HostError, BadModel and their kin."""
        plan = attempt.plan
        await self.host.prepare(plan.engine, report)
        weights = await self._weights(plan.model, report, allow_remote_code=allow_remote_code)
        drafter = await self._weights(plan.drafter, report, allow_remote_code=False) if plan.drafter else None
        report("starting the engine")
        await self.host.start(self._spec(attempt, weights, drafter))

    async def _weights(self, model: ModelRef, report: Report, *, allow_remote_code: bool) -> Path:
        if model.revision is None:
            return Path(model.source)
        from gateway.catalog.download import download

        return await download(
            self.hub, model.source, model.revision, self.settings.models, report, allow_remote_code=allow_remote_code
        )

    def _spec(self, attempt: Attempt, weights: Path, drafter: Path | None) -> LaunchSpec:
        engine = self.profiles.engine(str(attempt.plan.engine))
        mounts: tuple[Mount, ...] = ()
        environment: str | None = str(engine_dir(self.settings, engine))
        if self.host.kind == "docker":
            mounts = tuple(dict.fromkeys(self._mount(folder) for folder in (weights, drafter) if folder is not None))
            environment = None
        return launch_spec(
            attempt.plan,
            engine,
            name=instance_name(attempt),
            model=attempt.model,
            attempt=attempt.id,
            port=attempt.port,
            weights=str(weights),
            mounts=mounts,
            environment=environment,
            drafter=str(drafter) if drafter else None,
        )

    def _mount(self, weights: Path) -> Mount:
        """The mount that shows an engine's container the weights at the path where we see them."""
        settings = self.settings
        if settings.models_source is not None:
            if not weights.is_relative_to(settings.models):
                raise BadModel(
                    f"{weights} is inside the gateway's own container, where engines cannot see it.",
                    hint=f"Put the model under {settings.models}, which engines share.",
                )
            return Mount(source=settings.models_source, target=str(settings.models))
        # A snapshot in a Hugging Face cache is links into ../../blobs: the engine needs both.
        root = weights.parent.parent if weights.parent.name == "snapshots" else weights
        return Mount(source=str(root), target=str(root))


def engine_dir(settings: Settings, engine: Engine) -> Path:
    """Where the engine's virtual environment is, or would be."""
    return settings.data / "engines" / f"{engine.kind}-{engine.version}"


def instance_name(attempt: Attempt) -> str:
    """Deterministic, so that starting twice is starting once."""
    slug = "".join(char if char.isalnum() or char in "-_" else "-" for char in attempt.model.lower())
    return f"{slug}-r{attempt.replica}-a{attempt.id}"


def no_plan_reason(decision: Decision) -> str:
    """All refusals in one line, for a state message: each distinct reason once, the nearest miss first."""
    seen: dict[str, list[str]] = {}
    for refusal in decision.rejected:
        seen.setdefault(refusal.reasons[0], []).append(f"{refusal.engine} TP={refusal.tensor_parallel}")
    if not seen:
        return "no engine profile fits this machine"
    return "; ".join(f"{reason} ({', '.join(where[:3])})" for reason, where in list(seen.items())[:4])
