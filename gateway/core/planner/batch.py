"""How much one engine computes at once: sequences, tokens of a batch, graphs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.memory.sglang_kv_cache import model_of
from gateway.core.memory.sglang_memory import static_memory
from gateway.core.memory.vllm_memory import Workload, runner_of
from gateway.core.planner.candidate import Candidate
from gateway.domain import BoolChoice, Choice, IntChoice
from gateway.domain.units import GIB, MIB

# A conservative plan goes no lower: blocks of some KV caches are as long as this, and have to fit into a batch.
_LEAST_TOKENS = 2048
_DEFAULTS = "vllm/engine/arg_utils.py get_batch_defaults"


@dataclass(frozen=True)
class Batch:
    seqs: Choice[int]
    tokens: Choice[int]
    eager: Choice[bool]
    load: Workload


def batch(candidate: Candidate) -> Batch:
    """The engine's own defaults where nobody set anything: they are what its authors measured."""
    engine, eager = candidate.engine, _eager(candidate)
    seqs = _sized(candidate, "max-num-seqs", *_seqs(candidate))
    tokens = _sized(candidate, "max-num-batched-tokens", *_tokens(candidate, seqs.value))
    graphs = not eager.value and engine.device == "cuda"
    # ngram is one of the things that the second runner cannot do (_get_v2_model_runner_unsupported_features, vllm/config/vllm.py).
    plain = candidate.speculation.method.value != "ngram"
    runner = runner_of(candidate.given.spec, candidate.built, engine.traits) if plain else 1
    load = Workload(engine.device, candidate.rank, tokens.value, seqs.value, graphs, runner)
    return Batch(seqs, tokens, eager, load)


def _sized(candidate: Candidate, flag: str, default: int, reason: str, source: str) -> Choice[int]:
    if flag in candidate.args:
        return IntChoice(value=int(candidate.args[flag]), reason="set by the user", source="user")
    if candidate.variant.conservative and flag == "max-num-seqs":
        why = "a smaller batch, because the plan with the usual one failed"
        return IntChoice(value=max(1, default // 8), reason=why, source="fact")
    return IntChoice(value=default, reason=reason, source=source)


def _eager(candidate: Candidate) -> Choice[bool]:
    if "enforce-eager" in candidate.args:
        return BoolChoice(value=bool(candidate.args["enforce-eager"]), reason="set by the user", source="user")
    if candidate.engine.device == "cpu":
        return BoolChoice(value=True, reason="compiling for the CPU costs minutes at every start", source=candidate.source)
    if candidate.variant.conservative:
        return BoolChoice(value=True, reason="no graphs, because the plan with them failed", source="fact")
    return BoolChoice(value=False, reason="CUDA graphs are faster", source="planner")


def _big(candidate: Candidate, least_gib: int = 70) -> bool:
    if not candidate.group:
        return False
    name = candidate.group[0].name.lower()
    return (candidate.group[0].total_bytes or 0) >= least_gib * GIB and "a100" not in name and "gb10" not in name


def _seqs(candidate: Candidate) -> tuple[int, str, str]:
    if _big(candidate) and candidate.pools is None:
        return 1024, "the engine's default for GPUs of 70 GiB and more", _DEFAULTS
    return candidate.engine.default_seqs, "the engine's default", candidate.source


def _tokens(candidate: Candidate, seqs: int) -> tuple[int, str, str]:
    value, reason, source = _default_tokens(candidate)
    reads_whole = all(group.kind in ("encoder", "vision") for group in candidate.built.attention)
    if candidate.variant.conservative and value > _LEAST_TOKENS and not reads_whole:
        value, reason, source = (
            max(_LEAST_TOKENS, value // 4),
            "a smaller batch, because the plan with the usual one failed",
            "fact",
        )
    # Drafted tokens take their places in the batch first; the engine refuses to start when nothing is left beside them.
    drafted = candidate.speculation.slots * seqs
    if value <= drafted:
        return value + drafted, f"{reason}, beside {drafted} places for drafted tokens", source
    return value, reason, source


def _default_tokens(candidate: Candidate) -> tuple[int, str, str]:
    engine, given = candidate.engine, candidate.given
    if candidate.pools is not None:
        chosen = static_memory(candidate.pools, candidate.gpu_bytes / MIB, model_of(given.spec), tp=candidate.variant.tp)
        return chosen.chunked_prefill, "the engine's default for GPUs of this size", candidate.source
    if all(group.kind in ("encoder", "vision") for group in candidate.built.attention):
        longest = max(engine.default_batched_tokens, given.wish.max_context or given.spec.max_position)
        return longest, "an encoder reads a whole input at once", "vllm/config/scheduler.py"
    if _big(candidate, 160):
        return 16384, "the engine's default for GPUs of 160 GiB and more", _DEFAULTS
    if _big(candidate):
        return 8192, "the engine's default for GPUs of 70 GiB and more", _DEFAULTS
    return engine.default_batched_tokens, "the engine's default", candidate.source
