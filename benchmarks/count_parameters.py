"""python count_parameters.py < asked.json: what transformers itself makes of models, in an engine's Python, on the meta device.

    {"defaults": ["whisper", ...]}     one line a model type: {"name", "config"}, as its configuration class is without a word
    {"configs": {"name": {...}}}       one line a config: {"name", "bytes"}, or "refused" in transformers' own words

The bytes are those of all parameters in the config's dtype, of the class that its architecture names, whatever quantizes them.
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
            tables = ("SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
            known = [getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}) for table in tables]
            found = next((table[name] for table in known if name in table), None)
            architecture = found if isinstance(found, str) else found[0] if found else None
            said: dict[str, Any] = {"config": {**config, "architectures": [architecture], "torch_dtype": "bfloat16"}}
        except Exception as error:
            said = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **said}, default=str), flush=True)
    for name, config in asked.get("configs", {}).items():
        try:
            plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
            made = configuration_auto.CONFIG_MAPPING[config["model_type"]].from_dict(plain)
            kind = getattr(transformers, config["architectures"][0])
            with torch.device("meta"):
                model = kind._from_config(made, dtype=torch.bfloat16)  # noqa: SLF001 - its own way to one class
            said = {"bytes": 2 * sum(one.numel() for one in model.parameters())}
        except Exception as error:
            said = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **said}), flush=True)


def _without_notes(config: Any) -> Any:
    """Without what a configuration only notes for itself, which some engines' classes refuse."""
    if not isinstance(config, dict):
        return config
    noted = ("_name_or_path", "output_attentions", "output_hidden_states", "return_dict", "transformers_version")
    return {name: _without_notes(value) for name, value in config.items() if name not in noted}


if __name__ == "__main__":
    main()
