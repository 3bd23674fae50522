"""The wish of a user for a model."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from gateway.domain.base import Field, field_validator, model_validator
from gateway.domain.image_name import NAME_PATTERN as IMAGE_PATTERN
from gateway.domain.image_name import add_tag
from gateway.domain.value import Duration, Scalar, TextForm, Tokens, Value

Goal = Literal["balanced", "latency", "throughput", "context", "agents"]


class Policy(Value):
    max_attempts: int = Field(
        5, ge=1, le=50, description="failed starts before the model is quarantined"
    )
    allow_remote_code: bool = Field(
        False, description="let the engine run code from the model's repository"
    )
    wait_s: float = Field(
        0,
        ge=0,
        le=86400,
        description=(
            "how long a request waits for the model to become ready; 0: refused immediately, or "
            "where the model is loaded on request as long as its start may take"
        ),
    )
    keep_alive: Duration | None = Field(
        None,
        description=(
            "how long the model stays loaded without a request: 5m, 1h30m, 300 (seconds), 0: not at"
            " all, -1: for ever; None: as FITSERVE_KEEP_ALIVE says"
        ),
    )
    pinned: bool = Field(
        False, description="never unloaded, neither when idle nor for another model"
    )
    priority: int = Field(
        0,
        ge=-100,
        le=100,
        description=("priority; of models that could give way to another, the lowest goes first"),
    )


# The longest published template has 33 KiB.
_MAX_TEMPLATE_CHARACTERS = 256 * 1024


class ChatTemplate(Value):
    """A Jinja text that makes messages a prompt, instead of the model's own.

    The wish holds the text and no path, so the checked text is the one that is used.
    """

    text: str = Field(min_length=1, max_length=_MAX_TEMPLATE_CHARACTERS)
    name: Annotated[
        str,
        TextForm(
            r"^[\w. -]{0,100}$", "a name has up to 100 letters, digits, `_`, `-`, `.` and spaces"
        ),
    ] = Field("", description="name of the template's file, for people")

    @property
    def digest(self) -> str:
        """SHA-256 of its bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        return (
            f"{self.name or 'a text'} ({len(self.text.encode()):,} bytes, sha256"
            f" {self.digest[:12]})"
        )


def commit_key(source: str, revision: str | None) -> str:
    """The key of a repository in `Wish.commits`."""
    return f"{source}@{revision}" if revision else source


# `name`, `org/name`, and either with a tag: `qwen3:8b`.
NAME_PATTERN = (
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})?"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$"
)
ModelName = Annotated[
    str,
    TextForm(
        NAME_PATTERN,
        "a name has up to 96 letters, digits, `_`, `-` and `.`, and begins with a letter, a digit"
        " or `_`; `org/name` and `name:tag` are names too",
    ),
]
Revision = Annotated[
    str, TextForm(r"^[\w][\w./-]{0,127}$", "a branch, a tag or a commit, of up to 128 characters")
]


