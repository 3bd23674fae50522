"""SGLang's attention backends for a model: resolved ServerArgs, then the functions that make the
backends.

These functions make classes that only remember their names. Refusals in a backend's constructor or
kernels are not tested.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, NamedTuple

from ...inside.meta import StandIn
from .model import bare_runner, resolve_argument


class Backends(NamedTuple):
    prefill: str
    decode: str
    page: int
    # The items are class, kernels of the prefill and kernels of decoding. A model without such
    # layers has None.
    recurrent: list[str] | None
    hybrid: Any  # the configuration that says which layers keep a state; None, where no layer does


class BackendRecorder:
    """Stands for an attention backend, and remembers the backends that it is made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parts = [
            part for part in (*args, *kwargs.values()) if isinstance(part, BackendRecorder)
        ]

    def names(self) -> list[str]:
        return [type(self).__name__, *(name for part in self.parts for name in part.names())]


def record_backends() -> None:
    """Put a recording class into the place of every attention backend."""
    for folder in ("sglang.srt.layers.attention", "sglang.srt.layers.attention.linear"):
        package: Any = importlib.import_module(folder)
        for result in pkgutil.iter_modules(package.__path__, f"{folder}."):
            if not result.name.endswith("_backend"):
                continue
            try:
                module = importlib.import_module(result.name)
            except ImportError:
                continue  # of other platforms, or a package that the image does not have
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and name.endswith("Backend"):
                    setattr(module, name, type(name, (BackendRecorder,), {}))


def select_backends(arguments: Any, model: Any) -> Backends:
    """Backends of resolved and published ServerArgs and ModelConfig. Raises the engine's errors."""
    return (
        _backends_by_view(arguments, model)
        if hasattr(arguments, "resolve_once")
        else _backends_by_arguments(arguments, model)
    )


def _backends_by_arguments(arguments: Any, model: Any) -> Backends:
    """Up to 0.5.18 at least ServerArgs fills itself."""
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    linear: Any = importlib.import_module("sglang.srt.layers.attention.linear.utils")
    runner = bare_runner()
    runner.server_args = arguments
    runner.model_config = model
    runner.is_draft_worker = False
    runner.init_new_workspace = False
    runner.device = "cuda"
    runner.use_mla_backend = model.attention_arch == models.AttentionArch.MLA
    backend = runner._get_attention_backend()
    kernels = [
        linear.get_linear_attn_prefill_backend().value,
        linear.get_linear_attn_decode_backend().value,
    ]
    recurrent = _recurrent_kernels(backend, kernels, arguments.mamba_backend)
    prefill, decode = arguments.get_attention_backends()
    return Backends(prefill, decode, arguments.page_size, recurrent, _hybrid(runner, model))


def _hybrid(runner: Any, model: Any) -> Any:
    """The configuration of layers with a state; None, where the model has none."""
    try:
        hybrids: Any = importlib.import_module("sglang.srt.configs.hybrid_arch")
    except ModuleNotFoundError:  # up to 0.5.15 the runner has it
        return runner.mambaish_config or None
    return hybrids.mambaish_config(model) or None


def _backends_by_view(arguments: Any, model: Any) -> Backends:
    """Later versions: ServerArgs stays as given, and has a view of the resolved values."""
    setup: Any = importlib.import_module(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
    )
    overrides: Any = importlib.import_module("sglang.srt.arg_groups.overrides")
    hybrids: Any = importlib.import_module("sglang.srt.configs.hybrid_arch")
    prefill, decode = overrides.attention_backends_of(overrides.resolved_view(arguments))
    runner = StandIn(
        server_args=arguments, model_config=model, is_draft_worker=False,
        draft_attention_backend=None, kv_cache_dtype=None,
        use_mla_backend=overrides.use_mla_backend(arguments), prefill_attention_backend_str=prefill,
        decode_attention_backend_str=decode, device="cuda",
    )  # fmt: skip
    hybrid = hybrids.mambaish_config(model)
    if hybrid:
        state = StandIn(temporal=StandIn(dtype=hybrid.mamba2_cache_params.dtype.temporal))
        pool = StandIn(mamba_cache=state)
        runner.req_to_token_pool = StandIn(mamba_pool=pool)
    backend = setup.get_attention_backend(model_runner=runner)
    linear = getattr(runner, "linear_attn_backends", None)
    kernels = [linear.prefill.value, linear.decode.value] if linear else []
    recurrent = _recurrent_kernels(backend, kernels, resolve_argument(arguments, "mamba_backend"))
    return Backends(
        prefill, decode, resolve_argument(arguments, "page_size"), recurrent, hybrid or None
    )


def _recurrent_kernels(
    recorded_backend: BackendRecorder, kernels: list[str], mamba: str | None
) -> list[str] | None:
    names = recorded_backend.names()
    if "HybridLinearAttnBackend" not in names[0]:
        return None
    return [names[-1], *([mamba or "triton"] * 2 if names[-1] == "Mamba2AttnBackend" else kernels)]
