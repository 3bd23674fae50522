"""What one SGLang version says of attention backends: attention_backends.yaml, data. Pure.

Where (from a profile) + Model + compute capability -> why it does not hold; "": it does
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from gateway.core.kernels.conditions import numbers, of_family
from gateway.domain import Value

Role = Literal["attention", "prefill", "decode"]


class Model(Value):
    """What selection reads of a model, and of the GPU beside its capability."""

    architecture: str
    mla: bool = False
    sparse: bool = Field(False, description="with an indexer (DeepSeek V3.2)")
    sinks: bool = False
    kv_dtype: str = "auto"
    gpu_gib: float = 0
    recurrent: str = Field("", description="kind of its recurrent layers")
    state_dtype: str = Field("float32", description="of their states; what the engine takes where config.json names none")
    state_size: tuple[int, int] = Field((0, 0), description="rows and columns of a head's state")
    chunk: int = Field(0, description="tokens of one prefill batch, where the user sets them")


class Where(Value):
    """Conditions, all of which must hold. Capabilities are "9.0" or, for a family, "12.*"."""

    architectures: tuple[str, ...] | None = None
    mla: bool | None = None
    sparse: bool | None = None
    sinks: bool | None = None
    recurrent: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] | None = None
    state_size: tuple[int, int] | None = None
    max_chunk: int | None = None
    capabilities: tuple[str, ...] | None = None
    min_capability: str | None = None
    kv_dtypes: tuple[str, ...] | None = None
    min_gib: float | None = None

    def misses(self, model: Model, capability: str) -> str:
        """Why it does not hold."""
        if self.architectures is not None and model.architecture not in self.architectures:
            return f"{model.architecture} is not one of {', '.join(self.architectures)}"
        if self.mla is not None and self.mla != model.mla:
            return "is for MLA" if self.mla else "is not for MLA"
        if self.sparse is not None and self.sparse != model.sparse:
            return "is for sparse attention" if self.sparse else "is not for sparse attention"
        if self.sinks is not None and self.sinks != model.sinks:
            return "is for attention sinks" if self.sinks else "does not take attention sinks"
        if self.recurrent is not None and model.recurrent not in self.recurrent:
            return f"is for {' or '.join(self.recurrent)} layers"
        if self.state_dtypes is not None and model.state_dtype not in self.state_dtypes:
            return f"states in {model.state_dtype} are not in {' or '.join(self.state_dtypes)}"
        if self.state_size is not None and model.state_size != self.state_size:
            return "states of {} x {} are not {} x {}".format(*model.state_size, *self.state_size)
        if self.max_chunk is not None and model.chunk > self.max_chunk:
            return f"prefill batches of {model.chunk} tokens are more than {self.max_chunk}"
        if self.capabilities is not None and not of_family(capability, self.capabilities):
            return f"runs on compute capability {' or '.join(self.capabilities)}, this GPU has {capability}"
        if self.min_capability is not None and (numbers(capability) or (0, 0)) < (numbers(self.min_capability) or (0, 0)):
            return f"needs compute capability {self.min_capability}, this GPU has {capability}"
        if self.kv_dtypes is not None and model.kv_dtype not in self.kv_dtypes:
            return f"takes a KV cache in {', '.join(self.kv_dtypes)}, not in {model.kv_dtype}"
        if self.min_gib is not None and model.gpu_gib < self.min_gib:
            return f"the GPU has less than {self.min_gib:g} GiB"
        return ""


def none_of(any_of: Sequence[Where], model: Model, capability: str) -> str:
    """Why none of them holds; "": one does."""
    reasons = [where.misses(model, capability) for where in any_of]
    return "" if "" in reasons else "; or ".join(dict.fromkeys(reasons))


class Step(Value):
    """What the engine sets where this holds; a backend only if the user and the steps before left all of `unset` open."""

    where: Where = Where()
    unset: tuple[Role, ...] = ("attention", "prefill", "decode")
    attention: str | None = None
    decode: str | None = None
    page: int | None = Field(None, description="it sets this whatever the user asks for")
    source: str


class Limit(Value):
    """What the engine refuses of a model. `of`: attention is the option of that name, which may be open still."""

    where: Where
    of: tuple[Role, ...] = ("prefill", "decode")
    accepts: tuple[str, ...] | None = None
    refuses: tuple[str, ...] = ()
    page: int | None = Field(None, description="tokens of a page: no others")
    requires: Where = Where()
    source: str


class Backend(Value):
    """`any_of` must hold for it to be made; `prefill` and `decode` where it has that part; `named` where attention or decode
    names it."""

    source: str
    any_of: tuple[Where, ...] = (Where(),)
    prefill: tuple[Where, ...] = (Where(),)
    decode: tuple[Where, ...] = (Where(),)
    named: Where = Where()
    known: Where = Field(Where(), description="for others nothing says what comes of it")
    page: int | None = Field(None, description="tokens of a page, unless it is asked for one of `pages`")
    pages: tuple[int, ...] = ()
    page_of: tuple[Role, ...] = ("attention", "decode")
    page_where: Where = Where()
    causal_only: bool = Field(False, description="it computes every layer so, also those whose tokens see later ones")
    version: Literal[3, 4] | None = Field(None, description="of FlashAttention")


class Instead(Value):
    """What attention becomes where this holds."""

    backend: str
    where: Where
    by: str
    source: str


class LayerRule(Value):
    """The backend of layers beside the model's own attention: recurrent ones, vision towers. None: not known."""

    where: Where
    backend: str | None
    version: Literal[3, 4] | None = None


class BackendRules(Value):
    """profiles/engines/sglang/VERSION/attention_backends.yaml. Sources are file:line below sglang/srt/ of that version."""

    kv_dtypes: tuple[str, ...]  # those that the rules describe; any other is unknown
    mla: tuple[str, ...]  # architectures that are computed as MLA
    mla_source: str
    own_backends: tuple[str, ...]  # architectures for which the engine sets what these rules do not describe
    own_backends_source: str
    own_fields: tuple[str, ...] = ()  # of config.json, with which the same holds
    repairs: tuple[str, ...] = ()  # backends to force where the engine's own choice is refused, best first
    unknown_with: tuple[str, ...]  # flags that decide, and that these rules do not describe
    models: tuple[Step, ...]
    limits: tuple[Limit, ...]
    defaults: tuple[Step, ...]
    instead: tuple[Instead, ...] = ()
    last_limits: tuple[Limit, ...] = ()
    backends: dict[str, Backend]
    recurrent: tuple[LayerRule, ...]
    recurrent_source: str
    vision: tuple[LayerRule, ...]
    vision_source: str

    # Compared by identity: a version's rules are read once, and answers are remembered for each.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
