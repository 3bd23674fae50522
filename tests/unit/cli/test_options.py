"""Options of the command line as fields of a wish."""

from __future__ import annotations

from gateway.cli.commands.change import _FIELDS
from gateway.cli.options import WishOptions
from gateway.domain import Wish
from tests.support.makers import wish


def test_the_number_of_drafted_tokens_reaches_the_wish() -> None:
    fields = WishOptions(speculative="mtp", draft_tokens=3).fields()
    wanted = wish(**fields)
    assert (wanted.speculative, wanted.num_speculative_tokens) == ("mtp", 3)
    assert "num_speculative_tokens" not in WishOptions(speculative="mtp").fields()


def test_options_of_another_name_are_unset_by_the_field_of_a_wish() -> None:
    assert _FIELDS["draft-tokens"] in Wish.model_fields
