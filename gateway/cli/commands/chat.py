"""A conversation in the terminal: what is typed goes to the model with all that was said before,
and the answer comes as it is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gateway.cli.client import lines, reported
from gateway.cli.present import print_paragraph
from gateway.cli.terminal import Flow, Talk, lines_typed, say, told
from gateway.errors import FitserveError

_HELP = (
    'A text over several lines stands between """ and """. /clear forgets what was said, /bye or'
    " Ctrl-D leaves, Ctrl-C stops an answer."
)
_PROMPT = ">>> "


class Chat:
    """With one model. `said` are the messages so far."""

    def __init__(self, model: str, system: str | None = None) -> None:
        self._model = model
        self._first = [{"role": "system", "content": system}] if system else []
        self.said: list[dict[str, Any]] = [*self._first]

    def talk(self) -> None:
        """Until the person leaves."""
        say(f"{self._model} is ready. /? for help.")
        for line in lines_typed(_PROMPT):
            match line.strip():
                case "":
                    continue
                case "/bye" | "/exit":
                    return
                case "/clear":
                    self.said = [*self._first]
                    say("What was said is forgotten.")
                case "/?" | "/help":
                    say(_HELP)
                case text if text.startswith("/") and len(text.split()) == 1:
                    print_paragraph(f"There is no command {text}. {_HELP}")
                case _:
                    try:
                        self.answer(line)
                    except FitserveError as error:
                        # The question did not reach the model: it is not part of what was said.
                        self.said.pop()
                        told(f"fitserve: {error}")

    def answer(self, question: str, *, as_json: bool = False) -> bool:
        """Ask, and print what comes. False: Ctrl-C stopped the answer; what came until then stays
        said. Raises the gateway's own error."""
        self.said.append({"role": "user", "content": question})
        whole, thoughts, flow, ended = "", "", Flow(), True
        shown = Talk.now().shown and not as_json
        try:
            for thought, text in self._pieces():
                if shown and thought:
                    flow.write(thought, dim=True)
                if text and thoughts and not whole and shown:
                    flow.end()
                thoughts, whole = thoughts + thought, whole + text
                if not as_json:
                    flow.write(text)
        except KeyboardInterrupt:
            ended = False
        if as_json:
            answer = {
                "model": self._model,
                "content": whole,
                "reasoning": thoughts,
                "complete": ended,
            }
            say(json.dumps(answer, indent=2, ensure_ascii=False))
        else:
            flow.end()
        self.said.append({"role": "assistant", "content": whole})
        return ended

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """(thought, text) as they come."""
        for line in lines(
            "/v1/chat/completions", {"model": self._model, "messages": self.said, "stream": True}
        ):
            kind, _, data = line.partition(":")
            if kind != "data" or not data.strip() or data.strip() == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise reported(event)
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                yield (
                    delta.get("reasoning_content") or delta.get("reasoning") or "",
                    delta.get("content") or "",
                )
