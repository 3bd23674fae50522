"""Characters that would steer a terminal are shown; text stays text."""

from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gateway.visible import visible, visible_line


def test_no_control_character_and_no_direction_of_writing_is_left() -> None:
    for number in range(0x10000):
        letter = chr(number)
        text = visible(letter)
        if unicodedata.category(letter) == "Cc" or unicodedata.bidirectional(letter) in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        ):
            assert (text == letter) == (letter in "\n\t"), hex(number)
        if text != letter:
            assert text.isascii(), hex(number)
            assert text.isprintable(), hex(number)


def test_words_in_any_script_stay_as_they_are() -> None:
    text = "Größe 大小 размер שלום 👩\u200d💻 \tcolumn\nline"
    assert visible(text) == text


def test_sequences_are_shown() -> None:
    assert visible("\x1b]0;title\x07\x1b[2J\x9b2J\r") == "\\x1b]0;title\\x07\\x1b[2J\\u009b2J\\x0d"
    assert visible("a\u202eb\ud800") == "a\\u202eb\\ud800"
    assert visible_line("ready)\nfitserve: m: ready") == "ready)\\x0afitserve: m: ready"


@given(st.text(st.characters(codec=None)))
def test_json_keeps_its_meaning(text: str) -> None:
    assert json.loads(visible(json.dumps([text], indent=1, ensure_ascii=False))) == [text]
