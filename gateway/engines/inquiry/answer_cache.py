"""Earlier answers in DATA/answers/, by engine, image, GPU, model and command line; lost answers are
requested again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from gateway.domain import EngineAnswer, Question
from gateway.engines.inquiry.gap_book import RuleGapStore
from gateway.engines.inquiry.inquiry_document import ModelFiles, StatedGpus
from gateway.engines.inquiry.script import pack
from gateway.store import atomic_file

# The oldest files beyond this number are deleted. An answer takes 10 kB.
_MAX_FILES = 2000


class AnswerCache:
    """Cache of answers. source: the image's digest or the environment; each has its own answers.

    gaps: contradictions of the rules by answers.
    """

    def __init__(self, folder: Path) -> None:
        self.gaps = RuleGapStore(folder / "gaps")
        self._folder = folder
        self._script = hashlib.sha256(pack()).hexdigest()

    def load(
        self, questions: Iterable[Question], source: str, gpus: StatedGpus | None, model: ModelFiles
    ) -> dict[Question, EngineAnswer]:
        result = {}
        for question in questions:
            try:
                result[question] = EngineAnswer.model_validate_json(
                    self._answer_path(question, source, gpus, model).read_bytes()
                )
            except (OSError, ValidationError):
                continue
        return result

    def store(
        self,
        answers: Mapping[Question, EngineAnswer],
        source: str,
        gpus: StatedGpus | None,
        model: ModelFiles,
    ) -> None:
        """Never raises: an answer that cannot be kept is asked for again."""
        try:
            for question, answer in answers.items():
                atomic_file.write(
                    self._answer_path(question, source, gpus, model),
                    answer.model_dump_json().encode(),
                )
            files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError:
            return

    def _answer_path(
        self, question: Question, source: str, gpus: StatedGpus | None, model: ModelFiles
    ) -> Path:
        identity: list[object] = [
            self._script,
            source,
            question.model_dump(mode="json"),
            gpus and gpus.as_dict(),
        ]
        identity += [
            [name, hashlib.sha256(content).hexdigest()]
            for name, content in model.content_by_name.items()
        ]
        return (
            self._folder / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]}.json"
        )
