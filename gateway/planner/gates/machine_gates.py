"""Gates of a machine, whatever the model: processor, driver, code for its GPUs. Pure."""

from __future__ import annotations

from gateway.domain import Engine, Gpu, Hardware
from gateway.domain.release import release
from gateway.engines.common.kernels.compiled_kernels import binary_support, capabilities
from gateway.engines.common.refusal import RefusalError


def gate_host(hardware: Hardware, engine: Engine) -> None:
    """Refuse another processor and an old driver."""
    source = f"profile {engine.ref}"
    if engine.machines and hardware.arch not in engine.machines:
        machines = " and ".join(engine.machines)
        raise RefusalError(
            "unsupported_platform",
            f"its image is built for {machines}, this machine is {hardware.arch}",
            source,
        )
    driver = hardware.driver
    min_driver = engine.min_driver
    if driver and min_driver and release(driver) < release(min_driver):
        reason = f"CUDA {engine.cuda} needs driver {min_driver} or newer, this machine has {driver}"
        raise RefusalError("driver_too_old", reason, source)


def gate_code(engine: Engine, gpu: Gpu) -> None:
    """Refuse an engine that has no code for this GPU."""
    capability = gpu.capability
    if engine.min_capability and capability and float(capability) < float(engine.min_capability):
        raise RefusalError(
            "no_kernel",
            f"{engine.ref} needs compute capability {engine.min_capability}, {gpu.name} has"
            f" {capability}",
            f"profile {engine.ref}",
        )
    if engine.compiled and capability and binary_support(engine.compiled, capability) == "no":
        compiled_for = ", ".join(capabilities(engine.compiled))
        reason = (
            f"{engine.ref} is compiled for compute capability {compiled_for};"
            f" {gpu.name} has {capability}"
        )
        raise RefusalError(
            "no_kernel", reason, engine.sources.get("compiled", f"profile {engine.ref}")
        )


def runs_on(hardware: Hardware, engine: Engine) -> bool:
    """Whether processor, driver and at least one GPU of a machine can run an engine."""
    gpus = hardware.gpus if engine.device != "cpu" else ()
    try:
        gate_host(hardware, engine)
    except RefusalError:
        return False
    return not gpus or any(_has_code(engine, gpu) for gpu in gpus)


def _has_code(engine: Engine, gpu: Gpu) -> bool:
    try:
        gate_code(engine, gpu)
    except RefusalError:
        return False
    return True
