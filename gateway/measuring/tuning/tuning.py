"""The parts of a gateway that measure served models and search for faster plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.measuring.tuning.automatic_tuning import AutomaticTuning
    from gateway.measuring.tuning.measurements import Measurements
    from gateway.measuring.tuning.tunings import Tunings


@dataclass(frozen=True)
class Tuning:
    """The measurements and searches of a gateway.

    automatic: searches without an order; None if nothing is tuned without one.
    """

    measurements: Measurements
    tunings: Tunings
    automatic: AutomaticTuning | None

    async def close(self) -> None:
        await self.measurements.close()
        if self.automatic is not None:
            await self.automatic.close()
        await self.tunings.close()
