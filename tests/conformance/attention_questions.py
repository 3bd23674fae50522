"""Which backend does each attention layer get? The questions, and how the engine is asked.

An answer is [backend, version, valid, refused]: the engine's choice, the version of FlashAttention
if it is that, every backend that it would take, in order of preference, and each other one of its
list with its refusals, in the engine's words cut to a few letters (CODES): "FLASH_ATTN: head kv,
FLASHINFER: kv". No backend: the engine refuses the model. Where a backend is forced, and for vision
and recurrent layers, which have no list, the last two are null. Of gemma4, a model whose sliding
layers have heads of 256, and whose other layers have heads of `head_dim`, the answer is [backend,
version] of the sliding ones and then of the others.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from gateway.engines.inside.meta import fit, meta_mode
from gateway.engines.vllm.inside.boot import configure
from tests.support.versions import since

# A capability, then the installed optional packages where they are not those of the image.
CAPABILITIES = (
    "7.5",
    "8.0",
    "8.6",
    "8.9",
    "9.0",
    "10.0",
    "10.3",
    "12.0",
    "12.1",
    "8.6 none",
    "9.0 none",
    "10.0 none",
    "12.0 none",
)
# The engine's words about a backend that it passes over -> a code; any other reason is "other".
CODES = {
    "head_size not supported": "head",
    "dtype not supported": "dtype",
    "kv_cache_dtype not supported": "kv",
    "block_size not supported": "block",
    "partial multimodal token full attention not supported": "prefix",
    "MLA not supported": "mla",
    "non-MLA not supported": "mla",
    "attention sinks not supported": "sinks",
    "sparse not supported": "sparse",
    "non-sparse not supported": "sparse",
    "compute capability not supported": "capability",
    "sliding window not supported": "window",
    "non-causal attention not supported": "causal",
    **{
        f"attention type {role} not supported": "role"
        for role in ("encoder", "encoder_only", "encoder_decoder")
    },
}


class Question(NamedTuple):
    kind: str
    head_dim: int
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    block_size: int | None = None
    sinks: bool = False
    causal: bool = True
    sparse: bool = False
    multimodal_prefix: bool = False
    softcap: bool = False
    role: str = "decoder"
    nope_dim: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None
    latent_dim: int | None = None
    index_topk: int | None = None
    flash_attention: int | None = None
    recurrent: str | None = None
    forced: str = ""  # --attention-backend


HEADS = (32, 40, 64, 80, 96, 100, 112, 128, 192, 256, 320, 512, 576)
KV = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
BLOCKS = (8, 16, 32, 48, 64, 128, 256)
ORDINARY = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA", "FLASHMLA")
# Backends that a version brought, asked by their name from that version on.
ADDED = {
    "0.26": ("TURBOQUANT",),
    "0.33": ("TRITON_FLASHINFER", "TRITON_FLASH_ATTN", "FLASH_ATTN_MLA_SPARSE_FA4"),
}


def questions(version: str) -> Iterator[Question]:
    """Every question that this version is asked, in the order of its answers."""
    full = Question("full", 128)
    for head in HEADS:
        yield full._replace(head_dim=head)
    for head, kv in product((64, 100, 128, 256, 320, 512), KV[1:]):
        yield full._replace(head_dim=head, kv_dtype=kv)
    for head, dtype in product((64, 128, 512), ("float16", "float32")):
        yield full._replace(head_dim=head, dtype=dtype)
    for head, sinks, causal, kv in product(
        (64, 128, 192, 256, 512), (False, True), (False, True), ("auto", "fp8")
    ):
        if sinks or not causal:
            yield Question("full", head, sinks=sinks, causal=causal, kv_dtype=kv)
        if sinks == causal:
            yield Question("sliding", head, sinks=sinks, causal=causal, kv_dtype=kv)
    for head, kv in product((64, 128, 192, 256, 320, 512), ("auto", "fp8", "fp8_e5m2")):
        yield Question("full", head, kv_dtype=kv, multimodal_prefix=True)
        if kv == "auto":
            yield Question("full", head, kv_dtype=kv, multimodal_prefix=True, causal=False)
    for head in (64, 256, 512):
        yield Question("sliding", head, sinks=True, multimodal_prefix=True)
    for head, kv, kind in product((128, 256), ("auto", "fp8"), ("full", "sliding")):
        yield Question(kind, head, kv_dtype=kv, softcap=True)
    for head, kv, prefix in product((64, 256, 320, 512), ("auto", "fp8"), (False, True)):
        yield Question("full", head, kv_dtype=kv, multimodal_prefix=prefix, flash_attention=4)
    for block, head, kv in product(BLOCKS, (128, 256, 512), ("auto", "fp8")):
        if kv == "auto" or head == 512:
            yield Question("full", head, kv_dtype=kv, block_size=block)
    for block, head, sinks in product((16, 64, 128), (256, 512), (False, True)):
        yield Question("full", head, block_size=block, sinks=sinks, multimodal_prefix=not sinks)
    yield Question("full", 128, 4, 1, block_size=128)
    for role, head in product(("encoder_only", "encoder", "encoder_decoder"), (32, 64, 512)):
        yield Question("encoder", head, role=role)
    yield from _mla()
    for head in (*HEADS, 72, 88):
        yield Question("vision", head)
    for head, dtype in product((72, 128), ("float16", "float32")):
        yield Question("vision", head, dtype=dtype)
    for kind in ("gdn", "kda", "mamba1", "mamba2"):
        yield Question("recurrent", 128, recurrent=kind)
    if since(version, "0.19"):  # 0.18 does not know the model
        for head, kv in product((256, 512, 640), ("auto", "fp8", "fp8_e5m2")):
            yield Question("gemma4", head, kv_dtype=kv)
        yield Question("gemma4", 512, forced="FLASHINFER")
        yield Question("gemma4", 512, forced="FLASH_ATTN")
    added = [
        name
        for first_version, names in ADDED.items()
        if since(version, first_version)
        for name in names
    ]
    # From 0.33 on its own new backends are asked for.
    if since(version, "0.26") and not since(version, "0.33"):
        added.append("TOKENSPEED_MLA")
    for forced_backend in (*ORDINARY, *added):
        for head, kv in ((128, "auto"), (512, "auto"), (128, "fp8"), (100, "auto")):
            yield full._replace(forced=forced_backend, head_dim=head, kv_dtype=kv)
        for change in (
            {"sinks": True},
            {"causal": False},
            {"multimodal_prefix": True, "head_dim": 256},
        ):
            yield full._replace(forced=forced_backend, **change)
        yield DEEPSEEK._replace(forced=forced_backend)


# DeepSeek V3 (128 heads, of which a rank has some) and its sparse successor V3.2.
DEEPSEEK = Question("mla", 576, 128, 1, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)
SPARSE = DEEPSEEK._replace(sparse=True, index_topk=2048)


def _mla() -> Iterator[Question]:
    for base in (DEEPSEEK, SPARSE):
        for heads, kv in product((128, 16), (*KV, "fp8_ds_mla")):
            yield base._replace(heads=heads, kv_dtype=kv)
        for heads in (8, 12, 17, 64):
            yield base._replace(heads=heads)
        for block in BLOCKS:
            yield base._replace(block_size=block, kv_dtype="fp8")
        for nope in (64, 96, 192, 256):
            yield base._replace(nope_dim=nope, kv_dtype="fp8", heads=16)
        yield base._replace(value_dim=256, kv_dtype="fp8")
        for head, latent, rope in (
            (320, 256, 64),
            (512, 512, 0),
            (512, 448, 64),
            (576, 448, 128),
            (128, 64, 64),
        ):
            for kv in ("auto", "fp8"):
                yield base._replace(head_dim=head, latent_dim=latent, rope_dim=rope, kv_dtype=kv)
        yield base._replace(head_dim=512, latent_dim=512, rope_dim=0, nope_dim=256)
        yield base._replace(head_dim=512, latent_dim=512, rope_dim=0, nope_dim=256, heads=16)
        yield base._replace(dtype="float16")
        yield base._replace(dtype="float16", kv_dtype="fp8")
        yield base._replace(causal=False)
        yield base._replace(causal=False, kv_dtype="fp8")
    for topk in (512, 1000, 2048):
        yield SPARSE._replace(index_topk=topk, heads=16)
        yield SPARSE._replace(index_topk=topk, heads=128, kv_dtype="fp8")


def answers(version: str) -> list[list[Any]]:
    """Ask the engine that this process has booted."""
    flashinfer: Any = importlib.import_module("vllm.utils.flashinfer")
    if hasattr(flashinfer, "has_flashinfer_sm90_nope_mla"):
        # It looks at a signature, which a stand-in does not have: taken for granted where
        # FlashInfer is installed.
        flashinfer.has_flashinfer_sm90_nope_mla = flashinfer.has_flashinfer
        sm90: Any = importlib.import_module(
            "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
        )
        sm90.has_flashinfer_sm90_nope_mla = flashinfer.has_flashinfer
    with configure(), meta_mode():  # a backend's module makes a buffer on the GPU
        return [_answer(question) for question in questions(version)]


def _gemma4(q: Question) -> list[Any]:
    """Let the engine set its options for this model, then ask for each of its two kinds of
    layers."""
    current: Any = importlib.import_module("vllm.config").get_current_vllm_config()
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    kinds = ["sliding_attention", "full_attention"]
    layers = [types.SimpleNamespace(head_size=256), types.SimpleNamespace(head_size=q.head_dim)]
    _of_the_model(q)
    text = current.model_config.hf_text_config
    text.layer_types, text.head_dim, text.global_head_dim = kinds, 256, q.head_dim
    current.model_config.model_arch_config = _Architecture(layers)
    current.attention_config.backend = registry.AttentionBackendEnum[q.forced] if q.forced else None
    importlib.import_module(
        "vllm.model_executor.models.config"
    ).Gemma4Config.verify_and_update_config(current)
    backend, flash = current.attention_config.backend, current.attention_config.flash_attn_version
    current.attention_config.backend = None
    base = q._replace(forced=backend.name if backend else "", flash_attention=flash)
    sliding = _answer(base._replace(kind="sliding", head_dim=256))
    return [*sliding[:2], *_answer(base._replace(kind="full"))[:2]]


class _Architecture(list[Any]):
    @property
    def total_num_hidden_layers(self) -> int:
        return len(self)


def _answer(q: Question) -> list[Any]:
    if q.kind == "gemma4":
        return _gemma4(q)
    torch: Any = importlib.import_module("torch")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    dtype = getattr(torch, q.dtype)
    _of_the_model(q)
    if q.kind == "recurrent":
        # The mixer names it: layers/mamba/ has one property `mamba_type` for each kind.
        name = {"gdn": "GDN_ATTN", "kda": "GDN_ATTN", "mamba1": "MAMBA1", "mamba2": "MAMBA2"}[
            q.recurrent or ""
        ]
        return [registry.MambaAttentionBackendEnum[name].get_class().get_name(), None, None, None]
    if q.kind == "vision":
        backend_name = platform.get_vit_attn_backend(q.head_dim, dtype).name
        return [
            backend_name,
            _flash_version(head_size=q.head_dim) if backend_name == "FLASH_ATTN" else None,
            None,
            None,
        ]
    selector: Any = importlib.import_module("vllm.v1.attention.selector")
    configuration = fit(
        selector.AttentionSelectorConfig, head_size=q.head_dim, dtype=dtype,
        kv_cache_dtype=q.kv_dtype,
        block_size=q.block_size, use_mla=q.kind == "mla", has_sink=q.sinks, use_sparse=q.sparse,
        use_mm_prefix=q.multimodal_prefix, attn_type=q.role, has_sliding_window=q.kind == "sliding",
        use_non_causal=not q.causal,
    )  # fmt: skip
    forced_backend = registry.AttentionBackendEnum[q.forced] if q.forced else None
    valid: str | None = None
    rejection_text: str | None = None
    if forced_backend is None:
        backend_rows, bad = fit(
            platform.get_valid_backends,
            device_capability=platform.get_device_capability(),
            attn_selector_config=configuration,
            num_heads=q.heads if q.kind == "mla" else None,
        )
        backends = [
            row[0] if isinstance(row[0], registry.AttentionBackendEnum) else row.backend
            for row in backend_rows
        ]
        valid = " ".join(backend.name for backend in backends)
        rejection_text = ", ".join(
            f"{backend.name}: {_code(reasons)}" for backend, (_, reasons) in bad.items()
        )
    try:
        path = platform.get_attn_backend_cls(
            forced_backend,
            attn_selector_config=configuration,
            num_heads=q.heads if q.kind == "mla" else None,
        )
    except ValueError as error:
        if "No valid attention backend found" in str(error) or "is not valid for" in str(error):
            return [None, None, valid, rejection_text]
        raise
    module, _, name = path.rpartition(".")
    backend_name = getattr(importlib.import_module(module), name).get_name()
    return [backend_name, _version_of(backend_name, q), valid, rejection_text]


def _version_of(backend: str, q: Question) -> int | None:
    """As the layer asks when it is built (FlashAttentionImpl.__init__)."""
    if backend not in ("FLASH_ATTN", "TRITON_FLASH_ATTN"):
        return None
    module: Any = importlib.import_module("vllm.v1.attention.backends.flash_attn")
    if not hasattr(module, "uses_fa4_hd256_kernel"):
        return _flash_version(head_size=q.head_dim)
    return _flash_version(
        head_size=q.head_dim, has_sinks=q.sinks, requires_softcap=q.softcap, supports_fa4_hd256=True
    )


def _flash_version(**arguments: Any) -> int | None:
    utils: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    version: int | None = fit(utils.get_flash_attn_version, **arguments)
    return version


def _code(reasons: list[str]) -> str:
    codes = []
    for reason in reasons:
        missing = reason.startswith(("ImportError", "ModuleNotFoundError"))
        codes.append("package" if missing else CODES.get(reason, "other"))
    return " ".join(sorted(set(codes)))


def _of_the_model(q: Question) -> None:
    """Give the current config the model's fields that selection reads beside the selector's own
    arguments."""
    current: Any = importlib.import_module("vllm.config").get_current_vllm_config()
    model: Any = current.model_config
    text = types.SimpleNamespace(
        model_type="llama", qk_nope_head_dim=q.nope_dim, qk_rope_head_dim=q.rope_dim,
        v_head_dim=q.value_dim,
        kv_lora_rank=q.latent_dim, attn_logit_softcapping=50.0 if q.softcap else None,
    )  # fmt: skip
    if q.index_topk is not None:
        text.index_topk = q.index_topk
    model.hf_config = model.hf_text_config = text
    model.is_mm_prefix_lm = q.multimodal_prefix
    model.is_hybrid = False
    model.use_mla = q.kind == "mla"
    model.get_head_size = lambda: q.head_dim
    model.get_num_attention_heads = lambda *_: q.heads
    model.get_num_kv_heads = lambda *_: q.kv_heads
    current.cache_config.cache_dtype = q.kv_dtype
    current.attention_config.flash_attn_version = q.flash_attention
