"""The engine versions that this machine can start: installed ones, or images that may be pulled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.domain import Decision, Engine, EngineAvailability, Wish
from gateway.domain.image_name import AllowedImages
from gateway.errors import FitserveError, NoPlan
from gateway.machine.environment import is_installed
from gateway.planner.explain import gain_over


class Startable(NamedTuple):
    """Tells which engine versions can start.

    data: the data folder, with installed engines.
    installed_only: engines are processes.
    images: those that containers may use; None: the agent that starts them decides.
    """

    data: Path
    installed_only: bool
    images: AllowedImages | None = None

    def can_start(self, engine: Engine) -> bool:
        if self.installed_only:
            return is_installed(self.data, engine)
        return self.images is None or self.images.allows(engine.image)

    def split_startable(self, engines: Iterable[Engine]) -> tuple[list[Engine], list[Engine]]:
        """The engines that can start, and the others."""
        installed_engines: list[Engine] = []
        uninstalled_engines: list[Engine] = []
        for engine in engines:
            (installed_engines if self.can_start(engine) else uninstalled_engines).append(engine)
        return installed_engines, uninstalled_engines

    def no_engine_error(self, uninstalled_engines: Sequence[Engine], model: str) -> NoPlan:
        """The error if no engine that could serve the model can start."""
        if not self.installed_only and self.images is not None and uninstalled_engines:
            message, hint = self.images.refusal(uninstalled_engines[0].image)
            return NoPlan(message, hint=hint)
        engine_name = uninstalled_engines[0].ref if uninstalled_engines else "an engine"
        return NoPlan(
            f"No engine that could serve {model} is installed here.",
            hint=(
                f"Run `fitserve engine install {engine_name}`: this gateway starts engines as"
                " processes, not in containers."
            ),
        )

    def explain_engines(
        self,
        decision: Decision,
        installed_engines: Iterable[Engine],
        uninstalled_engines: Sequence[Engine],
        wish: Wish,
        decide: Callable[[list[Engine]], Decision],
    ) -> Decision:
        """The decision with a row for each engine: whether it can start, and its gain.

        decide: the decision with other engines.
        """
        try:
            plans = decide([*uninstalled_engines]).plans if uninstalled_engines else ()
        except FitserveError:
            # For example a flag that only the installed engines have.
            plans = ()
        best_plan = decision.plans[0] if decision.plans else None
        rows = [
            EngineAvailability(
                engine=engine.ref,
                is_available=True,
                reason=self._start_refusal(engine, is_startable=True),
            )
            for engine in installed_engines
        ]
        for engine in uninstalled_engines:
            first = next((plan for plan in plans if str(plan.engine) == engine.ref), None)
            gain, text = (
                gain_over(best_plan, first, wish.goal) if first is not None else (None, "no plan")
            )
            rows.append(
                EngineAvailability(
                    engine=engine.ref,
                    is_available=False,
                    reason=self._start_refusal(engine, is_startable=False),
                    remedy=self._start_cure(engine),
                    gain=gain,
                    gain_text=text,
                )
            )
        return decision.evolve(engines=tuple(rows))

    def _start_refusal(self, engine: Engine, *, is_startable: bool) -> str:
        if self.installed_only:
            return "installed" if is_startable else "not installed here"
        return (
            f"its image {engine.image} may be started"
            if is_startable
            else f"its image {engine.image} may not be started"
        )

    def _start_cure(self, engine: Engine) -> str:
        if not self.installed_only:
            return "name its repository in FITSERVE_ALLOWED_IMAGES"
        return f"fitserve engine install {engine.ref}" if engine.install is not None else ""
