"""The description of a model by its files."""

from __future__ import annotations

from typing import Any, Literal

from gateway.domain.base import Field
from gateway.domain.value import Task, Value

GENERATION_TASKS: tuple[Task, ...] = ("generate", "transcribe")
"""Tasks of models that write text token by token, with a KV cache."""

Shard = Literal["column", "row", "kv", "vocab", "replicated", "expert_column", "expert_row"]


QuantPlace = Literal[
    "quantization_config",
    "compression_config",
    "text_config.quantization_config",
    "text_config.compression_config",
    "hf_quant_config.json",
    "quantization_config and hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
]


class TensorGroup(Value):
    """Tensors that differ only in their layer (and expert) number, with the number written `*`.

    `shape` is of one tensor as stored (out features, in features for a linear weight).
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str = Field(description="safetensors name: BF16, F16, F32, F8_E4M3, I32, U8 ...")
    shard: Shard


class Recurrent(Value):
    """The state of a recurrent layer for each sequence, instead of keys and values.

    A matrix per head (rows x columns), and the last inputs of a convolution. Sizes are of the whole
    layer, before tensor parallelism.

    gdn         rows are the value head size, columns the key head size, groups the key heads
    mamba2      rows are the head size, columns the state size; groups share B and C
    mamba1      heads are channels, with one row each
    short_conv  has no matrices, so heads is 0
    """

    kind: Literal["gdn", "kda", "mamba1", "mamba2", "short_conv"]
    heads: int
    rows: int
    columns: int
    groups: int = 0
    conv_channels: int
    conv_kernel: int
    dtype: str | None = Field(
        None, description="dtype of the matrices, where the config names one (mamba_ssm_dtype)"
    )
    chunk: int | None = Field(
        None, description="tokens in a chunk of a mamba2 kernel (mamba_chunk_size, chunk_size)"
    )


class AttentionGroup(Value):
    """Attention layers of one kind. Encoder and vision layers keep no KV cache.

    full       `kv_heads` keys of `head_dim` and values of `value_dim` per token
    sliding    the same, for the last `window` tokens
    mla        one latent of `head_dim` (kv_lora_rank + rope) per token, whole on every rank;
               value_dim: kv_lora_rank
    cross      keys and values of an encoder's input, not of the sequence's own tokens
    recurrent  a constant state per sequence, in `recurrent`
    """

    kind: Literal["full", "sliding", "mla", "cross", "recurrent", "encoder", "vision"]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = Field(None, description="size of a value head; None: head_dim")
    window: int | None = None
    has_sinks: bool = Field(False, alias="sinks")
    alibi: bool = False
    causal: bool = True
    index_dim: int | None = Field(
        None, description="head size of a sparse attention's indexer (DeepSeek V3.2)"
    )
    recurrent: Recurrent | None = None
    numbers: tuple[int, ...] = Field(
        (),
        exclude=True,
        description=(
            "which of the language model's layers, where it has other kinds too; empty: not known,"
            " or all"
        ),
    )


class Experts(Value):
    count: int
    per_token: int
    intermediate: int


class Quant(Value):
    """The checkpoint's own quantization block: `method` as it names itself, the rest verbatim."""

    method: str
    config: dict[str, Any] = Field({})
    place: QuantPlace = Field(
        "quantization_config", description="the field of config.json, or the file next to it"
    )

    @property
    def file(self) -> str:
        """The file that holds the block."""
        return self.place if self.place.endswith("config.json") else "config.json"

    @property
    def is_unread(self) -> bool:
        """Whether engines read the file only for a method that --quantization names."""
        return self.place in ("quant_config.json", "quantize_config.json")

    @property
    def is_nested(self) -> bool:
        """Whether ModelOpt's fields are only one level deeper, as in hf_quant_config.json."""
        quantization = self.config.get("quantization")
        return isinstance(quantization, dict) and "quant_algo" not in self.config

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the block, wherever they stand."""
        return {**self.config, **self.config["quantization"]} if self.is_nested else self.config


class ModelSpec(Value):
    """The facts of a model for planning, from config.json and safetensors headers only."""

    source: str
    revision: str | None = Field(None, description="commit (40 hex) of a Hugging Face repository")
    architecture: str
    model_type: str
    task: Task = "generate"
    dtype: Literal["bfloat16", "float16", "float32"]
    max_position: int = Field(description="the longest context in tokens")
    has_open_limit: bool = Field(
        False,
        description="no file names `max_position`, and an engine accepts more on request",
        alias="open_limit",
    )
    sentence_limit: int | None = Field(
        None, exclude=True, description="tokens that the files of sentence-transformers allow"
    )
    sources: dict[str, str] = Field(
        {},
        exclude=True,
        description=(
            "where the values of max_position, dtype, heads and task come from: a field in"
            " config.json, another file, or the default of some code"
        ),
    )
    hidden: int
    vocab: int
    attention: tuple[AttentionGroup, ...]
    guessed: tuple[str, ...] = Field(
        (),
        description=(
            "properties that were guessed from the names of fields, as no reader knows the family"
        ),
    )
    experts: Experts | None = None
    quant: Quant | None = None
    tensors: tuple[TensorGroup, ...]
    tensors_from: Literal["headers", "config"]
    draft_tensors: tuple[TensorGroup, ...] = Field(
        (),
        description=(
            "parameters of layers that only draft tokens (MTP), which engines load only on request"
        ),
    )
    remote_code: tuple[str, ...] = Field(
        (),
        description=(
            "files with code in the repository, which engines run where they have none of their"
            " own for it"
        ),
    )
    file_bytes: int | None = Field(None, description="size of all weight files")

    @property
    def generates(self) -> bool:
        return self.task in GENERATION_TASKS

    chat_template: str | None = Field(
        None,
        exclude=True,
        description="the Jinja text that makes messages a prompt; None: the model has none",
    )
    added_tokens: tuple[str, ...] = Field(
        (),
        exclude=True,
        description=(
            "tokens that the tokenizer has in addition to its vocabulary, as far as its small "
            "files name them"
        ),
    )
    answer_limit: int | None = Field(
        None,
        exclude=True,
        description="max_new_tokens of generation_config.json; None: not set",
    )
    structure: str = Field(
        "",
        exclude=True,
        description="JSON text of what an engine builds of the architecture; empty: not known",
    )
    config: dict[str, Any] = Field(
        {},
        exclude=True,
        description="config.json, from which the layers of each engine version follow",
    )

    @property
    def versioned_source(self) -> str:
        """The model's name for facts, with its commit if it has one."""
        return f"{self.source}@{self.revision}" if self.revision else self.source


class AdapterLayer(Value):
    """The change of an adapter to layers of one name (numbers written `*`).

    Two matrices: `inputs` x `rank` and `rank` x `outputs`.
    """

    module: str
    inputs: int
    outputs: int
    rank: int


class Adapter(Value):
    """A LoRA adapter, read from adapter_config.json and tensor headers.

    rank: the highest of its layers.
    deepest: number of the last layer that it changes.
    """

    name: str = Field(description="name that clients put in `model`")
    source: str
    revision: str | None = None
    base: str | None = Field(
        None, description="the model that it was trained for, as it says itself"
    )
    rank: int
    layers: tuple[AdapterLayer, ...]
    deepest: int = 0
