"""Answers of /v1 as answers of Ollama's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import UpstreamError
from gateway.proxy.ollama import ollama_answers
from gateway.proxy.ollama.ollama_answers import (
    AnswerTimes,
    StreamedAnswer,
    embeddings,
    error_text,
    model_card,
    models,
)
from gateway.proxy.routing.model_route import ModelCard

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


def test_a_refusal_is_read_as_the_answer() -> None:
    answer = StreamedAnswer("m", is_chat=True)
    pieces = [answer.lines(delta(refusal=text), 10.5) for text in ("I cannot", " help.")]
    assert [line["message"]["content"] for (line,) in pieces] == ["I cannot", " help."]
    event = {"choices": [{"message": {"content": None, "refusal": "No."}}]}
    assert answer.whole(event, TIMES)["message"]["content"] == "No."


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_arguments_with_a_number_beyond_floats_stay_a_text(number: str) -> None:
    answer = StreamedAnswer("m", is_chat=True)
    text = f'{{"x": [1.5, {number}]}}'
    answer.lines(delta(tool_calls=[{"function": {"name": "f", "arguments": text}}]), 11)
    calls, _ = answer.last_lines(TIMES)
    (call,) = calls["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"arguments": text}


@pytest.mark.parametrize(
    "piece",
    [
        {"index": 0, "function": {"arguments": "x" * 1000}},
        {"index": 0, "function": {"name": "x" * 1000}},
        {"function": {}},
    ],
    ids=["arguments", "a name", "calls"],
)
def test_tool_calls_without_end_are_refused(
    monkeypatch: pytest.MonkeyPatch, piece: dict[str, Any]
) -> None:
    monkeypatch.setattr(ollama_answers, "CALLS_LENGTH", 100_000)
    answer = StreamedAnswer("m", is_chat=True)
    with pytest.raises(UpstreamError, match="over 100,000 characters"):
        for index in range(1000):
            answer.lines(delta(tool_calls=[{"index": index, **piece}]), 11)


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


CARD = {"id": "m", "created": 0, "state": "ready", "task": "generate", "max_model_len": 4096}
FACTS = ModelCard(family="qwen3", parameters=8_190_735_360, quantization="awq", is_on_gpu=True)
FACTS = replace(FACTS, weights_bytes=5_000, memory_bytes=20_000)


def test_lists_and_cards_tell_known_facts() -> None:
    asleep = {**CARD, "id": "n", "state": "stopped"}
    cards = {"data": [CARD, asleep]}
    rows = models(cards, {"m": FACTS}, 10.0, shows_loaded_only=False)["models"]
    assert [(row["name"], row["size"]) for row in rows] == [("m", 5_000), ("n", 0)]
    # Ollama's own program cuts it to twelve digits, and ends with a fault if there are fewer.
    assert len(rows[0]["digest"]) == 64
    details = rows[0]["details"]
    assert (details["family"], details["families"]) == ("qwen3", ["qwen3"])
    assert (details["parameter_size"], details["quantization_level"]) == ("8.2B", "awq")
    assert (rows[1]["details"]["family"], rows[1]["details"]["parameter_size"]) == ("", "")
    card = model_card(CARD, FACTS)
    assert card["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 8_190_735_360,
        "qwen3.context_length": 4096,
    }
    assert model_card(CARD, ModelCard())["model_info"]["fitserve.context_length"] == 4096


@pytest.mark.parametrize("state", ["unknown", "not proven", "proven"])
def test_only_a_proven_ability_is_a_capability(state: str) -> None:
    """Clients send tools to each model that claims them."""
    inputs = {"modalities": {"input": ["text", "image"]}}
    card = model_card({**CARD, **inputs, "tools": state, "reasoning": state}, FACTS)
    proven = state == "proven"
    assert card["capabilities"] == (
        ["completion", "tools", "vision", "thinking"] if proven else ["completion", "vision"]
    )
    embeds = model_card({"id": "e", "task": "embed", "tools": "unknown"}, FACTS)
    assert embeds["capabilities"] == ["embedding"]


def test_loaded_models_have_sizes_and_an_end() -> None:
    """Without them Ollama's program says `100% CPU` and `Stopping...`."""

    def row(**changes: Any) -> Any:
        facts = {"m": replace(FACTS, **changes)}
        cards = {"data": [CARD, {**CARD, "id": "n", "state": "stopped"}]}
        (loaded_model,) = models(cards, facts, 10.0, shows_loaded_only=True)["models"]
        return loaded_model

    assert (row()["size"], row()["size_vram"]) == (20_000, 20_000)
    assert row(is_on_gpu=False)["size_vram"] == 0
    assert row()["expires_at"].startswith("2069-")
    assert row(keep_alive_s=60.0)["expires_at"] == "1970-01-01T00:01:10Z"


def test_vectors_stand_in_their_order() -> None:
    event = {"data": [{"embedding": [1.0]}, {"embedding": [2.0]}], "usage": {"prompt_tokens": 2}}
    answer = embeddings(event, "e", TIMES)
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([[1.0], [2.0]], 2)
