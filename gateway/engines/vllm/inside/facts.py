"""One vLLM version's own description: flags, architectures, quantization methods, environment,
defaults, packages.

The engine's own parser and registries are imported; only the load formats are read in its source.
"""

from __future__ import annotations

import argparse
import ast
import enum
import json
import tempfile
import typing
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...inside.compiled import common, compiled_architectures, cuda_major
from ...inside.installed import config_classes, installed_packages
from . import boot as vllm_boot
from .model import build_from_config, parser, prepare

GIB = 1024**3


def facts() -> dict[str, Any]:
    """The facts of the version that is booted."""
    args = import_module("vllm.engine.arg_utils")
    usage = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    cache = import_module("vllm.config").CacheConfig
    quantizations = import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
    batched, seqs = args.EngineArgs.get_batch_defaults(1)
    device = "cuda" if import_module("vllm.platforms").current_platform.is_cuda() else "cpu"
    package = Path(import_module("vllm").__path__[0])
    answer = {
        "version": str(import_module("vllm").__version__),
        "device": device,
        "flags": _flag_facts(parser(), _choices(args.EngineArgs, quantizations)),
        "architectures": _architectures(),
        "quantizations": {name: _method(name) for name in sorted(quantizations)},
        "environment": _environment(),
        "compiled": common(
            capabilities
            for name, capabilities in compiled_architectures(package).items()
            if name.startswith(("_C", "_moe_C"))
        ),
        "cuda_runtime": cuda_major(package),
        **config_classes(_configs()),
        "default_utilization": cache().gpu_memory_utilization,
        "default_batched_tokens": batched[usage],
        "default_seqs": seqs[usage],
        **installed_packages(),
    }
    if device == "cuda":
        answer["block_size"] = cache.DEFAULT_BLOCK_SIZE
        for size in (80, 180):
            vllm_boot.imagine((8, 6), size * GIB, 8)
            batched, seqs = args.EngineArgs.get_batch_defaults(1)
            answer[f"on_{size}_gib"] = {"batched_tokens": batched[usage], "seqs": seqs[usage]}
    return answer


def _method(name: str) -> dict[str, Any]:
    """Requirements of a quantization method as a whole (VllmConfig._get_quantization_config,
    ModelConfig._verify_quantization), and whether it takes unquantized weights (get_quant_config
    finds no file in an empty folder)."""
    methods: Any = import_module("vllm.model_executor.layers.quantization")
    kind = methods.get_quantization_config(name)
    minimum = kind.get_min_capability()
    limits: dict[str, Any] = (
        {"min_capability": f"{minimum // 10}.{minimum % 10}"} if minimum > 0 else {}
    )
    dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in _dtypes(kind))
    limits["dtypes"] = [dtype for dtype in dtypes if dtype in ("bfloat16", "float16", "float32")]
    if name in methods.DEPRECATED_QUANTIZATION_METHODS:
        limits["deprecated"] = True
    if (configured_method := _online(name)) is not None:
        is_same_kind = type(configured_method) is kind
        limits["online"] = (
            name
            if is_same_kind
            else next(
                m for m in ("online", *methods.QUANTIZATION_METHODS) if _is_of(configured_method, m)
            )
        )
    return limits


def _is_of(configured_method: Any, name: str) -> bool:
    methods: Any = import_module("vllm.model_executor.layers.quantization")
    return name in methods.QUANTIZATION_METHODS and type(
        configured_method
    ) is methods.get_quantization_config(name)


def _dtypes(kind: Any) -> list[Any]:
    """Asked of the class; where only an instance answers, of one that was never initialised."""
    try:
        return list(kind.get_supported_act_dtypes())
    except TypeError:
        return list(kind.get_supported_act_dtypes(object.__new__(kind)))


def _online(name: str) -> Any:
    """The method for unquantized weights, as the engine resolves it; None: the engine refuses."""
    load = import_module("vllm.model_executor.model_loader.weight_utils").get_quant_config
    # early versions have no names for this: 0.20 has the module without the function, 0.18 neither
    try:
        resolve = import_module("vllm.config.quantization").resolve_quantization_config
    except (ImportError, AttributeError):
        resolve = lambda *_: None  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        model = SimpleNamespace(
            model=folder,
            revision=None,
            quantization=name,
            quantization_config=resolve(name, None),
            hf_config=SimpleNamespace(),
            hf_overrides={},
        )
        try:
            return load(model, SimpleNamespace(download_dir=None))
        except (ValueError, TypeError, KeyError, AssertionError):
            return None


def _choices(engine_args: Any, quantizations: list[str]) -> dict[str, list[str]]:
    """Words that the engine checks after its parser: plugin registries and enumerations."""
    closed_choices = {
        "quantization": list(quantizations),
        "load-format": _load_formats(),
        "tool-call-parser": import_module("vllm.tool_parsers").ToolParserManager.list_registered(),
        "reasoning-parser": (
            import_module("vllm.reasoning").ReasoningParserManager.list_registered()
        ),
    }
    for name, field in engine_args.__dataclass_fields__.items():
        for hint in (field.type, *typing.get_args(field.type)):
            if isinstance(hint, type) and issubclass(hint, enum.Enum):
                # Enumerations are named on the command line; numbered ones (-O2) by their number.
                # CUSTOM needs a plugin.
                numbered = issubclass(hint, int)
                closed_choices[name.replace("_", "-")] = [
                    str(m.value) if numbered else m.name for m in hint if m.name != "CUSTOM"
                ]
    return closed_choices


