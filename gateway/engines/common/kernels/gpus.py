"""Formats that a GPU multiplies, by its compute capability (profiles/gpus.yaml). Pure."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from gateway.domain import Value
from gateway.domain.base import Field
from gateway.models.scheme import Kind

Format = Literal["bf16", "fp8", "fp4", "mxfp8"]


class GpuTraits(Value):
    """A compute capability. `formats` are those that its tensor cores multiply; others are widened
    first, which saves memory
    but no computation."""

    name: str = Field(description="the generation: Ampere, Hopper ...")
    formats: tuple[Format, ...] = ()
    notes: str = ""


class GpuTable(Value):
    sources: dict[str, str] = Field(description="sources of the fields of `capabilities`")
    capabilities: dict[str, GpuTraits]
    schemes: dict[Kind, Format] = Field(
        {}, description="format that a GPU must multiply for such weights to be faster too"
    )

    def traits(self, capability: str | None) -> GpuTraits | None:
        """Traits of the capability; None: it is in no table."""
        return self.capabilities.get(capability or "")

    def native_formats(self, capability: str | None) -> frozenset[tuple[str, str]]:
        """Schemes whose format this GPU multiplies, and the format."""
        cached_formats = self._native_formats.get(capability or "")
        return frozenset(self.schemes.items()) if cached_formats is None else cached_formats

    @cached_property
    def _native_formats(self) -> dict[str, frozenset[tuple[str, str]]]:
        return {
            capability: frozenset(
                (kind, formats)
                for kind, formats in self.schemes.items()
                if not self.widened_format(kind, capability)
            )
            for capability in self.capabilities
        }

    def widened_format(self, scheme: Kind, capability: str | None) -> Format | None:
        """The format of these weights, where this GPU does not multiply it; None: it does, or that
        is not known."""
        traits = self.traits(capability)
        formats = self.schemes.get(scheme)
        return (
            formats
            if traits is not None and formats is not None and formats not in traits.formats
            else None
        )
