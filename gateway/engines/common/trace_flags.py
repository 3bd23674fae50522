"""The flags for an engine's own traces. Pure.

Without their libraries, both engines refuse to start with these flags: ObservabilityConfig in
vllm/config/observability.py, process_tracing_init in sglang/srt/observability/trace.py.
"""

from __future__ import annotations

from gateway.domain import Engine, LaunchSpec

ENDPOINT = "otlp-traces-endpoint"
# SGLang traces only with its switch.
_SWITCH = "enable-trace"
SERVICE_VARIABLE = "OTEL_SERVICE_NAME"
# The library in the environment of an engine, below its site-packages.
LIBRARY = "opentelemetry/exporter/otlp/proto/grpc"


def trace_arguments(engine: Engine, endpoint: str) -> tuple[str, ...]:
    """Command-line items that send the engine's spans to a collector (OTLP over gRPC); () if this
    version cannot, or for no endpoint."""
    if not endpoint or ENDPOINT not in engine.flags:
        return ()
    switch = (f"--{_SWITCH}",) if _SWITCH in engine.flags else ()
    return (*switch, f"--{ENDPOINT}={endpoint}")


def trace_environment(engine: Engine, endpoint: str) -> dict[str, str]:
    """Variables for the engine's traces."""
    return {SERVICE_VARIABLE: engine.kind} if trace_arguments(engine, endpoint) else {}


def untraced_start(spec: LaunchSpec) -> LaunchSpec:
    """The start without the flags and variables of traces; the same object where it has none. Flags
    that a user gave stay, which come without the variable."""
    if SERVICE_VARIABLE not in spec.env:
        return spec
    return spec.evolve(
        argv=tuple(
            item
            for item in spec.argv
            if item != f"--{_SWITCH}" and not item.startswith(f"--{ENDPOINT}=")
        ),
        env={name: value for name, value in spec.env.items() if name != SERVICE_VARIABLE},
    )


def drop_trace_arguments(engine: Engine, argv: tuple[str, ...], endpoint: str) -> tuple[str, ...]:
    """The command line without the items of `trace_arguments` for exactly this endpoint."""
    items = trace_arguments(engine, endpoint)
    count = len(items)
    for position in range(len(argv) - count + 1 if count else 0):
        if argv[position : position + count] == items:
            return argv[:position] + argv[position + count :]
    return argv