def _load_formats() -> list[str]:
    # Importing the loaders calls compiled operators, so this one list is read from their source.
    loader = (
        Path(import_module("vllm").__file__ or "").parent
        / "model_executor/model_loader/__init__.py"
    )
    for node in ast.parse(loader.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LoadFormats":
            return [
                word.value
                for word in ast.walk(node.value)
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            ]
    raise RuntimeError(f"{loader} has no LoadFormats")


def _architectures() -> dict[str, list[str]]:
    registry = import_module("vllm.model_executor.models.registry")
    supported = set(registry.ModelRegistry.get_supported_archs())
    tables: dict[str, list[str]] = {}
    for name, table in vars(registry).items():
        if (
            name.startswith("_")
            and name.endswith("_MODELS")
            and name != "_VLLM_MODELS"
            and isinstance(table, dict)
        ):
            tables[name.strip("_").removesuffix("_MODELS").lower().replace("_", " ")] = sorted(
                supported & set(table)
            )
            supported -= set(table)
    if supported:
        tables["others"] = sorted(supported)
    return {name: table for name, table in tables.items() if table}


def stand_ins() -> list[str]:
    """Architectures of text models without a class here that this version builds by transformers'
    class, from the defaults of their configuration. Takes minutes."""
    prepare()
    auto: Any = import_module("transformers.models.auto.modeling_auto")
    registry: Any = import_module("vllm.model_executor.models.registry")
    listed_names = {*registry.ModelRegistry.get_supported_archs()}
    names = {
        (model_type, name)
        for model_type, classes in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for name in ([classes] if isinstance(classes, str) else classes)
        if name.endswith("ForCausalLM") and name not in listed_names
    }
    return sorted({name for model_type, name in sorted(names) if _builds(model_type, name)})


def _builds(model_type: str, architecture: str) -> bool:
    """Whether this version builds the model that the defaults describe, also with experts where
    they leave their number open."""
    configs: Any = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    with suppress(Exception):  # no defaults at all
        plain_config = json.loads(configs[model_type]().to_json_string(use_diff=False))
        plain_config["architectures"] = [architecture]
        sparse_config = {
            name: 8 if value is None and "experts" in name else value
            for name, value in plain_config.items()
        }
        for fields in (plain_config, sparse_config):
            with suppress(Exception), build_from_config(fields, 1, max_model_len=128):
                return True
    return False


def _configs() -> dict[str, str]:
    """vLLM's own configuration classes by model type: their names, as none of them need be imported
    for that."""
    registry = import_module("vllm.transformers_utils.config")._CONFIG_REGISTRY
    return {name: dict.__getitem__(registry, name) for name in registry}


def _environment() -> dict[str, bool]:
    """Environment variable -> whether its type leaves only numbers, switches and listed words.

    The declared type, or that of the default where none is declared.
    """
    envs = import_module("vllm.envs")
    declared_names: dict[str, bool] = {}
    for node in ast.walk(ast.parse(Path(str(envs.__file__)).read_text())):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id.isupper()
        ):
            words = {name.id for name in ast.walk(node.annotation) if isinstance(name, ast.Name)}
            declared_names[node.target.id] = words <= {"bool", "int", "float", "Literal"}
    defaults = envs.environment_variables.items()
    return {
        name: declared_names[name] if name in declared_names else isinstance(read(), (int, float))
        for name, read in defaults
    }


def _flag_facts(parser: Any, closed_choices: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    flags = {}
    for action in parser._actions:
        name = next(
            (option[2:] for option in action.option_strings if option.startswith("--")), "help"
        )
        if name == "help":
            continue
        choices = (
            action.choices
            or (action.metavar if isinstance(action.metavar, list) else None)
            or closed_choices.get(name)
        )
        default = action.default if type(action.default) in (bool, int, float, str) else None
        flags[name] = {
            "type": _flag_type(action),
            "choices": (
                [str(choice) for choice in choices if str(choice) != "None"] if choices else None
            ),
            "default": None if default == argparse.SUPPRESS else default,
            "negatable": f"--no-{name}" in parser._option_string_actions,
        }
    return flags


def _flag_type(action: Any) -> str:
    """The flag's type.

    A list of separate words (nargs) takes one value of its element's type, because the gateway
    writes `--flag=value` with one item. JSON and dataclass options are json.
    """
    if action.nargs == 0:
        return "bool"
    convert = action.type
    # vLLM wraps a converter to accept "None".
    while inner_convert := _closed_over(convert, "return_type"):
        convert = inner_convert
    name = getattr(convert, "__name__", "str")
    if "int" in name.split("_"):  # int, human_readable_int, human_readable_int_or_auto
        return "int"
    return {
        "float": "float",
        "loads": "json",
        "parse_dataclass": "json",
        "union_dict_and_str": "json",
    }.get(name, "str")


def _closed_over(function: Any, variable: str) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or variable not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(variable)].cell_contents
