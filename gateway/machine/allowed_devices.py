"""The GPUs and the RAM that fitserve may use.

FITSERVE_RAM_BYTES limits the RAM. FITSERVE_GPUS chooses GPUs, else CUDA_VISIBLE_DEVICES or
NVIDIA_VISIBLE_DEVICES. The choice is made at the start of the gateway and kept by UUID: a card that
drops off the bus changes the numbers of the others.

CUDA numbers GPUs by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID. NVML, `fitserve probe` and
FITSERVE_GPUS number them by PCI bus. Both orders are equal for GPUs of one name. With several names
a number in CUDA_VISIBLE_DEVICES is ambiguous and is refused. NVIDIA_VISIBLE_DEVICES has the host's
numbers and is for the container toolkit. If there are no more GPUs than it lists, the toolkit has
applied it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Hardware, Value
from gateway.errors import SettingsError

VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Values of NVIDIA_VISIBLE_DEVICES that choose nothing: all GPUs, or GPUs by CDI.
_NO_CHOICE = ("", "all", "void")


class AllowedDevices(Value):
    """The GPUs and RAM that may be used.

    gpus: UUIDs of the allowed GPUs; None for all.
    variable: the variable that chose them.
    ram_bytes: the RAM that may be used; None for all.
    host_bytes: bytes that stay free of memory that GPU and host share; None for the default.
    """

    gpus: frozenset[str] | None = None
    variable: str = ""
    ram_bytes: int | None = None
    host_bytes: int | None = None

    @classmethod
    def choose_by_variables(
        cls, hardware: Hardware, gpus: str | None, environment: Mapping[str, str]
    ) -> AllowedDevices:
        """The choice by FITSERVE_GPUS (`gpus`) or other variables.

        Raises SettingsError for a GPU that does not exist, and for an ambiguous number.
        """
        if gpus is not None:
            return cls(gpus=_configured_uuids(hardware, gpus), variable="FITSERVE_GPUS")
        if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            is_in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            return cls(
                gpus=_visible_to_cuda(hardware, visible, is_in_order=is_in_order),
                variable="CUDA_VISIBLE_DEVICES",
            )
        visible = environment.get("NVIDIA_VISIBLE_DEVICES")
        if visible is None or visible in _NO_CHOICE:
            return cls()
        devices = [device for device in _comma_parts(visible) if device != "none"]
        if len(devices) >= len(hardware.gpus):
            return cls()
        return cls(
            gpus=frozenset(
                gpu.uuid for gpu in hardware.gpus if {str(gpu.index), gpu.uuid} & set(devices)
            ),
            variable="NVIDIA_VISIBLE_DEVICES",
        )

    def mark(self, hardware: Hardware) -> Hardware:
        """The machine with the allowed RAM, and with the other GPUs marked as kept."""
        if self.host_bytes is not None:
            gpus = tuple(
                gpu.evolve(host_bytes=self.host_bytes) if gpu.memory_kind == "unified" else gpu
                for gpu in hardware.gpus
            )
            hardware = hardware.evolve(gpus=gpus)
        if self.ram_bytes is not None:
            hardware = hardware.evolve(
                ram_total_bytes=min(hardware.ram_total_bytes, self.ram_bytes),
                ram_available_bytes=min(hardware.ram_available_bytes, self.ram_bytes),
            )
        allowed_uuids = self.gpus
        if allowed_uuids is None:
            return hardware
        reason = f"{self.variable} leaves it out"
        gpus = tuple(
            gpu if gpu.uuid in allowed_uuids else gpu.evolve(reservation_reason=reason)
            for gpu in hardware.gpus
        )
        return hardware.evolve(gpus=gpus)


def _configured_uuids(hardware: Hardware, text: str) -> frozenset[str]:
    """The UUIDs of the GPUs that FITSERVE_GPUS names."""
    gpu_by_name = {str(gpu.index): gpu for gpu in hardware.gpus} | {
        gpu.uuid: gpu for gpu in hardware.gpus
    }
    devices = _comma_parts(text)
    missing_parts = [device for device in devices if device not in gpu_by_name]
    # A card that cannot be read now may be the missing one. The gateway still uses the others.
    if missing_parts and not any(" is left out: " in note for note in hardware.notes):
        present_gpus = ", ".join(f"{gpu.index} ({gpu.uuid}, {gpu.name})" for gpu in hardware.gpus)
        raise SettingsError(
            f"FITSERVE_GPUS names {missing_parts[0][:80]}, and there is no such GPU here.",
            hint=(
                f"There are: {present_gpus}."
                if present_gpus
                else (
                    "There is none:"
                    f" {'; '.join(hardware.notes[:1]) or '`fitserve probe` shows more'}."
                )
            ),
        )
    return frozenset(gpu_by_name[device].uuid for device in devices if device in gpu_by_name)


def _visible_to_cuda(hardware: Hardware, visible: str, *, is_in_order: bool) -> frozenset[str]:
    """The UUIDs by CUDA's rules: numbers, and UUIDs or their beginnings.

    CUDA ignores everything from the first invalid part on.
    """
    uuids: list[str] = []
    numbered = [gpu for gpu in hardware.gpus if not gpu.uuid.startswith("MIG-")]
    for device in _comma_parts(visible):
        if device.isdecimal():
            if not is_in_order and len({gpu.name for gpu in hardware.gpus}) > 1:
                raise SettingsError(
                    f"CUDA_VISIBLE_DEVICES names GPU {device} by CUDA's number, which goes by"
                    " speed, and the GPUs here differ.",
                    hint=(
                        "Name GPUs by UUID (`fitserve probe`), set CUDA_DEVICE_ORDER=PCI_BUS_ID, or"
                        " set FITSERVE_GPUS."
                    ),
                )
            matches = [gpu for gpu in numbered if gpu.index == int(device)]
        else:
            matches = [
                gpu
                for gpu in hardware.gpus
                if device.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(device)
            ]
        if len(matches) != 1 or matches[0].uuid in uuids:
            break
        uuids.append(matches[0].uuid)
    return frozenset(uuids)


def _comma_parts(text: str) -> list[str]:
    return [device for device in (piece.strip() for piece in text.split(",")) if device]
