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


class RepairHint(NamedTuple):
    """The changes of a variant that could help.

    kernel: the kernel that would fail, so that others are tried; None: no kernel is to blame.
    dtypes: activation dtypes that would work.
    may_shrink_cache: a smaller KV cache could help.
    """

    kernel: str | None = None
    dtypes: tuple[str, ...] = ()
    may_shrink_cache: bool = False


class RefusalError(Exception):
    """A gate's refusal.

    layer: the layer without a working kernel.
    repair: the changes that could help.
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
        repair: RepairHint | None = None,
        evidence: VariantEvidence | None = None,
        question: Question | None = None,
    ) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason
        self.source = source
        self.layer = layer
        self.repair = repair or RepairHint()
        self.evidence = evidence or VariantEvidence()
        self.question = question

    def copy_with_evidence(self, evidence: VariantEvidence) -> RefusalError:
        """A copy with this evidence."""
        return self._copy(evidence=evidence)

    def copy_with_question(self, question: Question) -> RefusalError:
        """A copy that the engine's answer to the question may overrule."""
        return self._copy(question=question)

    def quote_engine(self, answer: EngineAnswer) -> RefusalError:
        """A copy in the engine's own words."""
        return self._copy(reason=answer.refusal_text, source=answer.source)

    def _copy(self, **changes: Any) -> RefusalError:
        fields = {
            name: getattr(self, name)
            for name in (
                "verdict",
                "reason",
                "source",
                "layer",
                "repair",
                "evidence",
                "question",
            )
        }
        return RefusalError(**fields | changes)
