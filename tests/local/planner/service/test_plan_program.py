"""Model folders of hostile authors, read and planned as the plan process does."""

from __future__ import annotations

from pathlib import Path

from tests.hostile.folders import FolderJudge

FOLDERS = 100


def test_hostile_folders_are_planned_or_refused_and_lead_nowhere(tmp_path: Path) -> None:
    tally = FolderJudge(tmp_path.resolve()).run(FOLDERS, seed=36)
    assert not tally.violations, "\n".join(tally.violations)
    assert tally.folders == FOLDERS
    # Both kinds of answer are judged.
    assert {"planned", "BadModel"} <= tally.outcomes.keys()


def test_the_judge_finds_words_of_another_file_and_errors_of_the_planner(tmp_path: Path) -> None:
    judge = FolderJudge(tmp_path.resolve())
    request = judge.request(judge.outside / "folder")
    assert any("another file" in problem for problem in judge.problems(request))
    judge.worker.plan = None  # type: ignore[assignment]
    assert any("NoneType" in problem for problem in judge.problems(request))