class Wish(Value):
    """A model to run (`source`), or an external engine that already runs (`endpoints`)."""

    name: ModelName = Field(description="name that clients put in `model`")
    aliases: tuple[ModelName, ...] = Field(
        (), max_length=16, description="other names by which clients may ask for it"
    )
    source: str | None = Field(
        None, min_length=1, max_length=4096, description="model folder or Hugging Face repository"
    )
    revision: Revision | None = Field(None, description="branch, tag or commit")
    endpoints: tuple[str, ...] = Field(
        (), max_length=64, description="base URLs (ending in /v1) of engines we never start or stop"
    )
    endpoint_key: (
        Annotated[
            str,
            TextForm(
                r"^(env:FITSERVE_ENDPOINT_KEY(_[A-Z0-9_]{1,64})?"
                r"|file:[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})$",
                "it says where the key is, as env:FITSERVE_ENDPOINT_KEY_NAME, or as file:NAME for"
                " the file NAME in the folder endpoint-keys of the gateway's data; a key itself is"
                " not taken",
                is_secret=True,
            ),
        ]
        | None
    ) = Field(
        None,
        description=(
            "where the key is that the endpoints want: env:FITSERVE_ENDPOINT_KEY_NAME, or file:NAME"
            " in DATA_DIR/endpoint-keys"
        ),
    )
    commits: dict[
        str,
        Annotated[str, TextForm(r"^[0-9a-f]{40}$", "a commit has 40 digits of 0 to 9 and a to f")],
    ] = Field(
        {},
        max_length=64,
        description=(
            "the commit of each repository (`org/name`, or `org/name@revision` where one is named)"
            " that every start takes, wherever its branch has moved; what is not here is asked of"
            " the Hub once, and kept"
        ),
    )
    engines: tuple[str, ...] = Field(
        (), description='allowed engines, "kind" or "kind==version"; empty: all'
    )
    image: (
        Annotated[
            str,
            TextForm(IMAGE_PATTERN, "the name of an image is one like vllm/vllm-openai:v0.33.0"),
        ]
        | None
    ) = Field(
        None,
        max_length=400,
        description=(
            "container image that holds the engine, instead of the one its project publishes;"
            " without an engine it is asked which it holds"
        ),
    )
    goal: Goal = Field(
        "balanced",
        description=(
            "goal of the model: answers of one user (latency), of many concurrent ones "
            "(throughput), long ones (context), conversations that return (agents), or all"
        ),
    )
    concurrency: int | None = Field(
        None, ge=1, le=65536, description="concurrent requests that are expected; None: by the goal"
    )
    gpus: Literal["all", "few"] | Annotated[int, Field(ge=1, le=1024)] | tuple[str, ...] | None = (
        Field(
            None,
            description=(
                "all, few, how many, or which GPUs the model takes (UUIDs, or their numbers as"
                " nvidia-smi has them, which are kept as UUIDs); None: as many as help, or few"
                "  next to other models"
            ),
        )
    )
    tensor_parallel: int | None = Field(None, ge=1, le=64)
    data_parallel: int | None = Field(
        None,
        ge=1,
        le=64,
        exclude_if=lambda groups: groups is None,
        description=(
            "groups of tensor parallel ranks with requests of their own, which share the experts"
        ),
    )
    replicas: int | None = Field(
        None, ge=1, le=64, description="None: one, or as many as the plan finds useful"
    )
    copies: (
        Annotated[
            str,
            TextForm(
                r"^([1-9]|[1-5][0-9]|6[0-4])-([1-9]|[1-5][0-9]|6[0-4])$",
                "copies that follow the load are two numbers from 1 to 64, as in 1-4",
            ),
        ]
        | None
    ) = Field(
        None,
        exclude_if=lambda span: span is None,
        description=(
            "least and most copies, between which their number follows the load: 1-4; None: the"
            " number stays as `replicas` says"
        ),
    )
    context: Tokens | None = Field(
        None, description="tokens that the model will have; None: as many as fit"
    )
    min_context: Tokens | None = Field(
        None, description="tokens; a plan with less is refused; None: as `context` says"
    )
    max_context: Tokens | None = Field(
        None, description="tokens; never plan more; None: as `context` says"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    text_only: bool = Field(
        False,
        description=(
            "accept plans that serve only text, where the model also takes images, video or audio"
        ),
    )
    chat_template: ChatTemplate | None = Field(
        None, description="instead of the one that comes with the model"
    )
    loras: dict[ModelName, Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        {},
        max_length=32,
        description=(
            "LoRA adapters by the names that clients put in `model`: folders, or Hugging Face"
            " repositories (`org/name`, `org/name@revision`)"
        ),
    )
    drafter: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="folder or Hugging Face repository of a model that drafts tokens for this one",
    )
    speculative: Literal["auto", "off", "mtp", "ngram"] | None = Field(
        None,
        description=(
            "draft tokens without a drafter: mtp by layers of the checkpoint, ngram by what the"
            " prompt repeats, auto by mtp where that is there; None: only where a drafter is named"
        ),
    )
    num_speculative_tokens: int | None = Field(
        None, ge=1, le=64, description="tokens in each draft; None: what the drafter names"
    )
    check: bool = Field(
        True,
        description="ask the engine's own code about the plan before its start, for 60 s at most",
    )
    args: dict[str, Scalar] = Field(
        {}, max_length=64, description="engine flags that win over the planner"
    )
    env: dict[str, str] = Field({}, max_length=64)
    policy: Policy = Policy()

    @property
    def least_copies(self) -> int | None:
        """Copies that the wish asks for in any case; None: as many as the plan finds useful."""
        if self.replicas is not None or self.copies is None:
            return self.replicas
        return int(self.copies.partition("-")[0])

    @property
    def most_copies(self) -> int | None:
        """Copies that the wish never exceeds; None: as many as the plan finds useful."""
        if self.replicas is not None or self.copies is None:
            return self.replicas
        return int(self.copies.partition("-")[2])

    @property
    def least_context(self) -> int | None:
        """Tokens that a plan must reach; None: any number."""
        return self.min_context or self.context

    @property
    def most_context(self) -> int | None:
        """Tokens that no plan exceeds; None: the model's own limit."""
        return self.max_context or self.context

    @field_validator("image")
    @classmethod
    def _image_has_a_tag(cls, image: str | None) -> str | None:
        return add_tag(image) if image is not None else None

    @model_validator(mode="after")
    def _an_image_holds_one_engine(self) -> Self:
        if self.image is not None and len(self.engines) > 1:
            raise ValueError(
                "an image is named, and several engines; name the one that it holds, or none"
            )
        return self

    @model_validator(mode="after")
    def _copies_can_follow_the_load(self) -> Self:
        if self.copies is None:
            return self
        least_count, most_count = map(int, self.copies.split("-"))
        if least_count > most_count:
            raise ValueError(
                f"copies has a least number above its most, {self.copies}; give"
                f" {most_count}-{least_count}"
            )
        if self.replicas is not None:
            raise ValueError(
                f"replicas fixes the copies at {self.replicas}, and copies lets their number follow"
                f" the load, {self.copies}; drop one of them"
            )
        if self.endpoints:
            raise ValueError(
                "copies is for engines that this gateway starts, and this model runs elsewhere, at"
                " its endpoints; drop copies, or give a source"
            )
        if self.gpus == "all" and most_count > 1:
            raise ValueError(
                "gpus takes all GPUs for one copy, so no GPU is free for another; give gpus as few"
                " or as the number of one copy, or drop copies"
            )
        return self

    @model_validator(mode="after")
    def _speculation_is_one(self) -> Self:
        if self.drafter is not None and self.speculative not in (None, "auto"):
            raise ValueError(
                f"a drafter is named, and speculative is {self.speculative}; drop one of them"
            )
        if (
            self.num_speculative_tokens is not None
            and self.drafter is None
            and self.speculative in (None, "off")
        ):
            raise ValueError(
                "num_speculative_tokens needs a drafter, or speculative set to auto, mtp or ngram"
            )
        return self


class Change(Value):
    """A new wish for a running model, until all its replicas follow it or it is given up.

    generation: the generation of the new wish; each attempt has the generation of the wish that it
        was planned for.
    refusal_text: why the change was given up. The wish before it is then in force again.
    """

    wish: Wish
    generation: int
    at: float = Field(description="when it was asked for, in Unix seconds")
    refusal_text: str = Field("", alias="refused")


Way = Literal["API", "command line", "page", "models file", "tuning", "unknown"]


class WishOrigin(Value):
    """The author of a wish.

    key: name of the caller's key; empty: none.
    restored: number of the former wish that a rollback restored.
    """

    at: float = Field(description="time in Unix seconds")
    key: str = ""
    way: Way = "unknown"
    restored: int | None = None


class WishVersion(Value):
    """One wish of a model's history.

    wish: the wish, with the name alone where the stored form cannot be read.
    refused: why it was given up; empty: it was in force.
    is_readable: whether this version can read the stored form.
    """

    number: int
    origin: WishOrigin
    wish: Wish
    refused: str = ""
    is_readable: bool = True
