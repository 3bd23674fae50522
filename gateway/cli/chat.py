"""A conversation with a model in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gateway.cli.client import error_from, stream_lines
from gateway.cli.tables import print_paragraph
from gateway.cli.terminal import StandardStreams, StreamedText, print_message, say, typed_lines
from gateway.errors import FitserveError

_HELP = (
    'Put a text of several lines between """ and """. /clear forgets the conversation, /bye or'
    " Ctrl-D ends it, Ctrl-C stops an answer."
)
_PROMPT = ">>> "


class Chat:
    """A conversation with one model. messages: all so far."""

    def __init__(self, model: str, system: str | None = None) -> None:
        self._model = model
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = [*self._first]

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
                case text if text.startswith("/") and len(text.split()) == 1:
                    print_paragraph(f"There is no command {text}. {_HELP}")
                case _:
                    try:
                        self.answer(line)
                    except FitserveError as error:
                        # The question did not reach the model, so it is removed again.
                        self.messages.pop()
                        print_message(f"fitserve: {error}")

    def answer(self, question: str, *, as_json: bool = False) -> bool:
        """Ask, and print the answer as it arrives. False: Ctrl-C stopped it; its beginning counts
        as an answer. Raises the gateway's own error."""
        self.messages.append({"role": "user", "content": question})
        answer_text, thoughts, flow, complete = "", "", StreamedText(), True
        shows_thoughts = StandardStreams.detect().output_is_terminal and not as_json
        try:
            for thought, text in self._pieces():
                if shows_thoughts and thought:
                    flow.write(thought, dim=True)
                if text and thoughts and not answer_text and shows_thoughts:
                    flow.end()
                thoughts, answer_text = thoughts + thought, answer_text + text
                if not as_json:
                    flow.write(text)
        except KeyboardInterrupt:
            complete = False
        if as_json:
            answer = {
                "model": self._model,
                "content": answer_text,
                "reasoning": thoughts,
                "complete": complete,
            }
            say(json.dumps(answer, indent=2, ensure_ascii=False))
        else:
            flow.end()
        self.messages.append({"role": "assistant", "content": answer_text})
        return complete

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """Pieces of thought and text as they arrive."""
        for line in stream_lines(
            "/v1/chat/completions",
            {"model": self._model, "messages": self.messages, "stream": True},
        ):
            kind, _, data = line.partition(":")
            if kind != "data" or not data.strip() or data.strip() == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise error_from(event)
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                yield (
                    delta.get("reasoning_content") or delta.get("reasoning") or "",
                    delta.get("content") or "",
                )
