"""Data sheets of cards (profiles/cards.yaml): bandwidth, peaks of the tensor cores, links. Pure."""

from __future__ import annotations

from gateway.domain import Value
from gateway.domain.base import Field, model_validator

# NVLink over switches; fewer links of a card are bridges, which a machine may lack.
_SWITCHED_LINKS = 18
_SWITCHED_FORM = "SXM"
# NVIDIA names a chip that joins a GPU with a processor: GB10, GH200, GB300.
_JOINED_CHIPS = (" GB", " GH")
# How far apart two readings of one card's memory are at most: ECC takes 6 % of it. A card of 24 GB
# may have 22.5 GiB, and one of 80 GB has 79.6.
_SAME_MEMORY = 0.1


class Card(Value):
    """One card by its NVML name. Peaks are dense, with 32-bit sums.

    None: the hardware does not multiply the format, or the peak is not published.
    """

    name: str
    capability: str = Field(pattern=r"^[0-9]{1,2}\.[0-9]$")
    memory_mib: int | None = Field(
        None, gt=0, description="memory as nvidia-smi prints it; None: nvidia-smi prints none"
    )
    idle_mib: int | None = Field(
        None,
        gt=0,
        description=("memory of the card by CUDA's count, in MiB: the driver keeps the rest"),
    )
    has_unified_memory: bool = Field(False, description="the memory is the host's", alias="unified")
    memory_gb_s: float = Field(gt=0, description="10^9 bytes/s")
    sms: int = Field(gt=0, description="streaming multiprocessors")
    bf16_tflops: float | None = Field(None, gt=0)
    fp16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(None, gt=0)
    int8_tops: float | None = Field(None, gt=0)
    fp4_tflops: float | None = Field(None, gt=0)
    nvlinks: int | None = Field(None, ge=0, description="links of one card; None: not known")
    nvlink_gb_s: float | None = Field(
        None, gt=0, description="all links of one card together, in one direction"
    )
    pcie_generation: int | None = Field(None, ge=3, le=7)
    pcie_lanes: int | None = Field(None, ge=1, le=16)
    words: tuple[str, ...] = Field((), description="words for the card that its name lacks")
    sources: tuple[str, ...] = Field(min_length=1)

    @property
    def is_joined(self) -> bool:
        """Whether the chip joins the GPU with a processor of NVIDIA."""
        return any(chip in self.name for chip in _JOINED_CHIPS)

    @property
    def is_switched(self) -> bool:
        """Whether machines join all cards of this kind by NVLink over switches."""
        return self.nvlinks == _SWITCHED_LINKS or (
            bool(self.nvlinks) and _SWITCHED_FORM in self.name
        )

    def has_memory(self, total_bytes: int) -> bool:
        """Whether the card's own memory is this, as far as readings of one card differ."""
        return (
            self.memory_mib is not None
            and abs(total_bytes / (self.memory_mib * 2**20) - 1) <= _SAME_MEMORY
        )

    @model_validator(mode="after")
    def _check_nvlinks(self) -> Card:
        if bool(self.nvlinks) != (self.nvlink_gb_s is not None):
            raise ValueError(f"{self.name}: nvlinks and nvlink_gb_s are given together, or neither")
        if self.has_unified_memory == (self.memory_mib is not None):
            raise ValueError(
                f"{self.name}: a card has memory of its own (memory_mib) or the host's (unified)"
            )
        return self


class CardTable(Value):
    sources: dict[str, str] = Field(description="texts of the names in the `sources` of a card")
    cards: tuple[Card, ...]

    @model_validator(mode="after")
    def _check_sources(self) -> CardTable:
        unknown_sources = {source for card in self.cards for source in card.sources} - set(
            self.sources
        )
        if unknown_sources:
            raise ValueError(
                f"sources that are not described: {', '.join(sorted(unknown_sources))}"
            )
        return self

    def card(self, name: str, total_bytes: int | None) -> Card | None:
        """The card of this name and memory; None: not in the table. Cards of one name
        with less memory are other cards."""
        return next(
            (
                card
                for card in self.cards
                if card.name == name
                and (card.has_unified_memory or total_bytes is None or card.has_memory(total_bytes))
            ),
            None,
        )
