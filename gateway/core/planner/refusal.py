"""Why a variant of a model on an engine is no plan: the exception of all gates. Pure."""

from __future__ import annotations


class Refused(Exception):
    """A gate said no. `kernel`: the one that would fail; `layer`: the one that it, or no kernel, computes. `dtypes`: activations
    that would be taken instead. `cache`: a smaller KV cache could help."""

    def __init__(
        self,
        verdict: str,
        reason: str,
        source: str,
        *,
        layer: str | None = None,
        kernel: str | None = None,
        dtypes: tuple[str, ...] = (),
        cache: bool = False,
    ) -> None:
        super().__init__(reason)
        self.verdict, self.reason, self.source, self.layer, self.kernel = verdict, reason, source, layer, kernel
        self.dtypes, self.cache = dtypes, cache
