"""Boot of one SGLang version's Python sources for an imaginary NVIDIA GPU.

The lists below assume the packages of the official image.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from ...inside import stubs

GIB = 1 << 30
IMAGE_HAS = {
    "triton",
    "flashinfer",
    "flashinfer_cubin",
    "sgl_kernel",
    "deep_gemm",
    "cutlass",
    "quack",
    "tilelang",
    "tvm_ffi",
}
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
IMAGE_LACKS |= {
    "torchada",
    "intel_extension_for_pytorch",
    "mori",
    "conch",
    "amdsmi",
    "quark",
    "sglang_plugins",
}
# Dependencies that the questions never reach.
UNASKED_MODULES = {
    "aiohttp",
    "fastapi",
    "starlette",
    "openai",
    "anthropic",
    "prometheus_client",
    "opentelemetry",
    "cv2",
    "tiktoken",
    "sentencepiece",
    "mistral_common",
    "llguidance",
    "xgrammar",
    "outlines",
    "interegular",
    "lark",
    "watchfiles",
    "gguf",
    "uvicorn",
    "uvloop",
    "openai_harmony",
    "partial_json_parser",
    "runai_model_streamer",
    "numba",
    "ray",
    "torchaudio",
    "torchvision",
    "soundfile",
    "orjson",
    "setproctitle",
    "timm",
    "decord",
    "decord2",
    "scipy",
    "IPython",
    "hf_transfer",
    "modelscope",
    "pybase64",
    "av",
    "torchcodec",
    "smg_grpc_proto",
    "smg_grpc_servicer",
    "sglang_router",
    "datasets",
    "zstandard",
    "easydict",
    "addict",
    "imageio",
    "diffusers",
    "nvtx",
    "py_spy",
    "build",
    "nltk",
    "blobfile",
    "multipart",
    "deepseek_recipe",
    "distro",
    "checkpoint_engine",
    "sentence_transformers",
    "oss_harmony",
    "grpc",
    "peft",
}
OPS = {"sgl_kernel", "_C", "vllm"}
# Names imported from a package that may have parts missing.
PARTS = {"cutlass": "cutlass.cute", "cuda": "cuda.bindings.driver"}


def boot(
    sources: str,
    capability: tuple[int, int],
    *,
    memory_bytes: int = 24 * GIB,
    count: int = 8,
    cuda: str = "13.0",
    name: str = "GPU",
) -> None:
    """Make `import sglang` mean these sources on `count` GPUs of this capability. Once per
    process."""
    os.environ.update(
        SGLANG_IS_FLASHINFER_AVAILABLE="true", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
    )
    sys.path.insert(0, sources)
    stubs.install(IMAGE_HAS | UNASKED_MODULES, set(IMAGE_LACKS))
    stubs.fake_cuda(capability, memory_bytes, count, cuda, name)
    stubs.fake_ops(OPS, {})
    _ready(memory_bytes)
    common_module: Any = importlib.import_module("sglang.srt.utils.common")
    # Versions 0.5.13 to 0.5.15 look whether Triton made the kernel. Here the kernel is a stand-in.
    common_module.CachedKernel = lambda function, _: function


def boot_installation(
    capability: tuple[int, int] | None,
    memory_bytes: int = 24 * GIB,
    count: int = 8,
    name: str = "GPU",
) -> None:
    """Make the installed SGLang answer for `count` GPUs of this capability; None: for the machine
    as it is.

    An installed module that cannot be imported without a driver is a stand-in; every other package
    is the real one.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if capability is None:
        importlib.import_module("sglang")  # without it nothing here is an answer
        return
    missing_modules = {name for name in IMAGE_HAS if _fails(name)}
    if missing_modules:
        stubs.stand_in(missing_modules)
    stubs.fake_cuda(
        capability,
        memory_bytes,
        count,
        str(importlib.import_module("torch").version.cuda or "13.0"),
        name,
    )
    stubs.fake_ops(OPS, {})
    stubs.fake_triton()
    _ready(memory_bytes)


def _fails(name: str) -> bool:
    """Whether a package is installed that cannot be imported."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(PARTS.get(name, name))
    except Exception:  # an extension fails to load in many ways
        return True
    return False


def _ready(memory_bytes: int) -> None:
    """Values that SGLang reads at import, once its GPUs are stated."""
    # Older transformers have AutoImageProcessor only with torchvision; SGLang registers classes
    # with it for every model.
    dummy: Any = importlib.import_module("transformers.utils.import_utils").DummyObject
    dummy.__getattribute__ = lambda cls, name: (
        type.__getattribute__(cls, name) if name[0] == "_" else stubs.Anything(name)
    )
    importlib.import_module("sglang.srt.utils")
    logging.disable(logging.WARNING)
    state_memory(memory_bytes / (1 << 20))


def state_memory(mib: float) -> None:
    """GPU memory as `nvidia-smi` would print it, from now on."""
    common_module: Any = importlib.import_module("sglang.srt.utils.common")
    common_module.get_nvgpu_memory_capacity = lambda: float(mib)
