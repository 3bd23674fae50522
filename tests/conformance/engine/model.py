"""A whole model as vLLM builds it, on the meta device, for one rank of a tensor-parallel group of which only the size is real.

Every `create_weights` of the model's own class runs with its real sizes; nothing is allocated. config.json is enough.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class _Ranks:
    """A torch process group: what _Group's rank and size are, asked as functions."""

    def __init__(self, size: int) -> None:
        self.ranks = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


class _Group:
    """Stands for a group of ranks: sizes only."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.rank = self.rank_in_group = self.local_rank = self.first_rank = 0
        self.last_rank, self.ranks = size - 1, list(range(size))
        self.is_first_rank, self.is_last_rank = True, size == 1
        self.device = importlib.import_module("torch").device("meta")
        self.device_group = self.cpu_group = _Ranks(size)
        self.device_communicator, self.use_device_communicator = None, False
        self.unique_name = self.group_name = f"group:{size}"

    def size(self) -> int:
        return self.world_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args else None


def group_up(tp: int) -> None:
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    one, group = _Group(1), _Group(tp)
    for name in [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]:
        if name in ("_WORLD", "_TP", "_EP", "_ETP"):
            setattr(state, name, group)
        elif name in ("_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
            setattr(state, name, one)
    state.get_node_count = lambda: 1


def meta_mode() -> Any:
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


@contextmanager
def built(config: dict[str, Any], tp: int, headers: bytes | None = None, **arguments: Any) -> Iterator[tuple[Any, Any]]:
    """(VllmConfig, model); that configuration is the current one inside. `headers` is a safetensors file without its data
    (GPTQ and AWQ read it to learn which modules are quantized); `arguments` are EngineArgs.

    Raises what the engine raises.
    """
    torch: Any = importlib.import_module("torch")
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    engine: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    vllm_config: Any = importlib.import_module("vllm.config")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        if headers is not None:
            Path(folder, "model.safetensors").write_bytes(headers)
        given = {"max_model_len": 2048, "enforce_eager": True, **arguments}
        made = engine(
            model=folder, tensor_parallel_size=tp, load_format="dummy", skip_tokenizer_init=True,
            distributed_executor_backend="mp", **given,
        ).create_engine_config()  # fmt: skip
        group_up(tp)
        torch.set_default_dtype(made.model_config.dtype)
        try:
            with vllm_config.set_current_vllm_config(made), meta_mode(), torch.device("meta"):
                yield made, loading.initialize_model(made)
        finally:
            torch.set_default_dtype(torch.float32)
