"""The decision after each try of a line: a result, another try, or the end of the batch's key.

answer                          then
2xx with JSON                   a result in the output file
408, 429, 503, unreachable      another try, until the batch expires: limits of the key, a full
                                queue, a model that is away, an engine that took no connection,
                                budgets that cannot be written
401                             another try, for the batch ends with its key
other 4xx                       a result in the error file
anything else, or none          another try, at most MAX_TRIES, then a result in the error file
"""

from __future__ import annotations

from typing import Literal

from gateway.errors import EngineUnreachable, StoreError

MAX_TRIES = 3
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 30.0
_WAITING_STATUSES = frozenset({401, 408, 429, 503})

# Codes of errors of the gateway, whose engine has not seen the line.
_WAITING_CODES = frozenset({EngineUnreachable.code, StoreError.code})

Step = Literal["answer", "error", "wait", "repeat"]


def next_step(status: int | None, code: str, failures: int, *, is_json: bool) -> Step:
    """The step after an answer.

    status: None for no answer.
    code: the code of an error; empty: none.
    failures: earlier tries that failed.
    """
    if status in _WAITING_STATUSES or code in _WAITING_CODES:
        return "wait"
    if status is not None and 200 <= status < 300 and is_json:
        return "answer"
    if status is not None and 400 <= status < 500:
        return "error"
    return "repeat" if failures + 1 < MAX_TRIES else "error"


def pause_s(tries: int, retry_after_s: float | None) -> float:
    """Seconds until the next try."""
    if retry_after_s is not None:
        return min(max(retry_after_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
    return float(min(_FIRST_PAUSE_S * 2 ** min(tries, 10), _LAST_PAUSE_S))
