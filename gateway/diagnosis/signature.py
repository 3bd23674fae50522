"""One row of `profiles/failures.yaml`: what engines print when they fail, and how far a start has
come. Pure."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator

from gateway.domain.value import Value


class Signature(Value):
    """One row of failures.yaml. A row with a kind and a pattern proves a failure; with a kind and
    nothing to match it has the words and steps
    of that kind. A row without a kind says what a start is doing (`phase`), how the engine is set
    (`setting`), that it answers (`answers`), or names a kernel that the engine chose (a group
    `kernel`).

    pattern: searched in the message of an exception and in the lines that belong to it; with
    `line`, from the start of any line that was not printed as information or warning. Its named
    groups become the culprit and may be used as {group} in message, advice and steps; a group
    `x_gib` is a number of GiB, `x_bytes` a number with its unit, and `x_cuda` a version as one
    number. more: searched in the lines after the proof, as long as they belong to the same message.
    frame: a function that must stand in the traceback, or, in a row without kind, that says `phase`
    or `kernel`. like: a pattern; a kernel that the log named before and that matches it is meant
    instead of `kernel`. structure: asked only of what no text proves; then `exception` is the whole
    name of its type, `where` is searched in the innermost frames (`file:function`), `phases` are
    those that it holds in. It never teaches more than that the plan failed. vague: what the words
    of the failure speak for (likely.py) is told instead, where they speak for something else. weak:
    often only a consequence: any other proof is preferred.
    warned: the engine prints this line as a warning, though it then ends.
    when: `always` also counts once the engine serves, because users cannot write this text into its
    log. proves: what is learned from it (diagnosis/facts/learn.py).
    stands: of a row without kind: once the size of the KV cache was told, this line says that the
        cache is made. warm: and that nothing more is to be made.
    over: of a row without kind: a record that begins like this, or a traceback with this `frame`,
        tells that the engine itself is over, also one that had served. A frame of its main loop
        tells so, as nothing leaves that but the process.
    steps: the cure, in order; a step of which a {group} is not known is left out.
    """

    kind: str | None = None
    pattern: str = ""
    more: str = ""
    line: bool = False
    frame: str = ""
    kernel: str = ""
    like: str = ""
    structure: bool = False
    exception: str = ""
    where: str = ""
    phases: tuple[str, ...] = ()
    vague: bool = False
    weak: bool = False
    warned: bool = False
    when: Literal["starting", "always"] = "starting"
    phase: str | None = None
    stands: bool = False
    warm: bool = False
    setting: bool = False
    answers: bool = False
    over: bool = False
    proves: Literal["kernel", "context", "memory", "engine", "peers", "plan", "nothing"] = "plan"
    engines: tuple[str, ...] = ()
    message: str = ""
    advice: str = ""
    steps: tuple[str, ...] = ()
    source: str = ""

    @field_validator("pattern", "more", "like", "exception", "where")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _teaches_little(self) -> Signature:
        if self.structure and self.proves not in ("plan", "nothing"):
            raise ValueError("structure alone proves no more than that the plan failed")
        return self

    @property
    def is_remedy(self) -> bool:
        return self.kind is not None and not (self.pattern or self.structure)
