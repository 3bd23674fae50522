"""SGLang's KV cache: its own count of tokens in a pool of given bytes, inverted.

A runner, or its stand-in, has the model and the arguments; only the free memory is stated.
"""

from __future__ import annotations

import importlib
import math
import types
from collections.abc import Callable
from typing import Any

from ...inside.meta import StandIn, fit
from .model import EngineConfiguration, bare_runner, resolve_argument

_GIB = 1 << 30
# More than any GPU has: a refusal at this size has another reason.
_MAX_BYTES = 1 << 50
# Errors of the engine if nothing fits.
_SIZE_ERRORS = (ValueError, RuntimeError, AssertionError, ZeroDivisionError)


def cache(
    configuration: EngineConfiguration, built_model: Any, memory_bytes: int
) -> dict[str, Any]:
    """The answer's `kv`: bytes of a page of tokens, bytes that no token gets, and bytes for a pool
    of this many tokens."""
    page = int(resolve_argument(configuration.arguments, "page_size"))
    longest_context = int(configuration.model.context_len)
    counter = _counter(configuration, built_model, memory_bytes)

    def bytes_for(tokens: int) -> int:
        return _min_bytes(lambda pool_bytes: _pool_tokens(counter, pool_bytes) >= tokens)

    pages = max(1, -(-longest_context // page))
    # Both pools are long, so that windows are full and fixed costs are included.
    one_page_bytes = bytes_for(pages * page)
    two_pages_bytes = bytes_for(2 * pages * page)
    block = max(1, math.ceil((two_pages_bytes - one_page_bytes) / pages))
    fixed_bytes = max(0, one_page_bytes - pages * block)
    doubled = sorted(
        {page * 2**power for power in range(max(1, pages.bit_length()))} | {pages * page}
    )
    return {
        "block_bytes": block,
        "fixed": fixed_bytes,
        "needed": [(n, max(bytes_for(n) - fixed_bytes, 1)) for n in doubled],
        **_state_fields(counter, pages * block + fixed_bytes),
    }


def pool_tokens(
    configuration: EngineConfiguration, built_model: Any, memory_bytes: int, pool_bytes: int
) -> int:
    """Tokens of a pool of `pool_bytes`. Raises the engine's errors where it is too small."""
    return _counter(configuration, built_model, memory_bytes)(pool_bytes)


def _state_fields(counter: _CountedCache, pool_bytes: int) -> dict[str, int]:
    """Bytes of the pool for each state of recurrent layers, and states for each request, as a pool
    of some such size has them; {}: no layer has one."""
    pool_bytes = max(pool_bytes, _GIB) * 64
    if counter(pool_bytes) <= 0:
        return {}
    states, per_request = counter.slots()
    if not states:
        return {}
    return {"state_bytes": -(-pool_bytes // states), "states_per_request": per_request}


def _pool_tokens(count: Callable[[int], int], pool_bytes: int) -> int:
    """Tokens that a pool of these bytes has; none, where the engine says that it is too small."""
    try:
        return count(pool_bytes)
    except _SIZE_ERRORS:
        if pool_bytes >= _MAX_BYTES:
            raise
        return 0


def _min_bytes(suffices: Callable[[int], bool]) -> int:
    """The least number of bytes that is enough. Raises the engine's errors if no number is."""
    low = 0
    high = 1 << 20
    while high < _MAX_BYTES and not suffices(high):
        low = high
        high = high * 2
    suffices(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


class _CountedCache:
    """The count of tokens in a pool of this many bytes, and then of its states."""

    def __init__(self, count: Callable[[int], int], slots: Callable[[], tuple[int, int]]) -> None:
        self._count = count
        self.slots = slots

    def __call__(self, pool_bytes: int) -> int:
        return self._count(pool_bytes)


def _counter(
    configuration: EngineConfiguration, built_model: Any, memory_bytes: int
) -> _CountedCache:
    """Tokens of the pool, by the bytes that are left for pools."""
    try:
        module: Any = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    except ModuleNotFoundError:
        return _count_by_runner(configuration, built_model, memory_bytes)
    return _count_by_configurator(module, configuration, built_model, memory_bytes)


def _slack(configuration: EngineConfiguration, memory_bytes: int) -> float:
    """GiB that the share of memory leaves free."""
    return float(
        memory_bytes / _GIB * (1 - resolve_argument(configuration.arguments, "mem_fraction_static"))
    )


def _set_free_memory(module: Any, memory: float) -> None:
    """State the free memory in GiB; there is no garbage to collect first."""
    module.get_available_gpu_memory = lambda *_, **__: memory
    module.gc = types.SimpleNamespace(collect=lambda: 0)


def _count_by_runner(
    configuration: EngineConfiguration, built_model: Any, memory_bytes: int
) -> _CountedCache:
    """Up to 0.5.15 at least the runner counts by itself (ModelRunnerKVCacheMixin)."""
    pools: Any = importlib.import_module("sglang.srt.model_executor.model_runner_kv_cache_mixin")
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    speculative: Any = importlib.import_module(
        "sglang.srt.speculative.spec_info"
    ).SpeculativeAlgorithm
    arguments = configuration.arguments
    model = configuration.model
    runner = bare_runner()
    layers = max(model.num_hidden_layers, model.num_attention_layers)
    arguments_known = {
        "device": "cuda", "gpu_id": 0, "is_draft_worker": False, "server_args": arguments,
        "model_config": model, "model": built_model, "dtype": model.dtype,
        "spec_algorithm": speculative.from_string(None), "dp_size": 1, "pp_size": 1,
        "mem_fraction_static": arguments.mem_fraction_static, "is_hybrid_swa": model.is_hybrid_swa,
        "use_mla_backend": model.attention_arch == models.AttentionArch.MLA,
        "start_layer": getattr(built_model, "start_layer", 0),
        "end_layer": getattr(built_model, "end_layer", layers),
        "sliding_window_size": _window(built_model, model),
    }  # fmt: skip
    for name, value in arguments_known.items():
        setattr(runner, name, value)
    runner.num_effective_layers = (runner.end_layer - runner.start_layer) * getattr(
        model.hf_config, "loop_num", 1
    )
    for name in ("full_attention_layer_ids", "swa_attention_layer_ids"):
        ids = getattr(model, name, None) or []
        setattr(
            model, name, [layer for layer in ids if runner.start_layer <= layer < runner.end_layer]
        )
    runner.configure_kv_cache_dtype()
    slack = _slack(configuration, memory_bytes)
    states = arguments.max_mamba_cache_size

    def count(size: int) -> int:
        arguments.max_mamba_cache_size = states  # the count fills it
        _set_free_memory(pools, slack + (size + 0.5) / _GIB)
        config = runner._resolve_memory_pool_config(memory_bytes / _GIB)
        return int(config.max_total_num_tokens) if config.max_running_requests > 0 else 0

    def slots() -> tuple[int, int]:
        if not runner.mambaish_config:
            return 0, 1
        return int(arguments.max_mamba_cache_size), int(runner._calculate_mamba_ratio())

    return _CountedCache(count, slots)


def _window(built_model: Any, model: Any) -> Any:
    """ModelRunner.load_model."""
    if hasattr(built_model, "get_attention_sliding_window_size"):
        return built_model.get_attention_sliding_window_size()
    if model.is_hybrid_swa and model.sliding_window_size is not None:
        return model.sliding_window_size
    return model.attention_chunk_size


def _subclass(kind: Any) -> Any:
    """A class of this module, whose fields are not all the engine's (inside/crashes.py)."""
    return type(kind.__name__, (kind,), {})


def _count_by_configurator(
    module: Any, configuration: EngineConfiguration, built_model: Any, memory_bytes: int
) -> _CountedCache:
    """Later versions count in a class of its own (KVCacheConfigurator)."""
    arguments, model = configuration.arguments, configuration.model
    runtime: Any = importlib.import_module("sglang.srt.runtime_context")
    components = "sglang.srt.model_executor.model_runner_components"
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    speculative: Any = importlib.import_module(
        "sglang.srt.speculative.spec_info"
    ).SpeculativeAlgorithm
    dtypes: Any = importlib.import_module("sglang.srt.mem_cache.kv_cache_dtype")
    cache_dtype = resolve_argument(arguments, "kv_cache_dtype")
    name, dtype = fit(
        dtypes.configure_kv_cache_dtype, server_args_kv_cache_dtype=cache_dtype, model=built_model,
        model_dtype=model.dtype, is_draft_worker=False, is_dflash=False,
        speculative_draft_attention_backend=None,
    )  # fmt: skip
    layers: Any = importlib.import_module(f"{components}.layer_setup").resolve_layer_indices(
        model=built_model, model_config=model, is_draft_worker=False
    )
    runtimes: Any = importlib.import_module(f"{components}.kv_pool_runtime")
    window = importlib.import_module(f"{components}.load_model_utils").resolve_sliding_window_size(
        built_model, model
    )
    plain_algorithm = speculative.from_string(None)
    arguments_known = {
        "device": "cuda", "gpu_id": 0, "attn_dp_size": 1, "pp_size": 1, "pp_group": None,
        "model": built_model, "model_config": model, "server_args": arguments,
        "kv_cache_dtype": dtype, "kv_cache_dtype_str": name or cache_dtype,
        "model_dtype": model.dtype,
        "page_size": resolve_argument(arguments, "page_size"), "sliding_window_size": window,
        "spec_algorithm": plain_algorithm, "is_draft_worker": False,
        "spec_aux_config": StandIn(draft_model_config=None, dflash_draft_num_layers=None),
        "post_capture_kv_active": fit(
            runtimes.is_post_capture_kv_active, server_args=arguments, is_draft_worker=False,
            spec_algorithm=plain_algorithm, token_to_kv_pool_allocator=None
        ),
        "is_hybrid_swa": model.is_hybrid_swa,
        "is_hybrid_swa_compress": model.is_hybrid_swa_compress,
        "use_mla_backend": model.attention_arch == models.AttentionArch.MLA, "layer_info": layers,
        "forward_stream": None, "req_to_token_pool": None, "token_to_kv_pool_allocator": None,
        "memory_pool_config": None,
    }  # fmt: skip
    configurator = fit(_subclass(module.KVCacheConfigurator), **arguments_known)
    slack, states = _slack(configuration, memory_bytes), runtime.get_schedule().max_mamba_cache_size

    def count(size: int) -> int:
        _set_free_memory(module, slack + (size + 0.5) / _GIB)
        runtime.get_context().override("inquiry", max_mamba_cache_size=states)  # the count fills it
        pool = configurator._resolve_memory_pool_config(memory_bytes / _GIB)
        return int(pool.max_total_num_tokens)

    def slots() -> tuple[int, int]:
        if configurator.mambaish_config is None:
            return 0, 1
        state_count = int(runtime.get_schedule().max_mamba_cache_size)
        return state_count, int(configurator._calculate_mamba_ratio())

    return _CountedCache(count, slots)
