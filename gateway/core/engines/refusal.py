"""Why a variant of a model on an engine is no plan: the exception of all gates. Pure."""

from __future__ import annotations

from gateway.core.engines.evidence import Evidence
from gateway.domain import Question


class Refused(Exception):
    """A gate said no. `kernel`: the kernel that would fail; `layer`: the layer that this kernel, or no kernel, computes. `dtypes`:
    activations that would be taken instead. `cache`: a smaller KV cache could help. `evidence`: what was computed until then.
    `question`: what the engine's own code could be asked about it."""

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
        evidence: Evidence | None = None,
        question: Question | None = None,
    ) -> None:
        super().__init__(reason)
        self.verdict, self.reason, self.source, self.layer, self.kernel = verdict, reason, source, layer, kernel
        self.dtypes, self.cache, self.evidence, self.question = dtypes, cache, evidence or Evidence(), question

    def knowing(self, evidence: Evidence) -> Refused:
        """The same refusal, with this evidence."""
        return self._with(evidence, self.question)

    def open(self, question: Question) -> Refused:
        """The same refusal, which the engine's answer to the question may overrule."""
        return self._with(self.evidence, question)

    def _with(self, evidence: Evidence, question: Question | None) -> Refused:
        return Refused(
            self.verdict,
            self.reason,
            self.source,
            layer=self.layer,
            kernel=self.kernel,
            dtypes=self.dtypes,
            cache=self.cache,
            evidence=evidence,
            question=question,
        )
