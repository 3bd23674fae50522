"""Why a variant of a model on an engine is not a plan: the exception of all gates. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.domain import EngineAnswer, LayerAttention, LayerKernel, Memory, Question


class VariantEvidence(NamedTuple):
    """Results so far.

    method: the quantization method, by the engine's own name.
    answer: the engine's own answer about the variant.
    """

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    method: str = ""
    answer: EngineAnswer | None = None

    def add_sizes(self, memory: Memory | None) -> VariantEvidence:
        return VariantEvidence(self.kernels, self.attention, memory, self.method, self.answer)


class RefusalError(Exception):
    """A gate's refusal.

    kernel: the kernel that would fail.
    layer: the layer without a working kernel.
    dtypes: activation dtypes that would work.
    may_shrink_cache: a smaller KV cache could help.
    evidence: results so far.
    question: a question that the engine's own code could answer.
    """

    def __init__(
        self,
        verdict: str,
        reason: str,
        source: str,
        *,
        layer: str | None = None,
        kernel: str | None = None,
        dtypes: tuple[str, ...] = (),
        may_shrink_cache: bool = False,
        evidence: VariantEvidence | None = None,
        question: Question | None = None,
    ) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason
        self.source = source
        self.layer = layer
        self.kernel = kernel
        self.dtypes = dtypes
        self.may_shrink_cache = may_shrink_cache
        self.evidence = evidence or VariantEvidence()
        self.question = question

    def copy_with_evidence(self, evidence: VariantEvidence) -> RefusalError:
        """A copy with this evidence."""
        return self._change_evidence(evidence=evidence)

    def copy_with_question(self, question: Question) -> RefusalError:
        """A copy that the engine's answer to the question may overrule."""
        return self._change_evidence(question=question)

    def quote_engine(self, answer: EngineAnswer) -> RefusalError:
        """A copy in the engine's own words."""
        return self._change_evidence(reason=answer.refusal_text, source=answer.source)

    def _change_evidence(self, **changed_evidence: Any) -> RefusalError:
        condition = {
            name: getattr(self, name)
            for name in ("layer", "kernel", "dtypes", "may_shrink_cache", "evidence", "question")
        }
        verdict = {name: getattr(self, name) for name in ("verdict", "reason", "source")}
        return RefusalError(**{**verdict, **condition, **changed_evidence})
