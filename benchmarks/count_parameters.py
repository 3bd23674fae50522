"""python count_parameters.py < asked.json: what transformers itself makes of models, in an engine's
Python, on the meta device.

    {"defaults": ["whisper", ...]}     one line a model type: {"name", "config"}, as its configuration class is without a word
    {"configs": {"name": {...}}}       one line a config: {"name", "stored": [[name, dtype, shape], ...], "linear": [names]}, or
                                       "refused" in transformers' own words

Stored is what the class that the architecture names would save, whatever quantizes the model, in
bfloat16. linear: the weights of linear layers, and of experts.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    configuration_auto: Any = import_module("transformers.models.auto.configuration_auto")
    modeling_auto: Any = import_module("transformers.models.auto.modeling_auto")
    asked = json.load(sys.stdin)
    for name in asked.get("defaults", ()):
        try:
            config = _without_notes(configuration_auto.CONFIG_MAPPING[name]().to_dict())
            tables = (
                "SPEECH_SEQ_2_SEQ",
                "IMAGE_TEXT_TO_TEXT",
                "CAUSAL_LM",
                "MULTIMODAL_LM",
                "SEQ_TO_SEQ_CAUSAL_LM",
            )
            known = [
                getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}) for table in tables
            ]
            found = next((table[name] for table in known if name in table), None)
            architecture = found if isinstance(found, str) else found[0] if found else None
            said: dict[str, Any] = {
                "config": {**config, "architectures": [architecture], "torch_dtype": "bfloat16"}
            }
        except Exception as error:
            said = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **said}, default=str), flush=True)
    for name, config in asked.get("configs", {}).items():
        try:
            said = _stored(torch, transformers, configuration_auto, config)
        except Exception as error:
            said = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **said}), flush=True)


def _stored(
    torch: Any, transformers: Any, configuration_auto: Any, config: dict[str, Any]
) -> dict[str, Any]:
    """What the class would save: its parameters and buffers under the names of published
    checkpoints, one of those that are tied."""
    kind = getattr(transformers, config["architectures"][0])
    # A model type of its own, with the architecture of another family: Kimi K2 is a DeepSeek V3.
    known = configuration_auto.CONFIG_MAPPING
    plain = _plain(config)
    own = kind.config_class
    if plain["model_type"] in known:
        own = known[
            plain["model_type"]
        ]  # a mapping that is filled as it is asked, so `get` finds nothing
    made = own.from_dict({**plain, "model_type": own.model_type})
    with torch.device("meta"):
        model = kind._from_config(made, dtype=torch.bfloat16)  # noqa: SLF001 - its own way to one class
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    held = {name: one for name, one in model.state_dict(keep_vars=True).items() if name not in tied}
    revert = import_module("transformers.core_model_loading").revert_weight_conversion
    linear = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)
    }
    linear -= {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }  # tied heads
    saved = revert(model, held)
    return {
        "stored": [
            (name, str(one.dtype).removeprefix("torch."), list(one.shape))
            for name, one in saved.items()
        ],
        "linear": [
            name
            for name, one in saved.items()
            if id(one) in linear
            or (".experts." in name and (name.endswith(".weight") or one.dim() == 3))
        ],
    }


def _plain(config: Any) -> Any:
    """Without what quantizes, and without code of its own."""
    if not isinstance(config, dict):
        return config
    own = ("quantization_config", "compression_config", "auto_map")
    return {name: _plain(value) for name, value in config.items() if name not in own}


def _without_notes(config: Any) -> Any:
    """Without what a configuration only notes for itself, which some engines' classes refuse."""
    if not isinstance(config, dict):
        return config
    noted = (
        "_name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
    )
    return {name: _without_notes(value) for name, value in config.items() if name not in noted}


if __name__ == "__main__":
    main()
