"""An engine version: its names, its start, and its options."""

from __future__ import annotations

from typing import Literal

from gateway.domain.base import Field
from gateway.domain.model import QuantPlace
from gateway.domain.value import Scalar, Value


class Flag(Value):
    """A command line flag of an engine version.

    is_reserved: refused from users, for the reasons in `gateway.engines.common.open_flags`.
    """

    type: Literal["int", "float", "str", "bool", "json"]
    choices: tuple[str, ...] | None = None
    default: Scalar | None = None
    is_reserved: bool = Field(False, alias="ours")
    same_as: str | None = Field(None, description="the flag that this is another name of")
    keys: tuple[str, ...] | None = Field(
        None, description="the only keys that its JSON object may have"
    )


class Install(Value):
    """The recipe of an engine's environment: a lock file next to its profile, or packages."""

    python: str = Field(pattern=r"^3\.\d+$")
    lock: str | None = Field(
        None,
        pattern=r"^[\w.-]+\.txt$",
        description="requirements with hashes, in the profile's folder",
    )
    packages: tuple[str, ...] = ()
    excluded_packages: tuple[str, ...] = Field(
        (),
        description=(
            "packages that these packages ask for and text is served without; a lock has none of"
            " them"
        ),
        alias="without",
    )
    torch_backend: str | None = Field(
        None, description="uv's --torch-backend, where no wheel of torch is at hand"
    )
    module: str = Field(
        "vllm", pattern=r"^\w+$", description="imported at the end, to prove that it works"
    )


class Warmup(Value):
    """A warm-up of an engine version without a switch.

    shapes: MODULE:NAME of a tuple of the shapes that it compiles; an empty one leaves it out.
    routers: these shapes, each as the model's hidden size and its number of experts.
    """

    shapes: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    min_capability: str
    routers: tuple[tuple[int, int], ...] = ()


class Advisory(Value):
    """A published weakness of one engine version."""

    id: str = Field(description="GHSA, CVE or PYSEC number")
    summary: str
    fixed_in: str | None = Field(description="the first version without it; None: none is known")
    source: str


class Method(Value):
    """The limits of an engine version for a quantization method, for all layers."""

    min_capability: str | None = None
    dtypes: tuple[str, ...] = Field((), description="activations it takes; empty: any")
    is_deprecated: bool = Field(
        False, description="refused without --allow-deprecated-quantization", alias="deprecated"
    )
    online: str | None = Field(
        None,
        description=(
            "weights that are not quantized become so while they load, within the limits of the"
            " method that this names"
        ),
    )


class MethodRule(Value):
    """A condition under which a checkpoint is loaded with another method than its own.

    The first rule of an engine that holds decides. method: instead of the one in the quantization
    block.

    fields: name of a field -> accepted values, with null where the field may be missing. The name
        "a|b" means field a, or field b where the block has no a.
    exceptions: fields in the same form. A block with all of them excludes the rule.
    """

    method: str
    checkpoints: tuple[str, ...] = Field(
        (), description="name of the method in the block; empty: any name"
    )
    users: tuple[str, ...] | None = Field(
        None, description='--quantization, "" without one; None: whatever it is'
    )
    algorithm: str | None = Field(
        None,
        description=("regular expression for the whole name of ModelOpt's method, in upper case"),
    )
    layer_algorithm: str | None = Field(
        None,
        description=("regular expression for the method of one of the layers that ModelOpt lists"),
    )
    places: tuple[QuantPlace, ...] = Field((), description="where the block is; empty: anywhere")
    is_nested: bool | None = Field(
        None,
        description="whether ModelOpt's fields are one level deeper; None: either",
        alias="nested",
    )
    fields: dict[str, tuple[Scalar | None, ...]] = Field({})
    exceptions: dict[str, tuple[Scalar | None, ...]] = Field({}, alias="unless")
    models: tuple[str, ...] = Field((), description="model_type of config.json; empty: any")
    min_capability: str | None = None
    below_capability: str | None = None
    renames_method: bool = Field(
        False,
        description="the block's method is called so from then on, and the search goes on",
        alias="renames",
    )
    refuses: str = Field("", description="the engine refuses this, and why")
    source: str


