"""A conversation with a model in the terminal."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cli.client import answer_error, stream_lines
from gateway.cli.terminal import StandardStreams, StreamedText, print_message, say, typed_lines
from gateway.cli.text_tables import print_paragraph
from gateway.domain.units import plural
from gateway.errors import FitserveError, near_name_hint

_HELP = (
    'Put a text of several lines between """ and """. /set parameter NAME VALUE and /set system'
    " TEXT change the next answers, /set without a name shows them. /clear forgets the"
    " conversation, /bye or Ctrl-D ends it, Ctrl-C stops an answer."
)
# Names of Ollama's parameters in requests of the API, and the kind of their values.
_PARAMETERS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "seed": ("seed", int),
    "num_predict": ("max_tokens", int),
    "max_tokens": ("max_tokens", int),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "stop": ("stop", str),
}
# Other commands of Ollama's conversation, and their equals.
_FOREIGN_COMMANDS = {
    "/show": "`fitserve show NAME` explains a model.",
    "/load": "`fitserve run NAME` talks with another model.",
    "/save": "`fitserve set NAME --alias OTHER` gives a model a second name.",
    "/pull": "`fitserve pull MODEL` downloads the weights of a model.",
    "/list": "`fitserve list` lists the models.",
}
_PROMPT = ">>> "


# A slash and a word: a path such as /etc/hosts is part of a question.
_COMMAND = re.compile(r"/[a-z?]+")


class _AnswerClock:
    """The times of one answer: its beginning, its first piece and its last."""

    def __init__(self) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._first_s: float | None = None

    def record_piece(self) -> None:
        self._last_s = time.monotonic()
        if self._first_s is None:
            self._first_s = self._last_s

    def speed_text(self, usage: Mapping[str, Any]) -> str:
        """The speed of the answer. usage: of the API; empty: no tokens were counted."""
        if self._first_s is None:
            return "There was no answer."
        parts = [f"first token after {self._first_s - self._start_s:.2f} s"]
        prompt = usage.get("prompt_tokens")
        tokens = usage.get("completion_tokens")
        # A foreign engine may send anything.
        if type(prompt) is int and type(tokens) is int:
            parts.append(
                f"prompt of {plural(prompt, 'token')}, answer of {plural(tokens, 'token')}"
            )
            if tokens > 1 and self._last_s > self._first_s:
                rate = (tokens - 1) / (self._last_s - self._first_s)
                parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"{self._last_s - self._start_s:.2f} s in all")
        return ", ".join(parts)


class Chat:
    """A conversation with one model.

    messages: all so far.
    parameters: the parameters of the next requests.
    """

    def __init__(self, model: str, system: str | None = None, *, is_verbose: bool = False) -> None:
        """is_verbose: print the speed of each answer."""
        self._model = model
        self._is_verbose = is_verbose
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = [*self._first]
        self.parameters: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}

    def talk(self) -> None:
        """Answer typed lines until /bye or Ctrl-D."""
        say(f"{self._model} is ready. /? for help.")
        for line in typed_lines(_PROMPT):
            match line.strip():
                case "":
                    continue
                case "/bye" | "/exit":
                    return
                case "/clear":
                    self.messages = [*self._first]
                    say("The conversation is cleared.")
                case "/?" | "/help":
                    say(_HELP)
                case text if text.split()[0] == "/set":
                    print_paragraph(self._set(text.split(maxsplit=2)[1:]))
                case text if _COMMAND.fullmatch(text.split()[0]):
                    command = text.split()[0]
                    advice = _FOREIGN_COMMANDS.get(command, _HELP)
                    print_paragraph(f"There is no command {command}. {advice}")
                case _:
                    try:
                        self.answer(line)
                    except FitserveError as error:
                        # The question did not reach the model, so it is removed again.
                        self.messages.pop()
                        print_message(f"fitserve: {error}")

    def _set(self, arguments: list[str]) -> str:
        """Change the next answers by the words after /set. The result in words."""
        match arguments:
            case []:
                settings = [f"{name} {value}" for name, value in self.parameters.items()]
                system = [message["content"] for message in self._first]
                return "; ".join([*settings, *(f"system: {text}" for text in system)]) or "Nothing."
            case ["system", text]:
                self._first = [{"role": "system", "content": text}]
                messages = [message for message in self.messages if message["role"] != "system"]
                self.messages = [*self._first, *messages]
                return "The system message is set."
            case ["parameter", text] if len(text.split(maxsplit=1)) == 2:
                return self._set_parameter(*text.split(maxsplit=1))
            case ["verbose" | "quiet" as word]:
                self._is_verbose = word == "verbose"
                return "The speed is shown." if self._is_verbose else "The speed is not shown."
            case _:
                return (
                    "/set takes `parameter NAME VALUE`, `system TEXT`, `verbose` or `quiet`."
                    f" Parameters: {', '.join(_PARAMETERS)}."
                )

    def _set_parameter(self, name: str, text: str) -> str:
        if name == "num_ctx":
            return (
                f"The context belongs to the plan: `fitserve set {self._model} --context {text}`."
            )
        if name not in _PARAMETERS:
            hint = near_name_hint(name, _PARAMETERS)
            return f"There is no parameter {name}{hint}. Known are {', '.join(_PARAMETERS)}."
        field, kind = _PARAMETERS[name]
        try:
            value = kind(text.strip("\"'"))
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} takes a {'whole ' if kind is int else ''}number, not {text[:80]}."
        if name == "num_predict" and value < 0:  # Ollama's word for no limit
            self.parameters.pop(field, None)
            return "num_predict has no limit."
        self.parameters[field] = value
        return f"{name} is {value}."

    def answer(self, question: str, *, as_json: bool = False) -> bool:
        """Ask, and print the answer as it arrives. False: Ctrl-C stopped it; its beginning counts
        as an answer. Raises the gateway's own error."""
        self.messages.append({"role": "user", "content": question})
        answer_text = ""
        thoughts = ""
        flow = StreamedText()
        is_complete = True
        shows_thoughts = StandardStreams.detect().is_output_terminal and not as_json
        clock = _AnswerClock()
        self._usage = {}
        try:
            for thought, text in self._pieces():
                clock.record_piece()
                if shows_thoughts and thought:
                    flow.write(thought, is_dim=True)
                if text and thoughts and not answer_text and shows_thoughts:
                    flow.finish()
                thoughts = thoughts + thought
                answer_text = answer_text + text
                if not as_json:
                    flow.write(text)
        except KeyboardInterrupt:
            is_complete = False
        if as_json:
            answer = {
                "model": self._model,
                "content": answer_text,
                "reasoning": thoughts,
                "complete": is_complete,
            }
            say(json.dumps(answer, indent=2, ensure_ascii=False))
        else:
            flow.finish()
        if self._is_verbose:
            print_message(clock.speed_text(self._usage))
        self.messages.append({"role": "assistant", "content": answer_text})
        return is_complete

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """Pieces of thought and text as they arrive."""
        for line in stream_lines(
            "/v1/chat/completions",
            {
                "model": self._model,
                "messages": self.messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.parameters,
            },
        ):
            kind, _, data = line.partition(":")
            if kind != "data" or not data.strip() or data.strip() == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise answer_error(event)
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                yield (
                    delta.get("reasoning_content") or delta.get("reasoning") or "",
                    delta.get("content") or "",
                )
