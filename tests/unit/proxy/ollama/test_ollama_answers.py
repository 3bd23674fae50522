"""Answers of /v1 as answers of Ollama's API."""

from __future__ import annotations

from typing import Any

from gateway.proxy.ollama.ollama_answers import (
    AnswerTimes,
    StreamedAnswer,
    embeddings,
    error_text,
    model_card,
    models,
)

TIMES = AnswerTimes(10.0, 10.5, 12.0)


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": reason}]}


def test_a_stream_has_text_thoughts_calls_and_figures() -> None:
    answer = StreamedAnswer("m", is_chat=True)
    (line,) = answer.lines(delta(reasoning_content="Hm"), 10.5)
    assert line["message"] == {"role": "assistant", "content": "", "thinking": "Hm"}
    assert line["created_at"] == "1970-01-01T00:00:10.500000Z"
    for arguments in ('{"x"', ": 1}"):
        piece = {
            "index": 0,
            "function": {"name": "f" * (arguments[0] == "{"), "arguments": arguments},
        }
        assert answer.lines(delta(tool_calls=[piece]), 11) == []
    answer.lines(delta("length"), 11)
    answer.lines({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}, 11)
    calls, end = answer.last_lines(TIMES)
    assert calls["message"]["tool_calls"] == [{"function": {"name": "f", "arguments": {"x": 1}}}]
    assert (end["done"], end["done_reason"]) == (True, "length")
    assert (end["prompt_eval_count"], end["eval_count"]) == (4, 3)
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (500_000_000, 1_500_000_000)
    assert end["total_duration"] == 2_000_000_000


def test_an_answer_in_one_piece_has_the_same_fields() -> None:
    message = {"role": "assistant", "content": "Hi"}
    event = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}
    assert StreamedAnswer("m", is_chat=True).whole(event, TIMES)["message"] == message
    text = {"choices": [{"text": "Hi", "finish_reason": "stop"}]}
    whole = StreamedAnswer("m", is_chat=False).whole(text, TIMES)
    assert (whole["response"], whole["done"], "message" in whole) == ("Hi", True, False)
    assert StreamedAnswer("m", is_chat=False).load_end(TIMES)["done_reason"] == "load"


def test_an_answer_without_the_time_of_its_first_token_has_a_speed() -> None:
    event = {
        "choices": [{"text": "Hi", "finish_reason": "stop"}],
        "usage": {"completion_tokens": 1},
    }
    whole = StreamedAnswer("m", is_chat=False).whole(event, TIMES._replace(first=None))
    assert whole["eval_duration"] == whole["total_duration"] > 0
    assert "prompt_eval_duration" not in whole


def test_an_error_within_a_stream_is_a_line() -> None:
    answer = StreamedAnswer("m", is_chat=True)
    assert answer.lines({"error": {"message": "The engine ended."}}, 1) == [
        {"error": "The engine ended."}
    ]
    assert error_text({"error": "text"}) == "text"
    assert error_text(None) == "The engine's answer could not be read."


def test_lists_and_cards_tell_what_is_known() -> None:
    card = {"id": "m", "created": 0, "state": "ready", "task": "generate", "tools": True}
    card |= {"max_model_len": 4096, "modalities": {"input": ["text", "image"]}, "reasoning": "auto"}
    (row,) = models({"data": [card]}, loaded_only=False)["models"]
    # Ollama's own program cuts it to twelve digits, and ends with a fault if there are fewer.
    assert len(row["digest"]) == 64
    asleep = {**card, "id": "n", "state": "stopped"}
    listed = {"data": [card, asleep]}
    assert [row["name"] for row in models(listed, loaded_only=False)["models"]] == ["m", "n"]
    assert [row["name"] for row in models(listed, loaded_only=True)["models"]] == ["m"]
    shown = model_card(card)
    assert shown["capabilities"] == ["completion", "tools", "vision", "thinking"]
    assert shown["model_info"]["fitserve.context_length"] == 4096
    assert model_card({"id": "e", "task": "embed"})["capabilities"] == ["embedding"]


def test_vectors_stand_in_their_order() -> None:
    event = {"data": [{"embedding": [1.0]}, {"embedding": [2.0]}], "usage": {"prompt_tokens": 2}}
    answer = embeddings(event, "e", TIMES)
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([[1.0], [2.0]], 2)
