"""Which engine versions this machine could start: those that are installed, where engines are
processes; those whose image may be pulled, in containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.domain import Decision, Engine, EngineHere, Wish
from gateway.domain.image_name import AllowedImages
from gateway.errors import FitserveError, NoPlan
from gateway.machine.environment import is_installed
from gateway.planner.explain import more_of


class Startable(NamedTuple):
    """data: the data folder, with engines that are installed. installed_only: engines are
    processes. images: those that may be started, in
    containers; None: whoever starts them has the word."""

    data: Path
    installed_only: bool
    images: AllowedImages | None = None

    def holds(self, engine: Engine) -> bool:
        if self.installed_only:
            return is_installed(self.data, engine)
        return self.images is None or self.images.allows(engine.image)

    def split(self, engines: Iterable[Engine]) -> tuple[list[Engine], list[Engine]]:
        """Those that could be started, and the others."""
        here: list[Engine] = []
        away: list[Engine] = []
        for engine in engines:
            (here if self.holds(engine) else away).append(engine)
        return here, away

    def refusal(self, away: Sequence[Engine], name: str) -> NoPlan:
        """Where none of the engines that could serve the model `name` is here."""
        if not self.installed_only and self.images is not None and away:
            message, hint = self.images.refusal(away[0].image)
            return NoPlan(message, hint=hint)
        wanted = away[0].ref if away else "an engine"
        return NoPlan(
            f"No engine that could serve {name} is installed here.",
            hint=(
                f"Run `fitserve engine install {wanted}`; this machine has no Docker Engine to run"
                " containers."
            ),
        )

    def told(
        self,
        decision: Decision,
        here: Iterable[Engine],
        away: Sequence[Engine],
        wish: Wish,
        decide: Callable[[list[Engine]], Decision],
    ) -> Decision:
        """The decision for the engines that are here, with what each is, and what those that are
        not would give. decide: for such engines."""
        try:
            others = decide([*away]).plans if away else ()
        except FitserveError:
            # A flag that only the engines have which are here, for one.
            others = ()
        best = decision.plans[0] if decision.plans else None
        rows = [
            EngineHere(engine=engine.ref, here=True, why=self._why(engine, here=True))
            for engine in here
        ]
        for engine in away:
            first = next((plan for plan in others if str(plan.engine) == engine.ref), None)
            gain, words = (
                more_of(best, first, wish.goal) if first is not None else (None, "no plan")
            )
            do = self._cure(engine)
            rows.append(
                EngineHere(
                    engine=engine.ref,
                    here=False,
                    why=self._why(engine, here=False),
                    do=do,
                    gain=gain,
                    gives=words,
                )
            )
        return decision.evolve(engines=tuple(rows))

    def _why(self, engine: Engine, *, here: bool) -> str:
        if self.installed_only:
            return "installed" if here else "not installed here"
        return (
            f"its image {engine.image} may be started"
            if here
            else f"its image {engine.image} may not be started"
        )

    def _cure(self, engine: Engine) -> str:
        if not self.installed_only:
            return "name its repository in FITSERVE_ALLOWED_IMAGES"
        return f"fitserve engine install {engine.ref}" if engine.install is not None else ""
