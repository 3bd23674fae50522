"""GPUs and RAM that are kept from fitserve. Of RAM it sees FITSERVE_RAM_BYTES. GPUs: FITSERVE_GPUS
says which it may use, else CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES of its environment.

They are told once, when the gateway starts, and kept by UUID from then on: a card that drops off
the bus moves the numbers of the others.

CUDA numbers GPUs by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID; NVML, `fitserve probe` and
FITSERVE_GPUS by PCI bus. Where all GPUs are of one name both are the same; where they are not, a
number of CUDA_VISIBLE_DEVICES could mean another GPU, and is refused. NVIDIA_VISIBLE_DEVICES is for
the container toolkit, whose numbers are those of the host: where as many GPUs are here as it lists,
the toolkit has done it already.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Hardware, Value
from gateway.errors import SettingsError

VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Values of NVIDIA_VISIBLE_DEVICES that choose nothing here: all, or another way (CDI) gave this
# container its GPUs.
_EVERYTHING = ("", "all", "void")


class KeptGpus(Value):
    """`allowed`: UUIDs of the GPUs that may be used, None: all. `by`: the variable that says so.
    `ram_bytes`: the most RAM, None: all."""

    allowed: frozenset[str] | None = None
    by: str = ""
    ram_bytes: int | None = None

    @classmethod
    def of(cls, hardware: Hardware, wanted: str | None, environment: Mapping[str, str]) -> KeptGpus:
        """wanted: FITSERVE_GPUS. Raises SettingsError where it names a GPU that is not here, or
        where a number has no one meaning."""
        if wanted is not None:
            return cls(allowed=_named(hardware, wanted), by="FITSERVE_GPUS")
        if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            return cls(
                allowed=_visible_to_cuda(hardware, visible, in_order=in_order),
                by="CUDA_VISIBLE_DEVICES",
            )
        visible = environment.get("NVIDIA_VISIBLE_DEVICES")
        if visible is None or visible in _EVERYTHING:
            return cls()
        parts = [part for part in _parts(visible) if part != "none"]
        if len(parts) >= len(hardware.gpus):
            return cls()
        return cls(
            allowed=frozenset(
                gpu.uuid for gpu in hardware.gpus if {str(gpu.index), gpu.uuid} & set(parts)
            ),
            by="NVIDIA_VISIBLE_DEVICES",
        )

    def mark(self, hardware: Hardware) -> Hardware:
        """The machine with no more RAM than is allowed, in which GPUs that are kept say so."""
        if (most := self.ram_bytes) is not None:
            total, available = hardware.ram_total_bytes, hardware.ram_available_bytes
            hardware = hardware.evolve(
                ram_total_bytes=min(total, most), ram_available_bytes=min(available, most)
            )
        allowed = self.allowed
        if allowed is None:
            return hardware
        why = f"{self.by} leaves it out"
        gpus = tuple(gpu if gpu.uuid in allowed else gpu.evolve(kept=why) for gpu in hardware.gpus)
        return hardware.evolve(gpus=gpus)


def _named(hardware: Hardware, wanted: str) -> frozenset[str]:
    """The GPUs of FITSERVE_GPUS."""
    by_name = {str(gpu.index): gpu for gpu in hardware.gpus} | {
        gpu.uuid: gpu for gpu in hardware.gpus
    }
    parts = _parts(wanted)
    missing = [part for part in parts if part not in by_name]
    # A card that cannot be read now may be one of them, and must not keep a gateway from the
    # others.
    if missing and not any(" is left out: " in note for note in hardware.notes):
        there = ", ".join(f"{gpu.index} ({gpu.uuid}, {gpu.name})" for gpu in hardware.gpus)
        raise SettingsError(
            f"FITSERVE_GPUS names {missing[0][:80]}, and there is no such GPU here.",
            hint=(
                f"There are: {there}."
                if there
                else (
                    "There is none:"
                    f" {'; '.join(hardware.notes[:1]) or '`fitserve probe` says more'}."
                )
            ),
        )
    return frozenset(by_name[part].uuid for part in parts if part in by_name)


def _visible_to_cuda(hardware: Hardware, visible: str, *, in_order: bool) -> frozenset[str]:
    """As CUDA reads it: numbers, and UUIDs or their beginnings; from the first that is none of
    these on, the rest counts for nothing."""
    found: list[str] = []
    numbered = [gpu for gpu in hardware.gpus if not gpu.uuid.startswith("MIG-")]
    for part in _parts(visible):
        if part.isdecimal():
            if not in_order and len({gpu.name for gpu in hardware.gpus}) > 1:
                raise SettingsError(
                    f"CUDA_VISIBLE_DEVICES names GPU {part} by CUDA's number, which goes by speed,"
                    " and the GPUs here are not alike.",
                    hint=(
                        "Name GPUs by UUID (`fitserve probe`), set CUDA_DEVICE_ORDER=PCI_BUS_ID, or"
                        " set FITSERVE_GPUS."
                    ),
                )
            here = [gpu for gpu in numbered if gpu.index == int(part)]
        else:
            here = [
                gpu
                for gpu in hardware.gpus
                if part.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(part)
            ]
        if len(here) != 1 or here[0].uuid in found:
            break
        found.append(here[0].uuid)
    return frozenset(found)


def _parts(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(",")) if part]
