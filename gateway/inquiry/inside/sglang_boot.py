"""Boots one SGLang version's Python sources for one imaginary NVIDIA GPU.

What the official image has installed is an assumption of the lists below.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from . import stubs

GIB = 1 << 30
IMAGE_HAS = {"triton", "flashinfer", "flashinfer_cubin", "sgl_kernel", "deep_gemm", "cutlass", "quack", "tilelang", "tvm_ffi"}
IMAGE_HAS |= {
    "cuda",
    "cudnn",
    "humming",
    "triton_kernels",
    "torch_memory_saver",
    "torchao",
    "flash_attn",
    "flash_attn_4",
    "kernels",
    "nvidia",
}
IMAGE_LACKS = {
    "vllm",
    "aiter",
    "torch_npu",
    "petit_kernel",
    "deep_ep",
    "mooncake",
    "nixl",
    "mlx",
    "sgl_kernel_npu",
    "torch_musa",
}
IMAGE_LACKS |= {"torchada", "intel_extension_for_pytorch", "mori", "conch", "amdsmi", "quark", "sglang_plugins"}
# Dependencies that the questions never reach.
UNASKED = {
    *("aiohttp", "fastapi", "starlette", "openai", "anthropic", "prometheus_client", "opentelemetry", "cv2", "tiktoken"),
    *("sentencepiece", "mistral_common", "llguidance", "xgrammar", "outlines", "interegular", "lark", "watchfiles", "gguf"),
    *("uvicorn", "uvloop", "openai_harmony", "partial_json_parser", "runai_model_streamer", "numba", "ray", "torchaudio"),
    *("torchvision", "soundfile", "orjson", "setproctitle", "timm", "decord", "decord2", "scipy", "IPython", "hf_transfer"),
    *("modelscope", "pybase64", "av", "torchcodec", "smg_grpc_proto", "smg_grpc_servicer", "sglang_router", "datasets"),
    *("zstandard", "easydict", "addict", "imageio", "diffusers", "nvtx", "py_spy", "build", "nltk", "blobfile", "multipart"),
    *("deepseek_recipe", "distro", "checkpoint_engine", "sentence_transformers", "oss_harmony", "grpc", "peft"),
}
OPS = {"sgl_kernel", "_C", "vllm"}


def boot(
    sources: str, capability: tuple[int, int], *, memory_bytes: int = 24 * GIB, count: int = 8, cuda: str = "13.0"
) -> None:
    """Make `import sglang` mean these sources on `count` GPUs of this capability. Once per process."""
    os.environ.update(SGLANG_IS_FLASHINFER_AVAILABLE="true", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    sys.path.insert(0, sources)
    stubs.install(IMAGE_HAS | UNASKED, set(IMAGE_LACKS))
    stubs.fake_cuda(capability, memory_bytes, count, cuda)
    stubs.fake_ops(OPS, {})
    # Older transformers have AutoImageProcessor only where torchvision is; SGLang registers classes with it, whatever the model.
    dummy: Any = importlib.import_module("transformers.utils.import_utils").DummyObject
    dummy.__getattribute__ = lambda cls, name: type.__getattribute__(cls, name) if name[0] == "_" else stubs.Anything(name)
    importlib.import_module("sglang.srt.utils")
    logging.disable(logging.WARNING)
