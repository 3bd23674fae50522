"""The distribution of a module: messages name modules, and commands install distributions.

The rows are data: profiles/failures/imports.yaml has modules with another name than their
distribution, packages.yaml the distributions that engines name. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.diagnosis.advice import distribution_name
from gateway.diagnosis.signature import ImportName


class Distributions:
    """The rows of modules, and the names of distributions that engines name."""

    def __init__(self, imports: Iterable[ImportName], packages: Collection[str]) -> None:
        self._names = {row.module: row.distribution for row in imports}
        self._packages = packages

    def other_name(self, module: str) -> str:
        """The distribution of a module that has another name than it; empty for others."""
        return self._names.get(module.partition(".")[0], "")

    def name(self, module: str) -> str:
        """The distribution of a module; empty if no engine names one.

        An unknown name can be the package of a stranger.
        """
        root = module.partition(".")[0]
        if name := self._names.get(root):
            return name
        return root if distribution_name(root) in self._packages else ""
