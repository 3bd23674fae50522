"""The distribution of a module: messages name modules, and commands install distributions.

The rows are data: profiles/failures/imports.yaml has modules with another name than their
distribution, packages.yaml the distributions that engines name. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.diagnosis.advice import distribution_name
from gateway.diagnosis.signature import ImportName

# Modules that left Python's standard library, by version (PEP 594 and 632, "What's New").
_REMOVED_MODULES = {
    "3.12": "asynchat asyncore distutils imp smtpd",
    "3.13": (
        "aifc audioop cgi cgitb chunk crypt imghdr mailcap msilib nis nntplib ossaudiodev pipes"
        " sndhdr spwd sunau telnetlib uu xdrlib"
    ),
}


def removing_version(module: str) -> str:
    """The version of Python that removed a module from its library; empty for other modules."""
    return next(
        (version for version, names in _REMOVED_MODULES.items() if module in names.split()), ""
    )


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
