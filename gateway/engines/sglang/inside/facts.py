"""One SGLang version's own description: flags, architectures, quantization methods, environment,
packages.

The engine's own parser and registries are imported; names of model classes are read in its source.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...inside.compiled import common, compiled_architectures, cuda_major
from ...inside.installed import config_classes, installed_packages

# A flag whose action only warns that it does nothing any more.
_RETIRED_ACTION = "DeprecatedAction"


def facts() -> dict[str, Any]:
    """The facts of the version that is booted."""
    parser = argparse.ArgumentParser()
    arguments = import_module("sglang.srt.server_args").ServerArgs
    arguments.add_cli_args(parser)
    methods = import_module("sglang.srt.layers.quantization").QUANTIZATION_METHODS
    package = import_module("sglang")
    kernels = _kernels()
    return {
        "version": str(package.__version__),
        "device": "cuda",
        "flags": _flag_facts(parser),
        "architectures": {"by file": _architectures(Path(package.__path__[0], "srt/models"))},
        "quantizations": {name: _method(name, kind) for name, kind in methods.items()},
        "environment": _environment(import_module("sglang.srt.environ")),
        "compiled": (
            common(
                capabilities
                for name, capabilities in compiled_architectures(kernels).items()
                if name.endswith("common_ops")
            )
            if kernels
            else []
        ),
        "cuda_runtime": cuda_major(kernels) if kernels else None,
        **config_classes(_configs()),
        **installed_packages(),
    }


def _kernels() -> Path | None:
    """The folder of SGLang's extensions, a package of its own; None: it is not here, or a
    stand-in."""
    result = find_spec("sgl_kernel")
    folder = next(iter(result.submodule_search_locations or ()), "") if result else ""
    return Path(folder) if folder and Path(folder).is_dir() else None


def _configs() -> dict[str, str]:
    """The classes that it registers with transformers, by model type."""
    try:
        module = import_module("sglang.srt.utils.hf_transformers.common")
    except ModuleNotFoundError:  # up to 0.5.10
        module = import_module("sglang.srt.utils.hf_transformers_utils")
    return {name: kind.__name__ for name, kind in module._CONFIG_REGISTRY.items()}


def _method(name: str, kind: Any) -> dict[str, Any]:
    """Requirements of a quantization method as a whole (_get_quantization_config in
    srt/model_loader/loader.py).

    Some classes answer only as instances: of an uninitialised one that stands for `name`.
    """
    instance = object.__new__(kind)
    instance.use_mxfp8 = name == "mxfp8"
    minimum = _call(kind.get_min_capability, instance)
    dtypes = sorted(
        str(dtype).removeprefix("torch.")
        for dtype in _call(kind.get_supported_act_dtypes, instance)
    )
    limits: dict[str, Any] = (
        {"min_capability": f"{minimum // 10}.{minimum % 10}"} if minimum > 0 else {}
    )
    limits["dtypes"] = [dtype for dtype in dtypes if dtype in ("bfloat16", "float16", "float32")]
    return limits | ({"online": name} if _is_online_method(name) else {})


def _is_online_method(name: str) -> bool:
    """Whether get_quant_config makes something of the method without a file that says how the
    weights are quantized."""
    load = import_module("sglang.srt.model_loader.weight_utils").get_quant_config
    with tempfile.TemporaryDirectory() as folder:
        config = import_module("transformers").PretrainedConfig()
        model = SimpleNamespace(
            model_path=folder,
            revision=None,
            quantization=name,
            hf_config=config,
            is_draft_model=False,
        )
        try:
            return load(model, SimpleNamespace(model_loader_extra_config=None), {}) is not None
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError):
            return False


def _call(function: Any, item: Any) -> Any:
    try:
        return function()
    except TypeError:
        return function(item)


def _flag_facts(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    flags: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        names = [option[2:] for option in action.option_strings if option.startswith("--")]
        positive = [name for name in names if not name.startswith("no-")]
        if positive == ["help"] or type(action).__name__ == _RETIRED_ACTION:
            continue
        choices = action.choices
        default = action.default if type(action.default) in (bool, int, float, str) else None
        kind = _flag_type(action)
        flag = {
            "type": kind,
            "choices": _sorted_choices(choices) if choices else None,
            "default": default,
            "negatable": f"no-{positive[0]}" in names,
        }
        flags[positive[0]] = flag
        flags |= {name: {"type": kind, "same_as": positive[0]} for name in positive[1:]}
    return flags


def _sorted_choices(choices: Any) -> list[str]:
    """A set has no order of its own, and differs from run to run."""
    choice_texts = [str(choice) for choice in choices if str(choice) != "None"]
    return sorted(choice_texts) if isinstance(choices, (set, frozenset)) else choice_texts


def _flag_type(action: Any) -> str:
    """A list given as separate words (nargs) takes one value: the gateway writes `--flag=value`,
    one item."""
    if action.nargs == 0:
        return "bool"
    name = getattr(action.type, "__name__", "str")
    kinds = {
        "int": "int",
        "human_readable_int": "int",
        "float": "float",
        "loads": "json",
        "json_list_type": "json",
    }
    return kinds.get(name, "str")


def _architectures(folder: Path) -> list[str]:
    """The classes that `EntryClass` of each model file names (srt/models/registry.py). Importing
    them would run kernels."""
    result: set[str] = set()
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8-sig")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                result |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return sorted(result)


def _environment(module: Any) -> dict[str, bool]:
    """Environment variable -> whether its type leaves only numbers and switches."""
    plain_kinds = (module.EnvBool, module.EnvInt, module.EnvFloat)
    fields = vars(module.Envs).items()
    return {
        name: isinstance(field, plain_kinds)
        for name, field in fields
        if isinstance(field, module.EnvField)
    }
