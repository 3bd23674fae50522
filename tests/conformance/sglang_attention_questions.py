"""Which attention backends does SGLang take? Models x KV cache dtypes x forced backends, as its own
ServerArgs and registry say.

An answer is [prefill backend, decode backend, tokens of a page, the backend of recurrent layers,
whether sliding layers have a pool of their own, the vision tower's backend], or the engine's
refusal, cut. Recurrent: null, or [class, prefill kernels, decode kernels]. Vision: null for models
without a tower, and for those whose tower was not found to ask `VisionAttention` or to be Gemma
4's.

The question is all of selection: the resolution of ServerArgs, then the functions that make the
backends, with classes in the backends' place that only remember their names. Refusals of a backend
when it is made, or in its kernels, are not asked.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.sglang.inside import attention as sglang_attention
from gateway.engines.sglang.inside import boot as sglang_boot
from gateway.engines.sglang.inside import model as sglang_model
from tests.support.paths import MODELS
from tests.support.versions import since

ENGINE = "sglang"
OLDER_BEFORE = "0.5.11"  # 0.5.10 is made for transformers 5.3
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
NAMES = tuple(sorted(path.stem for path in MODELS.glob("*.json")))
# Models of architectures that a version does not have.
NONE_HAS = ("gte-modernbert-base", "nomic-embed-text-v1.5", "olmo-3-7b", "seed-oss-36b")
ADDED = {"0.5.11": ("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b")}
# Architectures with settings of their own that no kept model has: just enough of a config to be
# read.
TEXT: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
}
TEXT |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
TEXT |= {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT |= {
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
LATENT |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MAMBA = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
MAMBA |= {"mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 128}
OTHERS: dict[str, dict[str, Any]] = {
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **TEXT,
        **MAMBA,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **TEXT,
        **LATENT,
    },
    "glm-5": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **TEXT,
        **LATENT,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **TEXT,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "llama-4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {**TEXT, "model_type": "llama4_text", "attention_chunk_size": 8192},
        "vision_config": {"model_type": "llama4_vision_model"},
    },
}
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# For each kind of model: plain, sinks, sliding, MLA, gated delta nets, mamba, without FlashInfer,
# an encoder.
KINDS = (
    "qwen3-8b",
    "gpt-oss-20b",
    "gemma-3-27b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "nemotron-nano-9b-v2",
    "granite-4.0-h-micro",
    "olmo-2-13b",
    "bge-m3",
)
ASKS_VISION_ATTENTION = (
    "gemma-3-4b",
    "gemma-3-27b",
    "qwen2.5-vl-7b",
    "qwen3-vl-8b",
    "qwen3-vl-30b-a3b",
)
FORCED = (
    "triton",
    "flashinfer",
    "fa3",
    "fa4",
    "torch_native",
    "flex_attention",
    "trtllm_mha",
    "trtllm_mla",
)
PAGES = (16, 32, 64, 128)
MIB, LARGE_MIB = 24576, 81559  # a GPU's memory decides too


class Question(NamedTuple):
    model: str
    kv_dtype: str = "auto"
    attention: str | None = None  # --attention-backend
    prefill: str | None = None
    decode: str | None = None
    page: int | None = None
    gpu_mib: int = MIB


def config_of(name: str) -> dict[str, Any]:
    """As published, or one of OTHERS: SGLang counts the layers of a hybrid by a field that the kept
    config leaves out."""
    if name in OTHERS:
        return OTHERS[name]
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    if "linear_attention" in text.get("layer_types", ()):
        text.setdefault("full_attention_interval", text["layer_types"].index("full_attention") + 1)
    return config


def questions(version: str) -> Iterator[Question]:
    lacks = {
        *NONE_HAS,
        *(
            name
            for first_version, names in ADDED.items()
            if not since(version, first_version)
            for name in names
        ),
    }
    for name in (*NAMES, *OTHERS):
        if name in lacks:
            continue
        for kv_dtype in KV_DTYPES:
            yield Question(name, kv_dtype)
        yield Question(name, page=64)
        if "vision_config" in config_of(name):
            yield Question(name, gpu_mib=LARGE_MIB)
    for name, backend in product(OTHERS, FORCED):
        yield Question(name, attention=backend)
    for name in KINDS:
        for backend in FORCED:
            for kv_dtype in KV_DTYPES:
                yield Question(name, kv_dtype, backend)
            for page in PAGES:
                yield Question(name, attention=backend, page=page)
            yield Question(name, decode=backend)
            yield Question(name, prefill=backend)
            yield Question(name, prefill=backend, decode=backend)
        yield Question(name, prefill="fa3", decode="flashinfer")
        yield Question(name, prefill="flashinfer", decode="triton")


def answers(version: str) -> list[Any]:
    sglang_attention.record_backends()
    with tempfile.TemporaryDirectory() as folder:
        return [answer(Path(folder), question) for question in questions(version)]


def answer(folder: Path, q: Question) -> Any:
    model = folder / q.model
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config_of(q.model)))
    sglang_boot.state_memory(q.gpu_mib)
    options: dict[str, Any] = {
        "attention_backend": q.attention,
        "prefill_attention_backend": q.prefill,
        "decode_attention_backend": q.decode,
    }
    options["page_size"] = q.page
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    try:
        args = arguments.ServerArgs(
            model_path=str(model),
            device="cuda",
            skip_tokenizer_init=True,
            load_format="dummy",
            kv_cache_dtype=q.kv_dtype,
            **options,
        )
        return _selection_answer(args, q)
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:120].replace(str(folder), "")


def _selection_answer(args: Any, q: Question) -> list[Any]:
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    try:
        sglang_model.publish(args)
        sglang_model.set_groups(args)
        model = models.ModelConfig.from_server_args(args)
        backends = sglang_attention.select_backends(args, model)
        return [
            backends.prefill,
            backends.decode,
            backends.page,
            backends.recurrent,
            bool(model.is_hybrid_swa),
            _tower(q),
        ]
    finally:
        with suppress(ModuleNotFoundError, AttributeError):  # older versions have none
            importlib.import_module("sglang.srt.runtime_context").reset_context()


def _tower(q: Question) -> str | None:
    if q.model in ASKS_VISION_ATTENTION:
        vision_attention: Any = importlib.import_module(
            "sglang.srt.layers.attention.vision"
        ).VisionAttention
        return str(
            vision_attention._determine_attention_backend(object.__new__(vision_attention), None)
        )
    if q.model.startswith("gemma-4"):
        return str(
            importlib.import_module(
                "sglang.srt.models.gemma4_vision"
            ).Gemma4VisionAttention._select_backend()
        )
    return None
