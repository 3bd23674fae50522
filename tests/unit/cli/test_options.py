"""Options of the command line as fields of a wish."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.commands.change import _FIELDS
from gateway.cli.options import WishOptions, absolute_source
from gateway.domain import Wish
from tests.support.makers import wish


def test_the_number_of_drafted_tokens_reaches_the_wish() -> None:
    fields = WishOptions(speculative="mtp", draft_tokens=3).fields()
    request = wish(**fields)
    assert (request.speculative, request.num_speculative_tokens) == ("mtp", 3)
    assert "num_speculative_tokens" not in WishOptions(speculative="mtp").fields()


def test_options_of_another_name_are_unset_by_the_field_of_a_wish() -> None:
    assert _FIELDS["draft-tokens"] in Wish.model_fields


def test_a_missing_folder_beside_others_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "alpha").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert absolute_source("models/alpha") == str(tmp_path / "models" / "alpha")
    assert absolute_source("owner/name") == "owner/name"
    assert not capsys.readouterr().err
    config = tmp_path / "models" / "alpha" / "config.json"
    config.write_text("{}")
    assert absolute_source("models/alpha/config.json") == str(config.parent)
    config.rename(config.with_name("other.json"))
    other_file = "models/alpha/other.json"
    assert absolute_source(other_file) == str(tmp_path / other_file), "a file is not a repository"
    assert not capsys.readouterr().err
    assert absolute_source("models/delta") == "models/delta"
    assert "note: there is no folder models/delta in " in capsys.readouterr().err
