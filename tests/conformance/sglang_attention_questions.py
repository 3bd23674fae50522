"""Which attention backends does SGLang take? Models x KV cache dtypes x what users force, as its own ServerArgs and registry say.

An answer is [prefill backend, decode backend, tokens of a page, what computes recurrent layers, whether sliding layers have a
pool of their own, the vision tower's backend], or the engine's refusal, cut. Recurrent: null, or [class, prefill kernels, decode
kernels]. Vision: null for models without a tower, and for those whose tower was not found to ask `VisionAttention` or to be Gemma 4's.

What is asked is all of selection: what ServerArgs resolves, then the functions that make the backends, with classes in the
backends' place that only remember what they are. What a backend refuses when it is made, or in its kernels, is not asked.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
import types
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import MODELS
from tests.support.versions import since

ENGINE = "sglang"
OLDER_BEFORE = "0.5.11"  # 0.5.10 is made for transformers 5.3
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
NAMES = tuple(sorted(path.stem for path in MODELS.glob("*.json")))
# Models of architectures that a version does not have.
NONE_HAS = ("gte-modernbert-base", "nomic-embed-text-v1.5", "olmo-3-7b", "seed-oss-36b")
ADDED = {"0.5.11": ("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b")}
# Architectures with settings of their own that no kept model has: just enough of a config to be read.
TEXT: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
TEXT |= {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"moe_intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
MAMBA |= {"mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 128}
OTHERS: dict[str, dict[str, Any]] = {
    "falcon-h1": {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", **TEXT, **MAMBA},
    "glm-4.7-flash": {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", **TEXT, **LATENT},
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
# For each kind of model: plain, sinks, sliding, MLA, gated delta nets, mamba, without FlashInfer, an encoder.
KINDS = (
    *("qwen3-8b", "gpt-oss-20b", "gemma-3-27b", "deepseek-v2-lite", "deepseek-v3", "qwen3-next-80b-a3b", "nemotron-nano-9b-v2"),
    *("granite-4.0-h-micro", "olmo-2-13b", "bge-m3"),
)
ASKS_VISION_ATTENTION = ("gemma-3-4b", "gemma-3-27b", "qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b")
FORCED = ("triton", "flashinfer", "fa3", "fa4", "torch_native", "flex_attention", "trtllm_mha", "trtllm_mla")
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
    """As published, or one of OTHERS: SGLang counts the layers of a hybrid by a field that the kept config leaves out."""
    if name in OTHERS:
        return OTHERS[name]
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    if "linear_attention" in text.get("layer_types", ()):
        text.setdefault("full_attention_interval", text["layer_types"].index("full_attention") + 1)
    return config


def questions(version: str) -> Iterator[Question]:
    lacks = {*NONE_HAS, *(name for bound, names in ADDED.items() if not since(version, bound) for name in names)}
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
    for name in ("server_args", "arg_groups.memory_hook", "arg_groups.model_overrides.qwen3_vl", "utils.common"):
        try:
            module: Any = importlib.import_module(f"sglang.srt.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "get_device_memory_capacity"):
            module.get_device_memory_capacity = lambda *_, **__: float(_GPU["mib"])
    record_backends()
    with tempfile.TemporaryDirectory() as folder:
        return [_answer(Path(folder), question) for question in questions(version)]


_GPU = {"mib": MIB}


class Recorded:
    """Stands for an attention backend, and remembers the backends that it is made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parts = [part for part in (*args, *kwargs.values()) if isinstance(part, Recorded)]

    def names(self) -> list[str]:
        return [type(self).__name__, *(name for part in self.parts for name in part.names())]


def record_backends() -> None:
    """Put a recording class into the place of every attention backend."""
    for folder in ("sglang.srt.layers.attention", "sglang.srt.layers.attention.linear"):
        package: Any = importlib.import_module(folder)
        for found in pkgutil.iter_modules(package.__path__, f"{folder}."):
            if not found.name.endswith("_backend"):
                continue
            try:
                module = importlib.import_module(found.name)
            except ImportError:
                continue  # of other platforms, or a package that the image does not have
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and name.endswith("Backend"):
                    setattr(module, name, type(name, (Recorded,), {}))


