"""A whole model as vLLM builds it on the meta device, for one rank of a fictitious group.

Every `create_weights` of the model's own class runs with its real sizes; nothing is allocated.
config.json is enough.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ...inside.meta import Group, meta_mode, write_folder

# Flags of every inquiry: no weights and no tokenizer.
_WEIGHTLESS_SETTINGS = {"load_format": "dummy", "skip_tokenizer_init": True}
# The executor of the ranks where the command line names none.
_EXECUTOR = {"distributed_executor_backend": "mp"}


class _Tokenizer:
    """Tokenizer of model classes that look up a token as they are built: each is token 0."""

    vocab: Mapping[str, int] = defaultdict(int)

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return [0]


@functools.cache  # reading the configurations takes most of a second
def parser() -> Any:
    """The parser of `vllm serve`, wherever this version has it."""
    argument_parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    for folder in ("openai", "launchers", "common"):  # up to 0.26, in 0.32, in 0.33
        try:
            return importlib.import_module(f"vllm.entrypoints.{folder}.cli_args").make_arg_parser(
                argument_parser
            )
        except ModuleNotFoundError as error:
            if error.name not in (
                f"vllm.entrypoints.{folder}",
                f"vllm.entrypoints.{folder}.cli_args",
            ):
                raise
    raise RuntimeError("This version's parser is not where any known version has it.")


def group_up(tp: int, pp: int = 1, stage: int = 0, dp: int = 1) -> None:
    """Pretend to be a rank of `tp` in the stage of `pp` stages, in the first of `dp` groups."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    item = Group(1)
    group = Group(tp)
    for name in [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]:
        if name in ("_WORLD", "_TP"):
            setattr(state, name, group)
        elif name in ("_EP", "_ETP"):
            setattr(state, name, Group(tp * dp))
        elif name == "_PP":
            setattr(state, name, Group(pp, stage))
        elif name == "_DP":
            setattr(state, name, Group(dp))
        elif name in ("_DCP", "_PCP", "_EPLB"):
            setattr(state, name, item)
    state.get_node_count = lambda: 1


def prepare() -> None:
    """Steps of the engine before it builds a model, or of its dependencies when the model was
    made."""
    with suppress(ModuleNotFoundError, AttributeError):
        importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(
            importlib.import_module("torch").device("meta")
        )
    with suppress(ModuleNotFoundError):
        indexer: Any = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
        indexer.has_deep_gemm = lambda: True
    with suppress(ModuleNotFoundError):
        hybrid: Any = importlib.import_module("vllm.model_executor.models.granitemoehybrid")
        layers = hybrid.ALL_DECODER_LAYER_TYPES
        layers |= {
            new_kind: layers[old_kind]
            for new_kind, old_kind in (
                ("linear_attention", "mamba"),
                ("full_attention", "attention"),
            )
            if old_kind in layers
        }
    with suppress(ModuleNotFoundError, AttributeError):
        reasoning: Any = importlib.import_module("vllm.config.reasoning")

        def check_parser(config: Any, *_: Any) -> None:
            """Look only for the parser: its tokens around thoughts are the tokenizer's, which no
            inquiry has."""
            name = getattr(config, "reasoning_parser", None)
            if name and hasattr(reasoning, "ReasoningParserManager"):
                reasoning.ReasoningParserManager.get_reasoning_parser(name)

        reasoning.ReasoningConfig.initialize_token_ids = check_parser
    set_tokenizer()


def set_tokenizer() -> None:
    """Give model classes a tokenizer, of which `skip_tokenizer_init` leaves none.

    Preprocessors keep the engine's own function: they say that there is no tokenizer.
    """
    with suppress(ModuleNotFoundError):
        importlib.import_module("vllm.multimodal.registry")
        for name in ("vllm.tokenizers", "vllm.tokenizers.registry"):
            tokenizers: Any = importlib.import_module(name)
            tokenizers.cached_tokenizer_from_config = lambda *_, **__: _Tokenizer()


def forget_backends() -> None:
    """Versions remember which backend they took for a shape of heads, but not all that it followed
    from: in a start there is one model."""
    with suppress(ModuleNotFoundError, AttributeError):
        importlib.import_module("vllm.v1.attention.selector")._cached_get_attn_backend.cache_clear()


def _refuse(message: str) -> None:
    raise ValueError(message)  # argparse's own way is to print and to exit


def parse_arguments(folder: str, argv: Sequence[str]) -> Any:
    """The command line by the engine's own parser, whose defaults are objects that the engine
    changes: a copy of them. Raises its errors."""
    parses = parser()
    parses.error = _refuse
    return copy.deepcopy(parses.parse_args([*argv, "--model", folder]))


def parse_engine_arguments(folder: str, argv: Sequence[str]) -> Any:
    """EngineArgs of a command line, by the engine's own parser and constructor. Raises their
    errors."""
    arguments = given_arguments(folder, argv)
    for name, value in _WEIGHTLESS_SETTINGS.items():
        setattr(arguments, name, value)
    for name, value in _EXECUTOR.items():
        setattr(arguments, name, getattr(arguments, name) or value)
    return arguments


def given_arguments(folder: str, argv: Sequence[str]) -> Any:
    """EngineArgs of a command line, with its weights and its tokenizer. Raises their errors."""
    engine: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    return engine.from_cli_args(parse_arguments(folder, argv))


@contextmanager
def build_on_meta(
    arguments: Any, stage: int = 0, *, is_served: bool = True
) -> Iterator[tuple[Any, Any]]:
    """(VllmConfig, model) of these EngineArgs; that configuration is the current one inside. Raises
    the engine's errors.

    is_served: whether the engine's API server serves the model; its batches have other defaults.
    """
    torch: Any = importlib.import_module("torch")
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    vllm_config: Any = importlib.import_module("vllm.config")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    # A second set of weights will not come. The record of the first takes half of the time.
    loading.record_metadata_for_reloading = lambda model: None
    usage: Any = (
        importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        if is_served
        else None
    )
    engine_config = arguments.create_engine_config(usage)
    forget_backends()
    group_up(
        arguments.tensor_parallel_size,
        arguments.pipeline_parallel_size,
        stage,
        arguments.data_parallel_size,
    )
    torch.set_default_dtype(engine_config.model_config.dtype)
    try:
        with vllm_config.set_current_vllm_config(engine_config), meta_mode(), torch.device("meta"):
            yield engine_config, loading.initialize_model(engine_config)
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def build_from_config(
    config: Mapping[str, Any], tp: int, headers: bytes | None = None, **arguments: Any
) -> Iterator[tuple[Any, Any]]:
    """`build_on_meta` of a config.json and EngineArgs by name. `headers`: a safetensors file
    without its
    data (GPTQ and AWQ read it to
    learn which modules are quantized)."""
    engine: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    files = {"config.json": json.dumps(config).encode()}
    if headers is not None:
        files["model.safetensors"] = headers
    with write_folder(files) as folder:
        engine_arguments = {"max_model_len": 2048, "enforce_eager": True, **_EXECUTOR, **arguments}
        with build_on_meta(
            engine(
                model=folder, tensor_parallel_size=tp, **_WEIGHTLESS_SETTINGS, **engine_arguments
            ),
            is_served=False,
        ) as config_and_model:
            yield config_and_model
