"""Requests of Ollama's API as requests of /v1. Pure.

Fields: docs/api.md and api/types.go of Ollama 0.12 (ChatRequest, GenerateRequest, EmbedRequest).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.errors import BadRequest

# Names of `options` that /v1 has, by its own names; top_k, min_p and repetition_penalty are those
# of vLLM and SGLang. Others set up Ollama's runner.
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}
# First bytes of images, as base64 or whole.
_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


class OpenAIRequest(NamedTuple):
    """A request of /v1.

    stream: the answer is an event stream.
    loads_model: the request only loads the model.
    """

    path: str
    body: dict[str, Any]
    stream: bool = False
    loads_model: bool = False


def chat_request(body: Mapping[str, Any]) -> OpenAIRequest:
    """The request of /api/chat. Raises BadRequest."""
    messages = body.get("messages") or []
    if not isinstance(messages, list):
        raise _wrong_field_error("messages", "a list of messages")
    if not messages:
        return _load_request(body)
    fields = _settings(body) | {"messages": _messages(messages)}
    if tools := body.get("tools"):
        fields["tools"] = tools
    return _stream_request("/v1/chat/completions", fields, body)


def generate_request(body: Mapping[str, Any]) -> OpenAIRequest:
    """The request of /api/generate. Raises BadRequest."""
    prompt = body.get("prompt") or ""
    fields = _settings(body)
    if not isinstance(prompt, str):
        raise _wrong_field_error("prompt", "a text")
    if not prompt:
        return _load_request(body)
    suffix = body.get("suffix")
    if body.get("raw") or suffix:
        texts = {"prompt": prompt, "suffix": suffix or None}
        return _stream_request("/v1/completions", fields | texts, body)
    messages = [{"role": "user", "content": prompt, "images": body.get("images")}]
    if system := body.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    return _stream_request("/v1/chat/completions", fields | {"messages": _messages(messages)}, body)


def is_unload(body: Mapping[str, Any]) -> bool:
    """Whether the request unloads its model and asks for nothing else, as `ollama stop` does."""
    asks_nothing = not body.get("prompt") and not body.get("messages")
    keep_alive = body.get("keep_alive")
    is_zero = not isinstance(keep_alive, bool) and keep_alive in (0, "0", "0s", "0m")
    return asks_nothing and is_zero


def embed_request(body: Mapping[str, Any]) -> OpenAIRequest:
    """The request of /api/embed, and of /api/embeddings with its `prompt`."""
    fields = {"model": body.get("model"), "input": body.get("input", body.get("prompt"))}
    if body.get("dimensions"):
        fields["dimensions"] = body["dimensions"]
    if body.get("truncate") is not False:
        # The engine cuts the text to its context, as Ollama does by default.
        fields["truncate_prompt_tokens"] = -1
    return OpenAIRequest("/v1/embeddings", fields)


def _load_request(body: Mapping[str, Any]) -> OpenAIRequest:
    """A request without a prompt loads the model, by an answer of one token."""
    message = {"role": "user", "content": "Hello"}
    fields = {"model": body.get("model"), "messages": [message], "max_tokens": 1}
    return OpenAIRequest("/v1/chat/completions", fields, loads_model=True)


def _stream_request(path: str, fields: dict[str, Any], body: Mapping[str, Any]) -> OpenAIRequest:
    is_streamed = body.get("stream") is not False
    if is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return OpenAIRequest(path, fields, is_streamed)


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Model, sampling, form of the answer and thoughts."""
    options = body.get("options") or {}
    if not isinstance(options, Mapping):
        raise _wrong_field_error("options", "an object")
    fields = {"model": body.get("model")}
    fields |= {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    limit = options.get("num_predict")
    if isinstance(limit, int) and limit > 0:
        fields["max_tokens"] = limit
    answer_form = body.get("format")
    if answer_form == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(answer_form, Mapping):
        schema = {"name": "answer", "schema": answer_form}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif answer_form:
        raise _wrong_field_error("format", '"json" or a JSON schema')
    if isinstance(thinks := body.get("think"), bool):
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    elif isinstance(thinks, str):
        fields["reasoning_effort"] = thinks
    return fields


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages with contents and tool calls as /v1 has them. Results of tools without an id
    belong to the calls before them, in order: clients of old versions of Ollama send no ids."""
    translated: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    count = 0
    for message in messages:
        if not isinstance(message, Mapping):
            raise _wrong_field_error("messages", "a list of objects")
        fields = {"role": message.get("role"), "content": _message_content(message)}
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise _wrong_field_error("tool_calls", "a list of functions with a name")
            fields["tool_calls"] = []
            for call in calls:
                function = _called_function(call)
                count += 1
                id_ = call.get("id") or f"call_{count}"
                open_calls.append((id_, function["name"]))
                fields["tool_calls"].append({"id": id_, "type": "function", "function": function})
        if message.get("role") == "tool":
            fields["tool_call_id"] = _pop_call(message, open_calls)
        translated.append(fields)
    return translated


def _pop_call(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> Any:
    """The id of the call that this result of a tool answers, which is open no longer."""
    id_ = message.get("tool_call_id")
    name = message.get("tool_name") or message.get("name")
    for call in open_calls:
        if call[0] == id_ if id_ else name in (None, call[1]):
            open_calls.remove(call)
            return call[0]
    return id_ or "call_0"


def _called_function(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong_field_error("tool_calls", "a list of functions with a name")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"name": function["name"], "arguments": text}


def _message_content(message: Mapping[str, Any]) -> Any:
    text = message.get("content") or ""
    images = message.get("images")
    if not images:
        return text
    if not isinstance(images, list):
        raise _wrong_field_error("images", "a list of images in base64")
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    return parts + [
        {"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images
    ]


def _data_url(image: Any) -> str:
    try:
        head = base64.b64decode(image[:16] if isinstance(image, str) else "%", validate=True)
    except ValueError:
        raise _wrong_field_error("images", "a list of images in base64") from None
    kind = next((name for start, name in _IMAGES.items() if head.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"


def _wrong_field_error(field: str, form: str) -> BadRequest:
    return BadRequest(f"{field} is not {form}.", hint="docs/api.md has examples.", param=field)
