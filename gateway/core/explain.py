"""A plan in words: the same data, arranged for reading. Pure; the CLI only paints it."""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.memory import GIB
from gateway.domain import Choice, Decision, Hardware, LayerAttention, LayerKernel, Memory, Plan, Rejected


class Row(NamedTuple):
    name: str
    value: str
    reason: str
    source: str


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"


def choices(plan: Plan) -> list[Row]:
    """Every decided value with its reason and source."""
    rows = [Row("engine", str(plan.engine), plan.engine.image or "", "profile")]
    for name in Plan.model_fields:
        choice = getattr(plan, name)
        if isinstance(choice, Choice):
            shown = (
                {True: "on", False: "off"}.get(choice.value, choice.value) if isinstance(choice.value, bool) else choice.value
            )
            rows.append(Row(name.replace("_", " "), str(shown), choice.reason, choice.source))
    return rows


def memory_rows(memory: Memory) -> list[Row]:
    """What fills a device, largest promise last."""
    return [
        Row("weights", gib(memory.weights_bytes), "", ""),
        Row("activations", gib(memory.activation_bytes), "estimate", ""),
        Row("graphs", gib(memory.graph_bytes), "estimate", ""),
        Row("overhead", gib(memory.overhead_bytes), "estimate", ""),
        Row("KV cache", gib(memory.kv_bytes), f"{memory.kv_tokens:,} tokens of {memory.kv_bytes_per_token:,} bytes", ""),
        Row("", f"{memory.full_requests:.2f}", "requests of the planned context at once", ""),
        Row(
            "beside the KV cache", f"{gib(memory.low)} to {gib(memory.high)}", f"of a budget of {gib(memory.budget_bytes)}", ""
        ),
    ]


def memory_bar(memory: Memory, width: int = 60) -> str:
    """The device as a bar: W weights, a activations, g graphs, o overhead, K KV cache, . not ours."""
    parts = (
        ("W", memory.weights_bytes),
        ("a", memory.activation_bytes),
        ("g", memory.graph_bytes),
        ("o", memory.overhead_bytes),
        ("K", memory.kv_bytes),
    )
    bar = ""
    filled = 0
    for letter, count in parts:
        filled += count
        bar = bar.ljust(min(width, round(width * filled / max(1, memory.gpu_bytes))), letter)
    return f"[{bar.ljust(width, '.')}] {gib(memory.gpu_bytes)}"


def kernels(rows: tuple[LayerKernel, ...]) -> list[Row]:
    """Which kernel computes what, and which were passed over; what is plain matrix multiplication is one row."""
    found = []
    told: set[str] = set()
    plain = [row for row in rows if row.scheme == "unquantized" and row.kernel == "torch"]
    for row in rows:
        if row in plain:
            continue
        size = f"{row.k} x {row.n}" if row.k is not None else "cannot be cut"
        padded = f", padded to {row.padded_to[0]} x {row.padded_to[1]}" if row.padded_to else ""
        passed = "; ".join(f"{one.kernel}: {one.reason}".removeprefix(": ") for one in row.refused)
        crash = "CRASHES: " if row.status == "crash" else ""
        said = "; ".join(text for text in (crash + row.note, passed) if text)
        shown = "as above" if said in told else said
        told |= {said} if said else set()
        kernel = row.kernel or _STATUS[row.status]
        found.append(Row(f"{row.layer} x{row.count}", f"{size} {row.scheme}{padded}", kernel, shown))
    if plain:
        count = sum(row.count for row in plain)
        found.append(Row(f"{count} other layers" if found else f"all {count} layers", "unquantized", "torch", ""))
    return found


_STATUS = {"ok": "", "none": "NONE", "unknown": "unknown", "crash": ""}


def attention(rows: tuple[LayerAttention, ...]) -> list[Row]:
    """Which backend computes the attention of which layers, and which were passed over."""
    found = []
    for row in rows:
        version = f" {row.version}" if row.version else ""
        passed = "; ".join(f"{one.kernel}: {one.reason}".removeprefix(": ") for one in row.refused)
        name = f"{row.backend}{version}" if row.backend else _STATUS[row.status]
        found.append(Row(f"{row.kind} x{row.layers}", str(row.head_dim), name, passed))
    return found


def rejections(rejected: tuple[Rejected, ...]) -> list[Row]:
    """Refusals with equal reasons as one row."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for one in rejected:
        stages = f"xPP{one.pipeline_parallel}" if one.pipeline_parallel > 1 else ""
        size = f"{one.tensor_parallel}{stages}"
        grouped.setdefault((str(one.engine), one.verdict, "; ".join(one.reasons), one.source), []).append(size)
    return [
        Row(f"{engine} TP={','.join(sizes)}", verdict, reason, source)
        for (engine, verdict, reason, source), sizes in grouped.items()
    ]


def headline(decision: Decision) -> str:
    if not decision.plans:
        return f"No plan for {decision.model} on {decision.hardware}."
    best = decision.plans[0]
    where = f"{len(best.gpus)} x GPU" if best.gpus else "the CPU"
    others = len(decision.plans) - 1
    more = f", and {others} more plan{'s' if others > 1 else ''}" if others else ""
    return f"{decision.model} on {decision.hardware}: {best.engine} on {where}, {best.max_model_len.value:,} tokens of context{more} ({best.grade})."


def machine(hardware: Hardware) -> list[Row]:
    """The probe's reading, one row per thing."""
    rows = [
        Row("CPU", f"{hardware.cpu_cores} cores", hardware.cpu_name or hardware.arch, " ".join(hardware.cpu_features)),
        Row("RAM", gib(hardware.ram_total_bytes), f"{gib(hardware.ram_available_bytes)} available", ""),
        Row("shared memory", gib(hardware.shm_bytes), "", ""),
        Row("disk", gib(hardware.disk_free_bytes), "free", ""),
        Row("driver", hardware.driver or "none", f"CUDA {hardware.cuda_driver}" if hardware.cuda_driver else "", ""),
    ]
    for gpu in hardware.gpus:
        kind = " unified" if gpu.memory_kind == "unified" else ""
        rows.append(
            Row(
                f"GPU {gpu.index}",
                gpu.name,
                f"sm {gpu.capability}, {gib(gpu.total_bytes)}{kind}, {gib(gpu.free_bytes)} free",
                gpu.uuid,
            )
        )
    for link in hardware.links:
        p2p = {True: "works", False: f"no ({link.p2p_status})", None: "unknown"}[link.p2p]
        rows.append(Row(f"GPU {link.a}-{link.b}", f"{link.nvlinks or 0} NVLinks", f"peer-to-peer: {p2p}", ""))
    return rows
