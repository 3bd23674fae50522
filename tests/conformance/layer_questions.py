"""Every linear layer that vLLM itself builds, per rank: {case: {tp: [[name, count, k, n, label]] or "error"}}.

The model is built on the meta device in a tensor-parallel group of which only the size is real, so every `create_weights`
of the model's own class runs with its real sizes. Run it through `python -m tests.conformance.engine`.
"""

from __future__ import annotations

import collections
import importlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.layer_cases import CASES, TENSOR_PARALLEL, case


class _Group:
    """Stands for a group of ranks: sizes only."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.rank = self.rank_in_group = self.local_rank = self.first_rank = 0
        self.last_rank, self.ranks = size - 1, list(range(size))
        self.is_first_rank, self.is_last_rank = True, size == 1
        self.device = importlib.import_module("torch").device("meta")
        self.device_group = self.cpu_group = self
        self.device_communicator, self.use_device_communicator = None, False
        self.unique_name = self.group_name = f"group:{size}"

    def size(self) -> int:
        return self.world_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args else None


def _group_up(tp: int) -> None:
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    one, group = _Group(1), _Group(tp)
    for name in [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]:
        if name in ("_WORLD", "_TP", "_EP", "_ETP"):
            setattr(state, name, group)
        elif name in ("_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
            setattr(state, name, one)
    state.get_node_count = lambda: 1


def _meta_mode() -> Any:
    torch: Any = importlib.import_module("torch")

    def fixed(value: Any) -> Any:
        cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return torch.device("meta") if cuda or type(value) is int else value

    class Meta(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """An explicit device="cuda" means the meta device."""

        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: fixed(value) if name == "device" else value for name, value in (kwargs or {}).items()}
            if getattr(function, "__name__", "") == "cuda":
                return args[0].to("meta")
            if getattr(function, "__name__", "") == "to":
                args = tuple(value if isinstance(value, int) else fixed(value) for value in args)
            return function(*args, **kwargs)

    return Meta()


def _label(method: Any) -> str:
    """The class that does the work, with the bits and the group where it knows them."""
    config = getattr(method, "quant_config", None)
    for known in (method, config):
        bits = getattr(known, "num_bits", None) or getattr(known, "weight_bits", None)
        if isinstance(bits, int):
            return f"{type(method).__name__} {bits} {getattr(known, 'group_size', None)}"
    return type(method).__name__


def _layers(model: Any) -> list[list[Any]]:
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    found: collections.Counter[tuple[str, int, int, str]] = collections.Counter()
    for path, module in model.named_modules():
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        method = getattr(module, "quant_method", None)
        if isinstance(module, base):
            size = getattr(module, "output_size_per_partition", None) or module.output_size
            inputs = getattr(module, "input_size_per_partition", None) or module.input_size
            found[name, inputs, size, _label(getattr(module, "scheme", None) or method)] += 1
        elif "moe" in type(method).__name__.lower():
            config = module.moe_config
            inner = getattr(config, "intermediate_size_per_partition_unpadded", None) or config.intermediate_size_per_partition
            hidden = getattr(config, "hidden_dim_unpadded", None) or config.hidden_dim
            label = _label(method)
            name = name.removesuffix(".routed_experts")
            found[f"{name}.w13", hidden, 2 * inner, label] += 1
            found[f"{name}.w2", inner, hidden, label] += 1
    return [[name, count, k, n, label] for (name, k, n, label), count in sorted(found.items())]


def _build(config: dict[str, Any], tp: int) -> list[list[Any]]:
    torch: Any = importlib.import_module("torch")
    arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    vllm_config: Any = importlib.import_module("vllm.config")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made = arguments(
            model=folder, tensor_parallel_size=tp, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048,
            enforce_eager=True, distributed_executor_backend="mp",
        ).create_engine_config()  # fmt: skip
        _group_up(tp)
        torch.set_default_dtype(made.model_config.dtype)
        try:
            with vllm_config.set_current_vllm_config(made), _meta_mode(), torch.device("meta"):
                return _layers(loading.initialize_model(made))
        finally:
            torch.set_default_dtype(torch.float32)


def answers(_: str) -> dict[str, dict[str, Any]]:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    found: dict[str, dict[str, Any]] = {}
    for model, quant in CASES:
        given = found.setdefault(f"{model} {quant}", {})
        for tp in TENSOR_PARALLEL:
            try:
                given[str(tp)] = _build(case(model, quant), tp)
            except Exception as error:  # an engine's refusal is an answer
                given[str(tp)] = f"{type(error).__name__}: {error}"[:400]
    return found