class CacheDefault(Value):
    """The dtype of a KV cache that an engine version gives some models of its own accord."""

    architectures: tuple[str, ...]
    capabilities: tuple[str, ...] = Field(
        description='compute capability of the GPU; "10.*": any with major number 10'
    )
    dtype: str
    source: str


class KnownChoice(Value):
    """A choice of a version's own code that the rules of its `rules_file` do not make.

    Either another version's `rules` make it, or the version refuses, or it is `backend` (of
    experts: by `method`; of attention: for prefill, with `decode`). Of `memory` there are settings
    and no conditions.
    """

    rules_file: Literal["attention_backends", "linear", "memory", "moe"] = Field(alias="of")
    conditions: dict[str, tuple[str | int, ...] | bool | str] = Field(
        {},
        description="conditions, as rules name them",
        alias="where",
    )
    rules: str | None = Field(None, description='"kind==version" with rules')
    backend: str | None = None
    decode: str | None = Field(None, description="the backend of decoding, if it differs")
    method: str = ""
    refuses_choice: bool = Field(False, alias="refuses")
    fields: tuple[str, ...] = Field((), description="settings that are as in `rules`")
    values: dict[str, tuple[str, ...]] = Field({}, description="setting -> names")


class Engine(Value):
    """An engine version, read from `profiles/engines/`."""

    kind: str
    version: str
    device: Literal["cuda", "cpu"]
    image: str
    machines: tuple[str, ...] = Field(
        (), description="processor of its image, as `uname -m` names it; empty: not known"
    )
    cuda: str | None = Field(None, description='CUDA version of the image, for example "13.0"')
    min_driver: str | None = Field(
        None, description="the oldest NVIDIA driver that runs this CUDA version"
    )
    container_command: tuple[str, ...]
    scratch: tuple[str, ...] | None = Field(
        None,
        description=(
            "folders of its image that it writes to, and no other, as was tried; None: not known"
        ),
    )
    process_command: tuple[str, ...] = Field(
        description="`{env}` stands for the engine's virtual environment"
    )
    install: Install | None = None
    min_capability: str | None = None
    compiled: tuple[str, ...] = Field(
        (),
        description=(
            "GPU architectures that all its main extensions hold code for: sm_90a, and as PTX"
            " compute_80; empty: not known"
        ),
    )
    default_utilization: float = 0.9
    default_batched_tokens: int = 2048
    default_seqs: int = 256
    block_size: int = 16
    head_dims: tuple[int, ...] = Field(
        (), description="head sizes its attention can compute; empty: not known to be limited"
    )
    no_float16: tuple[str, ...] = Field(
        (), description="model types that it refuses to compute in float16"
    )
    no_lora: tuple[str, ...] = Field(
        (), description="architectures that it has, and serves no adapters for"
    )
    no_stages: tuple[str, ...] = Field(
        (), description="architectures that it has, and cannot share by stages of a pipeline"
    )
    no_tied_stages: tuple[str, ...] = Field(
        (),
        description=(
            "architectures that it cannot share by stages where the output head is tied to the"
            " embedding"
        ),
    )
    no_layer_input_stages: tuple[str, ...] = Field(
        (),
        description=(
            "architectures that it cannot share by stages where each layer has an input of its"
            " own, or reads the KV cache of an earlier one (Gemma 4 E2B and E4B)"
        ),
    )
    whole_towers: tuple[str, ...] = Field(
        (),
        description=(
            "architectures whose vision tower takes any number of ranks: where its heads cannot be"
            " shared, every rank holds it whole, or has further heads (counted as whole)"
        ),
    )
    every_stage: dict[Literal["embedding", "head", "towers"], tuple[str, ...]] = Field(
        {},
        description=(
            "architectures of which each stage of a pipeline has the embedding, the output head, or"
            " what sees and hears; of others the first has the embedding and what sees and hears,"
            " the last the head; *: all architectures"
        ),
    )
    traits: tuple[str, ...] = Field(
        (),
        description=(
            "differences in the layers of this version; engines/common/layers/build.py names them"
        ),
    )
    architectures: tuple[str, ...] = Field((), description="architectures this version can load")
    stand_ins: tuple[str, ...] = Field(
        (),
        description=(
            "architectures without a class of this version, which it builds by that of transformers"
        ),
    )
    config_classes: tuple[str, ...] = Field(
        (),
        description=(
            "model types whose configuration it reads by code of its own, not of the repository;"
            " empty: not known"
        ),
    )
    tokenizers: tuple[str, ...] = Field(
        (), description=("classes of tokenizers that it reads by code of its own; empty: not known")
    )
    quantizations: dict[str, Method] = Field({})
    cache_defaults: tuple[CacheDefault, ...] = ()
    method_rules: tuple[MethodRule, ...] = Field(
        (), description="rows in the order in which the engine asks them"
    )
    flags: dict[str, Flag] = Field({})
    spelling: dict[str, str] = Field(
        {}, description="the planner's name of a flag -> this engine's, where they differ"
    )
    advisories: tuple[Advisory, ...] = ()
    text_only: dict[str, Scalar] = Field(
        {},
        description=(
            "flags without which a client's media may name files of this machine; empty: none may,"
            " or there are no such"
        ),
    )
    env: dict[str, str] = Field({}, description="environment the engine always gets")
    quiet: tuple[str, ...] = Field(
        (),
        description=(
            "arguments that keep what the gateway asks every few seconds out of its access log"
        ),
    )
    api_switches: tuple[str, ...] = Field(
        (),
        description=(
            "switches of its API for clients that every start gets, where this version has them"
        ),
    )
    eager_env: dict[str, str] = Field(
        {}, description="environment added when it runs without graphs and compilation"
    )
    caches: dict[str, str] = Field(
        {},
        description=(
            "environment variables that name folders of what it compiles -> their names below one"
            " folder for all"
        ),
    )
    expert_warmups: dict[str, Warmup] = Field(
        {}, description="warm-ups for mixtures of experts that it runs for every model"
    )
    user_env: tuple[str, ...] = Field((), description="environment variables a user may set")
    open_switches: tuple[str, ...] = Field(
        (),
        description=(
            "prefixes of its own environment variables: a user may set each of them to a number or"
            " a switch, although `user_env` does not list it"
        ),
    )
    has_sleep_mode: bool = Field(
        False,
        description=(
            "whether the sleep mode (level 1) gives memory back and wakes with all of its state,"
            " by the engine's code; False: none, or not known"
        ),
        alias="sleeps",
    )
    key_env: str | None = Field(
        None, description="environment variable with the key that its callers must send"
    )
    key_option: str | None = Field(
        None,
        description=("line of the file of --config with the key, for an engine without a variable"),
    )
    counters: dict[str, str] = Field(
        {},
        description=(
            "quantities of engines/common/speed/client_traffic.py -> series of this engine's"
            " /metrics; empty: not known"
        ),
    )
    series: dict[str, str] = Field(
        {},
        description=(
            "further quantities of server/metrics/engine_series.py -> series of this engine's"
            " /metrics"
        ),
    )
    sources: dict[str, str] = Field({}, description="source of each rule")
    kernels_as: dict[str, tuple[str, ...]] = Field(
        {},
        description=(
            '"kind==version" with rules -> linear kernels that choose layers by the code of that'
            " version, and not of `guessed_from`"
        ),
    )
    choices: tuple[KnownChoice, ...] = Field(
        (), description="choices of this version's code; the first that holds decides"
    )
    guessed_from: str | None = Field(
        None,
        description=(
            '"kind==version" whose rules forecast for this version, though nobody compared the two;'
            " None: it has its own"
        ),
    )

    @property
    def ref(self) -> str:
        return f"{self.kind}=={self.version}"
