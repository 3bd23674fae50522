"""SGLang's pools of KV cache and recurrent states, in the words of engines/vllm/kv_cache.py.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.domain import AttentionGroup, ModelSpec, Recurrent
from gateway.domain.record import FrozenRecord
from gateway.engines.common.memory.states import state_bytes
from gateway.engines.sglang.memory import MemoryRules, ModelTraits, kv_tokens

# Bytes for the measurement of a token's cost: enough that rounding vanishes.
_PROBE = 1 << 50


class TokenPool(FrozenRecord, frozen=True):
    """The KV cache of one rank: a pool of tokens in pages, and a pool of states with a share of its
    bytes."""

    rules: MemoryRules
    attention: tuple[AttentionGroup, ...]
    tp: int
    element_bytes: int
    page: int = 1  # tokens that are allocated together
    slots: int = 0  # states of a running request, with those kept of its prefixes; 0: no limit
    most_states: int | None = None  # a number by flags; None: those that a share of the bytes holds
    matrices: str | None = None  # --mamba-ssm-dtype
    most_tokens: int | None = None  # --max-total-tokens
    verified_tokens: int = 0  # of a step that verifies a draft; 0: nothing is drafted
    most_requests: int = 1  # --max-running-requests, which drafts reserve states for

    def tokens(self, kv_bytes: int) -> int | None:
        """None: these layers are not known to these rules."""
        count = self._tokens_of(kv_bytes)
        if count is None or self.most_tokens is None:
            return count
        return min(count, self.most_tokens // self.page * self.page)

    def _tokens_of(self, kv_bytes: int) -> int | None:
        return kv_tokens(
            self.rules,
            self.attention,
            kv_bytes,
            tp=self.tp,
            element_bytes=self.element_bytes,
            page=self.page,
            states_bytes=self._states_bytes(kv_bytes),
        )

    def _states_bytes(self, kv_bytes: int) -> int | None:
        """Bytes of states; None: the share of them. Requests that verify drafts keep the states of
        each token meanwhile (_handle_max_mamba_cache in srt/mem_cache/kv_cache_configurator.py)."""
        if not self.verified_tokens or not self.state_bytes:
            return None if self.most_states is None else self.most_states * self.state_bytes
        count = self.states(kv_bytes)
        requests = min(self.most_requests, count // max(1, self.slots))
        # Each of both pools has a place for padding.
        return self.state_bytes * (count + 1 + (requests + 1) * self.verified_tokens)

    @property
    def bytes_per_token(self) -> int:
        tokens = self._tokens_of(_PROBE)
        return _PROBE // tokens if tokens else 0

    @property
    def states_per_request(self) -> int:
        return self.slots if self.state_bytes else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all recurrent layers."""
        return sum(
            group.layers * layer_state_bytes(group.recurrent, self.tp, self.matrices)
            for group in self.attention
            if group.kind == "recurrent" and group.recurrent is not None
        )

    def states(self, kv_bytes: int) -> int:
        """The number of states without the one that pads. Source: _handle_max_mamba_cache in
        srt/mem_cache/kv_cache_configurator.py."""
        if self.most_states is not None:
            return self.most_states
        ratio = self.rules.mamba_ratio
        state_bytes = max(1, self.state_bytes)
        share_bytes = int(kv_bytes * ratio / (1 + ratio))
        if self.verified_tokens:
            padding_bytes = state_bytes * (1 + self.verified_tokens)
            slot_bytes = state_bytes * (1 + self.verified_tokens / max(1, self.slots))
            return max(0, int((share_bytes - padding_bytes) // slot_bytes))
        return max(0, share_bytes // state_bytes - 1)

    def bytes_for(self, length: int, _batched_tokens: int) -> int:
        return length * self.bytes_per_token

    def largest(self, kv_bytes: int, _batched_tokens: int, limit: int) -> int:
        return min(limit, self.tokens(kv_bytes) or 0) if self.bytes_per_token else limit

    def requests(self, kv_bytes: int, length: int, _batched_tokens: int) -> float:
        return (self.tokens(kv_bytes) or 0) / length if self.bytes_per_token else math.inf


def layer_state_bytes(recurrent: Recurrent, tp: int, matrices: str | None = None) -> int:
    """Bytes of the state of one layer. matrices: their dtype by --mamba-ssm-dtype.

    Source: mamba2_state_dtype in srt/configs/mamba_utils.py.
    """
    declared_dtype = recurrent.dtype if recurrent.kind == "gdn" else None
    state_dtype = matrices or declared_dtype or "float32"
    return state_bytes(recurrent, tp, inputs="bfloat16", matrices=state_dtype)


def drop_windows(attention: tuple[AttentionGroup, ...]) -> tuple[AttentionGroup, ...]:
    """The layers for an engine without a separate pool for sliding windows.

    Each layer keeps all tokens.
    """
    return tuple(
        group.evolve(kind="full") if group.kind == "sliding" else group for group in attention
    )


def read_traits(spec: ModelSpec) -> ModelTraits:
    """Properties of the model that SGLang's memory settings depend on."""
    vision = spec.config.get("vision_config")
    sizes: Mapping[str, Any] = vision if isinstance(vision, Mapping) else {}
    layers = sizes.get("num_hidden_layers")
    hidden = sizes.get("hidden_size")
    return ModelTraits(
        architecture=spec.architecture,
        uses_mla=any(group.kind == "mla" for group in spec.attention),
        has_towers="text_config" in spec.config or "vision_config" in spec.config,
        has_vision="vision_config" in spec.config,
        vision_layers=layers if type(layers) is int and 0 < layers < 1000 else None,
        vision_hidden=hidden if type(hidden) is int and 0 < hidden < 2**20 else None,
    )
