"""The YAML of exported documents, as people edit it: every value in its place, no anchors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


# Texts that PyYAML leaves plain and Kubernetes reads as numbers or booleans: it follows YAML 1.2 in
# exponents without a sign, in 0o17 and in 09, and YAML 1.1 in y and n.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|[-+]?0o[0-7]+$", re.ASCII),
    list("-+.0123456789"),
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]$"), list("yYnN"))


def yaml_text(documents: Sequence[dict[str, Any]]) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
    return text.rstrip("\n")