def _answer(folder: Path, q: Question) -> Any:
    model = folder / q.model
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config_of(q.model)))
    _GPU["mib"] = q.gpu_mib
    given: dict[str, Any] = {
        "attention_backend": q.attention,
        "prefill_attention_backend": q.prefill,
        "decode_attention_backend": q.decode,
    }
    given["page_size"] = q.page
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    try:
        args = arguments.ServerArgs(
            model_path=str(model),
            device="cuda",
            skip_tokenizer_init=True,
            load_format="dummy",
            kv_cache_dtype=q.kv_dtype,
            **given,
        )
        return _resolved(args, q) if hasattr(args, "resolve_once") else _filled(args, q)
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:120].replace(str(folder), "")


def _filled(args: Any, q: Question) -> list[Any]:
    """0.5.10: ServerArgs fills itself."""
    runners: Any = importlib.import_module("sglang.srt.model_executor.model_runner")
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    linear: Any = importlib.import_module("sglang.srt.layers.attention.linear.utils")
    runner = object.__new__(runners.ModelRunner)
    runner.server_args, runner.model_config = args, models.ModelConfig.from_server_args(args)
    runner.is_draft_worker, runner.init_new_workspace, runner.device = False, False, "cuda"
    runner.use_mla_backend = runner.model_config.attention_arch == models.AttentionArch.MLA
    runners.set_global_server_args_for_scheduler(args)
    made = runner._get_attention_backend()
    kernels = [linear.get_linear_attn_prefill_backend().value, linear.get_linear_attn_decode_backend().value]
    recurrent = _recurrent(made, kernels, args.mamba_backend)
    return [*args.get_attention_backends(), args.page_size, recurrent, bool(runner.model_config.is_hybrid_swa), _tower(q)]


def _resolved(args: Any, q: Question) -> list[Any]:
    """0.5.23: ServerArgs stays as it was given, and has a view of what follows."""
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    setup: Any = importlib.import_module("sglang.srt.model_executor.model_runner_components.attention_backend_setup")
    overrides: Any = importlib.import_module("sglang.srt.arg_groups.overrides")
    models: Any = importlib.import_module("sglang.srt.configs.model_config")
    hybrids: Any = importlib.import_module("sglang.srt.configs.hybrid_arch")
    args.resolve_once()
    context.publish(args, role="scheduler")
    try:
        prefill, decode = overrides.attention_backends_of(overrides.resolved_view(args))
        model = models.ModelConfig.from_server_args(args)
        runner = types.SimpleNamespace(
            server_args=args, model_config=model, is_draft_worker=False, draft_attention_backend=None, kv_cache_dtype=None,
            use_mla_backend=overrides.use_mla_backend(args), prefill_attention_backend_str=prefill,
            decode_attention_backend_str=decode, device="cuda",
        )  # fmt: skip
        if hybrid := hybrids.mambaish_config(model):
            state = types.SimpleNamespace(temporal=types.SimpleNamespace(dtype=hybrid.mamba2_cache_params.dtype.temporal))
            pool = types.SimpleNamespace(mamba_cache=state)
            runner.req_to_token_pool = types.SimpleNamespace(mamba_pool=pool)
        made = setup.get_attention_backend(model_runner=runner)
        said = args.resolved_dict()
        linear = getattr(runner, "linear_attn_backends", None)
        kernels = [linear.prefill.value, linear.decode.value] if linear else []
        recurrent = _recurrent(made, kernels, said["mamba_backend"])
        return [prefill, decode, said["page_size"], recurrent, bool(model.is_hybrid_swa), _tower(q)]
    finally:
        context.reset_context()


def _recurrent(made: Recorded, kernels: list[str], mamba: str | None) -> list[str] | None:
    names = made.names()
    if "HybridLinearAttnBackend" not in names[0]:
        return None
    return [names[-1], *([mamba or "triton"] * 2 if names[-1] == "Mamba2AttnBackend" else kernels)]


def _tower(q: Question) -> str | None:
    if q.model in ASKS_VISION_ATTENTION:
        asked: Any = importlib.import_module("sglang.srt.layers.attention.vision").VisionAttention
        return str(asked._determine_attention_backend(object.__new__(asked), None))
    if q.model.startswith("gemma-4"):
        return str(importlib.import_module("sglang.srt.models.gemma4_vision").Gemma4VisionAttention._select_backend())
    return None
