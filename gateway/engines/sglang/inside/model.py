"""A model as SGLang builds it on the meta device, for one rank of groups with only a size.

`parse_arguments` reads a command line as the server does. `configure_engine` resolves and publishes
the
arguments as a scheduler does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ...inside.crashes import mark_stand_in_use
from ...inside.meta import Group, meta_mode

# Flags of every inquiry: no weights and no tokenizer.
_WEIGHTLESS_FLAGS = ("--load-format=dummy", "--skip-tokenizer-init", "--device=cuda")
# Modules that import a layer's method before its weights are prepared.
_BACKEND_MODULES = {
    "moe.utils": "moe",
    "quantization.fp8_utils": "fp8_gemm",
    "quantization.fp4_utils": "fp4_gemm",
    "quantization.unquant": "bf16_gemm",
}

# Functions of a tensor that return its values.
_VALUES = (
    "item",
    "__float__",
    "__bool__",
    "allclose",
    "unique",
    "_unique2",
    "_return_output",
)


class EngineConfiguration(NamedTuple):
    arguments: Any  # ServerArgs, resolved
    model: Any  # ModelConfig
    quantization: Any  # QuantizationConfig, or None


class _Parser(ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)  # argparse's own way is to print and to exit


@functools.cache
def _argument_parser() -> ArgumentParser:
    parser = _Parser(prog="sglang serve")
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def parse_arguments(folder: str, argv: Sequence[str]) -> Any:
    """ServerArgs of a command line, by the engine's own parser and constructor. Raises their
    errors."""
    server_args = _argument_parser().parse_args(
        [*argv, f"--model-path={folder}", *_WEIGHTLESS_FLAGS]
    )
    return importlib.import_module("sglang.srt.server_args").ServerArgs.from_cli_args(server_args)


def resolve_argument(arguments: Any, name: str) -> Any:
    """The resolved value of an argument. Up to 0.5.10 ServerArgs resolves itself; later versions
    keep it as given."""
    if hasattr(arguments, "resolved_dict"):
        return arguments.resolved_dict()[name]
    return getattr(arguments, name)


def publish(server_args: Any) -> None:
    """Resolve ServerArgs and publish them to the engine's code, as a scheduler does. Raises the
    engine's errors."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        if hasattr(parallel, "clear_stamp"):  # not before 0.5.21
            parallel.clear_stamp()
    importlib.import_module("sglang.srt.server_args").set_global_server_args_for_scheduler(
        server_args
    )


def configure_engine(server_args: Any, stage: int = 0) -> EngineConfiguration:
    """Publish ServerArgs and their consequences for one of the stages. Raises the engine's
    errors."""
    publish(server_args)
    model = importlib.import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(
        server_args
    )
    set_groups(server_args, stage)
    initialize_backends(server_args)
    # This call imports the models.
    importlib.import_module("sglang.srt.model_loader.utils").get_model_architecture(model)
    return EngineConfiguration(server_args, model, loader()._get_quantization_config(model, load()))


def initialize_backends(server_args: Any) -> None:
    """Settle the runners of experts and products, as the arguments name them.

    From 0.5.19 on some of these functions, and from 0.5.20 all, read the published arguments.
    """
    for module, name in _BACKEND_MODULES.items():
        start = getattr(
            importlib.import_module(f"sglang.srt.layers.{module}"),
            f"initialize_{name}_config",
            None,
        )
        if start is not None:
            start(*[server_args] * len(inspect.signature(start).parameters))


def set_groups(server_args: Any, stage: int = 0) -> None:
    """Give the engine's code the groups of these arguments, of which only the size is real."""
    _set_groups(
        tp=resolve_argument(server_args, "tp_size"),
        ep=resolve_argument(server_args, "ep_size"),
        pp=resolve_argument(server_args, "pp_size"),
        stage=stage,
        dp=_attention_group_count(server_args),
        cp=_group_size(server_args, "attn_cp_size"),
        moe_dp=_group_size(server_args, "moe_dp_size"),
    )


def _attention_group_count(server_args: Any) -> int:
    """Groups of ranks with attention for requests of their own."""
    if hasattr(server_args, "attn_dp_size"):
        return int(resolve_argument(server_args, "attn_dp_size"))
    return (
        int(resolve_argument(server_args, "dp_size"))
        if resolve_argument(server_args, "enable_dp_attention")
        else 1
    )


def _group_size(server_args: Any, name: str) -> int:
    """The size of a group; versions without such groups have one rank in it."""
    return int(resolve_argument(server_args, name) or 1) if hasattr(server_args, name) else 1


def _set_groups(
    tp: int, ep: int, pp: int, stage: int, dp: int = 1, cp: int = 1, moe_dp: int = 1
) -> None:
    """Groups of which only the size is real: the first rank of each, in this stage.

    tp: the number of ranks of all `dp` groups together.
    cp: ranks that share an attention's context.
    """
    sizes = {
        "tp": tp,
        "attn_tp": tp // (dp * cp),
        "attn_cp": cp,
        "moe_ep": ep,
        "moe_tp": tp // (ep * moe_dp),
        "moe_dp": moe_dp,
    }
    pipeline = Group(pp, stage)
    _set_module_groups(sizes, pipeline)
    _set_attention_groups(sizes["attn_tp"], dp)
    with suppress(ImportError):
        _set_context_groups(sizes, pipeline, stage, has_dp_attention=dp > 1)


