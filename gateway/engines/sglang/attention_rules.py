"""Rules of one SGLang version for attention backends: attention_backends.yaml. Pure.

Check (from a profile) + Model + compute capability -> why it does not hold; "": it does
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from gateway.domain import KnownChoice, Value
from gateway.domain.base import Field
from gateway.engines.common.rules.check import Check, RuleFile
from gateway.engines.common.rules.subject import Subject

BackendOption = Literal["attention", "prefill", "decode"]


class BackendStep(Value):
    """Options that the engine sets if `where` holds; a backend only if the user and earlier steps
    left all of `unset` open."""

    where: Check = Check()
    unset: tuple[BackendOption, ...] = ("attention", "prefill", "decode")
    attention: str | None = None
    decode: str | None = None
    page: int | None = Field(None, description="tokens of a page, whatever the user asks for")
    source: str = ""


class BackendLimit(Value):
    """A restriction of the engine. `options`: the limited ones; `attention` may still be open."""

    where: Check
    options: tuple[BackendOption, ...] = Field(("prefill", "decode"), alias="of")
    accepts: tuple[str, ...] | None = None
    refuses: tuple[str, ...] = ()
    page: int | None = Field(None, description="tokens of a page: no others")
    requires: Check = Check()
    source: str = ""


class SglangBackend(Value):
    """A backend's checks. One check of `any_of` must hold for every use, one of `prefill` and
    `decode` for that part, and `when_named` if the option attention or decode names the backend."""

    source: str = ""
    any_of: tuple[Check, ...] = (Check(),)
    prefill: tuple[Check, ...] = (Check(),)
    decode: tuple[Check, ...] = (Check(),)
    when_named: Check = Check()
    described_for: Check = Field(
        Check(), description="the engine's behaviour is unknown for any other model"
    )
    page: int | None = Field(
        None, description="tokens of a page, unless it is asked for one of `pages`"
    )
    pages: tuple[int, ...] = ()
    page_backends: tuple[BackendOption, ...] = Field(("attention", "decode"), alias="page_of")
    page_condition: Check = Field(Check(), alias="page_where")
    starts: Check = Field(Check(), description="sizes that its kernels refuse as they are compiled")
    is_causal_only: bool = Field(
        False,
        description="whether layers whose tokens see later ones have wrong results",
        alias="causal_only",
    )
    version: Literal[3, 4] | None = Field(None, description="version of FlashAttention")


class Replacement(Value):
    """The option attention becomes `replacement` where `where` holds."""

    backend: str
    where: Check
    replacement: str = Field(alias="by")
    source: str = ""


class LayerRule(Value):
    """The backend of layers other than the model's own attention: recurrent ones, vision towers.
    None: not known."""

    where: Check
    backend: str | None
    version: Literal[3, 4] | None = None


class BorrowedBackendRules(Value):
    """Models that are as the rules of another version say."""

    where: Check
    rules: BackendRules


class BackendRules(RuleFile):
    """The rules of profiles/engines/sglang/VERSION/attention_backends.yaml.

    Sources are file:line below sglang/srt/ of that version.
    """

    kv_dtypes: tuple[str, ...]  # of the KV cache; with any other the answer is "unknown"
    mla: tuple[str, ...]  # architectures that are computed as MLA
    mla_source: str = ""
    # These architectures have engine settings that these rules do not describe.
    own_backends: tuple[str, ...]
    own_backends_source: str = ""
    own_fields: tuple[str, ...] = ()  # of config.json; where one is set, the same holds
    # The best comes first of the backends to force where the engine's own choice is refused.
    repairs: tuple[str, ...] = ()
    # These flags decide, and these rules do not describe them.
    unmodelled_flags: tuple[str, ...] = Field(alias="unknown_with")
    unmodelled_conditions: dict[str, tuple[Check, ...]] = Field(
        {},
        description="flag of `unknown_with` -> the only models that it decides for",
        alias="unknown_where",
    )
    models: tuple[BackendStep, ...]
    limits: tuple[BackendLimit, ...]
    defaults: tuple[BackendStep, ...]
    replacements: tuple[Replacement, ...] = ()
    last_limits: tuple[BackendLimit, ...] = ()
    backends: dict[str, SglangBackend]
    recurrent: tuple[LayerRule, ...]
    recurrent_source: str = ""
    vision: tuple[LayerRule, ...]
    vision_source: str = ""
    borrowed_rules: tuple[BorrowedBackendRules, ...] = Field(
        (), description="models that other rules describe"
    )
    described: tuple[Check, ...] = Field(
        (), description="models whose backend a step names, where nothing else describes them"
    )

    def undescribed_flags(self, flags: Iterable[str], model: Subject) -> list[str]:
        """Those of these flags that decide for the model in a way that no rule describes."""
        return sorted(
            flag
            for flag in set(flags) & set(self.unmodelled_flags)
            if flag not in self.unmodelled_conditions
            or any(check.refusal(model) is None for check in self.unmodelled_conditions[flag])
        )

    def add_choices(
        self, choices: Iterable[KnownChoice], other_rules: Mapping[str, BackendRules]
    ) -> BackendRules:
        """These rules with choices of the version's own code. other_rules: by version."""
        borrowed_rules = []
        steps = []
        for choice in choices:
            match_check = Check.trust_conditions(dict(choice.conditions))
            if choice.rules is not None:
                borrowed_rules.append(
                    BorrowedBackendRules(where=match_check, rules=other_rules[choice.rules])
                )
            else:
                steps.append(
                    BackendStep(where=match_check, attention=choice.backend, decode=choice.decode)
                )
        return self.evolve(
            borrowed_rules=tuple(borrowed_rules),
            models=(*steps, *self.models),
            described=tuple(step.where for step in steps),
        )
