"""Inquiries on a host, within limits, with a cache of answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from gateway.domain import EngineAnswer, EngineRef, Question, RuleGap, StartSettings
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquiry_document import (
    IDENTITY_QUESTION,
    BadAnswer,
    ModelFiles,
    StatedGpus,
    document,
    read_answers,
    read_engine,
    read_version,
)
from gateway.errors import HostError

# One line per question; a version has dozens of questions.
_MAX_LINES = 10_000
# Sizes of a cache that differ by less than this part rehearse the same start.
_CACHE_SIZE_PARTS = 64


class AskedHost(Protocol):
    """The methods of `gateway.hosts.host.Host` that an inquiry needs."""

    async def resolve(self, engine: EngineRef) -> EngineRef:
        """The engine with the digest of its image, whose name may move. Raises HostError where it
        is not here."""
        ...

    async def identity(self, engine: EngineRef) -> str:
        """Identity of the image or environment that would answer. Raises HostError for an engine
        that is not here."""
        ...

    def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        """The lines that the engine's own Python answers to the document. gpus: those that it gets,
        by UUID. Raises HostError."""
        ...


class Inquirer:
    """Inquiries to one host's engines. Every failure is a HostError; the forecast by the rules
    stays."""

    def __init__(self, host: AskedHost, cache: AnswerCache) -> None:
        self._host = host
        self._cache = cache
        # One at a time: an import of an engine takes a core and gigabytes while engines serve.
        self._turn = asyncio.Lock()

    async def exact(self, engine: EngineRef) -> EngineRef:
        """The engine that this reference means on the host now, for questions and starts. Raises
        HostError if it is not here."""
        return await self._host.resolve(engine)

    async def identify(self, engine: EngineRef) -> tuple[EngineRef, str]:
        """The engine as `exact` gives it, and the identity that its answers are stored under."""
        engine = await self.exact(engine)
        return engine, await self._host.identity(engine)

    async def answers(
        self,
        engine: EngineRef,
        gpus: StatedGpus | None,
        model: ModelFiles,
        questions: Sequence[Question],
        limit_s: float,
        starts: Mapping[Question, StartSettings] = MappingProxyType({}),
        unproven_questions: Container[Question] = (),
    ) -> dict[Question, EngineAnswer]:
        """Answers within `limit_s`; late answers, and answers after a failure, are missing.

        starts: the start to rehearse with each of some questions.
        unproven_questions: those of them for which a kept answer about another start does not
            count.

        Raises HostError if a failure left no answer.
        """
        engine = await self.exact(engine)
        source = await self._host.identity(engine)
        result = await asyncio.to_thread(self._cache.load, questions, source, gpus, model)
        result = {
            question: answer
            for question, answer in result.items()
            if question not in unproven_questions or rehearses(answer, starts.get(question))
        }
        end = time.monotonic() + limit_s
        problem: HostError | None = None
        # A process for each environment: engines read theirs once.
        for env in dict.fromkeys(question.env for question in questions):
            unknown_questions = [
                question for question in questions if question.env == env and question not in result
            ]
            if not unknown_questions or time.monotonic() >= end:
                continue
            inquiry = document(
                engine.kind, gpus, model=model, questions=unknown_questions, starts=starts
            )
            lines, failed_error = await self._lines(engine, inquiry, end - time.monotonic())
            problem = problem or failed_error
            try:
                new_answers = await asyncio.to_thread(
                    read_answers, lines, unknown_questions, source
                )
            except BadAnswer as error:
                problem = _nonsense_error(engine, error)
                continue
            await asyncio.to_thread(self._cache.store, new_answers, source, gpus, model)
            result |= new_answers
        if problem is not None and not result:
            raise problem
        return result

    async def record_contradictions(self, gaps: Iterable[RuleGap]) -> None:
        """Remember contradictions between answers and rules."""
        await asyncio.to_thread(self._cache.gaps.store, gaps)

    async def version(
        self, engine: EngineRef, gpus: StatedGpus | None, limit_s: float
    ) -> tuple[Mapping[str, Any], str]:
        """The engine's description of its version, and the identity of the source. Raises
        HostError."""
        engine = await self.exact(engine)
        source = await self._host.identity(engine)
        lines, problem = await self._lines(
            engine, document(engine.kind, gpus, has_version=True), limit_s
        )
        try:
            answer = next(
                (answer for line in lines if (answer := read_version(line)) is not None), None
            )
        except BadAnswer as error:
            raise _nonsense_error(engine, error) from None
        if answer is None:
            raise problem or HostError(
                f"{engine} did not describe itself within {limit_s:g} s.",
                hint="Try again when the machine is idle.",
            )
        return answer, source

    async def installed_engine(self, engine: EngineRef, limit_s: float) -> EngineRef:
        """The engine in this image, by its installed packages. Raises HostError."""
        engine = await self.exact(engine)
        lines, problem = await self._lines(engine, IDENTITY_QUESTION, limit_s)
        try:
            kind, version = next((read_engine(line) for line in lines), (None, None))
        except BadAnswer as error:
            raise _nonsense_error(engine, error) from None
        if kind is None:
            raise problem or HostError(
                f"The image {engine.image} did not name its engine within {limit_s:g} s.",
                hint="Try again when the machine is idle, or name the engine with --engine.",
            )
        if not kind:
            raise HostError(
                f"The image {engine.image} holds no engine that is known here: neither vLLM nor"
                " SGLang is installed for its python3.",
                hint=(
                    "Check the name of the image, or name the engine in it (--engine"
                    " KIND==VERSION)."
                ),
            )
        return engine.evolve(kind=kind, version=version)

    async def _lines(
        self, engine: EngineRef, document: bytes, limit_s: float
    ) -> tuple[list[bytes], HostError | None]:
        """The lines until the limit or a failure."""
        result: list[bytes] = []
        problem: HostError | None = None
        try:
            async with (
                asyncio.timeout(limit_s),
                self._turn,
                contextlib.aclosing(self._host.run_inquiry(engine, document)) as lines,
            ):
                async for line in lines:
                    result.append(line)
                    if len(result) > _MAX_LINES:
                        problem = _nonsense_error(engine, BadAnswer("its lines have no end"))
                        break
        except TimeoutError:
            pass  # also while the host removed the process: the failure stays
        except HostError as error:
            problem = problem or error
        return result, problem


def rehearses(answer: EngineAnswer, start: StartSettings | None) -> bool:
    """Whether the answer counts for a start with these settings, or an engine that rehearses none
    gave it."""
    start_asked = answer.start.settings if answer.start is not None else None
    if start is None or start_asked is None:
        return True
    is_near = abs(start_asked.kv_bytes - start.kv_bytes) <= start.kv_bytes // _CACHE_SIZE_PARTS
    return start_asked.argv == start.argv and is_near


def _nonsense_error(engine: EngineRef, error: BadAnswer) -> HostError:
    return HostError(
        f"{engine} gave an unusable answer: {error}.",
        hint="Check that the image or environment holds the engine that its name says.",
    )
