"""The config of the text model, alone or inside another config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.models.families.config import Fields
from gateway.models.families.field_names import LAYER_COUNT, TEXT_CONFIGS


class Text(NamedTuple):
    """The part of a config that describes the text model, and whether it stands inside another.

    inner_fields: the part for text; `fields` adds the rest of the file.
    """

    fields: Fields
    is_nested: bool
    inner_fields: Mapping[str, Any]


def read_text_config(top: Fields) -> Text:
    """The config of the text model, completed by fields of the outer config."""
    config = dict(top.config)
    nested = False
    text_fields: Mapping[str, Any] = top.config
    for _ in range(2):  # thinker_config.text_config
        inner_config = next(
            (
                config[name]
                for name in TEXT_CONFIGS
                if isinstance(config.get(name), Mapping) and config[name]
            ),
            None,
        )
        if inner_config is None:
            break
        plain_config = {
            name: value for name, value in config.items() if not isinstance(value, Mapping)
        }
        config = {**plain_config, **config, **inner_config}
        nested = True
        text_fields = inner_config
        for name in TEXT_CONFIGS:
            if name not in inner_config:
                config.pop(name, None)
    return Text(Fields(config, top.source), nested, text_fields)


def read_layer_count(fields: Fields) -> int:
    return fields.largest(LAYER_COUNT)
