"""What follows from a GPU's compute capability and name (profiles/gpus.yaml): its formats, shared memory and bandwidth. Pure."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from gateway.core.model.scheme import Kind
from gateway.domain import Value

Format = Literal["bf16", "fp8", "fp4", "mxfp8"]


class GpuTraits(Value):
    """A compute capability. `formats` are those that its tensor cores multiply; others are widened first, which saves memory
    but no computation."""

    name: str = Field(description="the generation: Ampere, Hopper ...")
    formats: tuple[Format, ...] = ()
    shared_memory: int = Field(ge=1, description="bytes that one block can opt into")
    notes: str = ""


class Bandwidth(Value):
    """Of GPUs whose name contains `pattern` (a regular expression, upper and lower case alike)."""

    pattern: str
    gb_per_s: int = Field(ge=1, description="10^9 bytes a second, as published")
    source: str

    @model_validator(mode="after")
    def _pattern_is_one(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None
        return self


class GpuTable(Value):
    sources: dict[str, str] = Field(description="where the fields of `capabilities` were read")
    capabilities: dict[str, GpuTraits]
    schemes: dict[Kind, Format] = Field({}, description="what a GPU must multiply for weights quantized so to be faster too")
    bandwidths: tuple[Bandwidth, ...] = Field(description="the first that matches a name holds")

    def traits(self, capability: str | None) -> GpuTraits | None:
        """None: nobody has written down what this capability has."""
        return self.capabilities.get(capability or "")

    def widened(self, scheme: Kind, capability: str | None) -> Format | None:
        """The format of these weights, where this GPU does not multiply it; None: it does, or that is not known."""
        known, wanted = self.traits(capability), self.schemes.get(scheme)
        return wanted if known is not None and wanted is not None and wanted not in known.formats else None

    def bytes_per_second(self, gpu_name: str) -> int | None:
        """What the memory of this GPU delivers at best; None: not known."""
        found = next((entry for entry in self.bandwidths if re.search(entry.pattern, gpu_name, re.IGNORECASE)), None)
        return None if found is None else found.gb_per_s * 10**9