# Variables of groups in `parallel_state`, the first pattern that matches, and their sizes.
_GROUP_NAMES = (
    (r"MOE_EP", "moe_ep"),
    (r"MOE_TP", "moe_tp"),
    (r"ATTN.*TP", "attn_tp"),
    (r"ATTN.*CP", "attn_cp"),
    (r"MOE.*DP", "moe_dp"),
    (r"TP|WORLD", "tp"),
)


def _set_module_groups(sizes: Mapping[str, int], pipeline: Group) -> None:
    """Set the groups that `parallel_state` keeps in variables.

    sizes: the sizes of groups, by name.
    """
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    for variable in [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]:
        name = next((name for form, name in _GROUP_NAMES if re.search(form, variable)), None)
        if name is not None:
            setattr(state, variable, Group(sizes[name]))
        elif variable == "_PP":
            setattr(state, variable, pipeline)
        elif re.search(r"PP|DP|CP", variable):
            setattr(state, variable, Group(1))


def _set_attention_groups(attention_tp: int, dp: int) -> None:
    """Set the variables of attention, which splits its ranks into `dp` groups."""
    attention: Any = importlib.import_module("sglang.srt.layers.dp_attention")
    values = {
        "_ATTN_TP_RANK": 0,
        "_ATTN_TP_SIZE": attention_tp,
        "_ATTN_DP_RANK": 0,
        "_ATTN_DP_SIZE": dp,
        "_LOCAL_ATTN_DP_SIZE": dp,
        "_LOCAL_ATTN_DP_RANK": 0,
        "_ENABLE_DP_ATTENTION_FLAG": dp > 1,
        "_ATTN_TP_GROUP": Group(attention_tp),
    }
    for name, value in values.items():
        setattr(attention, name, value)


def _set_context_groups(
    sizes: Mapping[str, int], pipeline: Group, stage: int, *, has_dp_attention: bool
) -> None:
    """Set the groups of the runtime context, which newer versions have. Raises ImportError without
    it."""
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    values: dict[str, Any] = {}
    # Up to 0.5.17 it has no fields of its own.
    for field in context._parallel_fields() if hasattr(context, "_parallel_fields") else ():
        if field == "pp_group":
            values[field] = pipeline
        elif field.endswith("_group"):
            default_size = sizes["tp"] if re.search("tp|world", field) else 1
            values[field] = Group(sizes.get(field.removesuffix("_group"), default_size))
        elif field.endswith("_rank"):
            values[field] = stage if field == "pp_rank" else 0
    if values:
        context.get_parallel().override_permanently(**values)
    with suppress(AttributeError):  # older versions have the module's own flag
        context.get_flags().dp.enabled = has_dp_attention


def bare_runner() -> Any:
    """An uninitialised ModelRunner: without a GPU, and with only the attributes that are set.

    The class of the runner is one of this module, so a missing attribute does not count as a
    refusal.
    """
    runners: Any = importlib.import_module("sglang.srt.model_executor.model_runner")

    class Runner(runners.ModelRunner):  # type: ignore[misc]
        pass

    runner = object.__new__(Runner)
    if hasattr(runners, "_UNSET"):  # from 0.5.13 on
        runner._linear_attn_registry_cache = runners._UNSET
    return runner


def loader() -> Any:
    return importlib.import_module("sglang.srt.model_loader.loader")


def load() -> Any:
    return importlib.import_module("sglang.srt.configs.load_config").LoadConfig(load_format="dummy")


def _meta_values() -> Any:
    """Tensors on the meta device have no values: a value read from one is a scale of 1."""
    torch: Any = importlib.import_module("torch")

    class Values(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            if name in _VALUES:
                mark_stand_in_use(4)
            if name in ("item", "__float__"):
                return 1.0
            if name in ("__bool__", "allclose"):
                return True
            if name in ("unique", "_unique2", "_return_output"):
                return args[0].flatten()[:1]
            return function(*args, **(kwargs or {}))

    return Values()


@contextmanager
def meta(dtype: str) -> Iterator[None]:
    torch: Any = importlib.import_module("torch")
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with meta_mode(), torch.device("meta"), _meta_values():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build_model(configuration: EngineConfiguration) -> Any:
    """The whole model; call this within `meta`. Raises the engine's errors."""
    built_model = loader()._initialize_model(
        configuration.model, load(), configuration.quantization
    )
    is_staged = int(resolve_argument(configuration.arguments, "pp_size")) > 1
    if is_staged and "pp_proxy_tensors" not in inspect.signature(built_model.forward).parameters:
        # ModelRunner raises this error once it has loaded the model.
        raise AssertionError("Pipeline Parallel is not compatible with this model.")
    return built_model
