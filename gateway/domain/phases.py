"""The phases of a start in words for users."""

from __future__ import annotations

PHASE_LABELS = {
    "import": "importing the engine",
    "download": "downloading weights",
    "load": "loading weights",
    "profile": "measuring memory",
    "kv": "making the KV cache",
    "compile": "compiling",
    "graphs": "capturing graphs",
    "prove": "verifying answers",
    "waking": "waking up from sleep",
}
"""The labels of phases, by their names in JSON, the database and rules."""


def detail_without_state(state: str, detail: str) -> str:
    """The detail of a state without the state's own word, where that word stands apart.

    "stopped: no room" gives "no room", and "stopped" gives ""; "starting the engine" stays whole.
    """
    word, _, tail = detail.partition(": ")
    return tail if word == state else detail


def phase_label(phase: str) -> str:
    """The phase in words; a plain word such as "serving" stays."""
    return PHASE_LABELS.get(phase, phase)
