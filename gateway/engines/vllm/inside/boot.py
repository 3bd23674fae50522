"""Boots one vLLM version's Python sources for one imaginary NVIDIA GPU.

Stand-ins have every attribute: answers that name FlashInfer, Humming, DeepGEMM or B12X hold where
those packages work.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import types
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...inside import stubs

GIB = 1 << 30
# Optional packages that no version's wheel requires. The image may have more, such as packages that
# move experts between GPUs.
UNREQUIRED_MODULES = {
    "helion",
    "aiter",
    "deep_ep",
    "mori",
    "nixl_ep",
    "moonep",
    "arctic_inference",
    "pplx_kernels",
}
# Packages that selection looks for by name: "all" of these are installed, or "none", or those of
# the image.
OPTIONAL = {
    "flashinfer",
    "flashinfer_cubin",
    "humming",
    "deep_gemm",
    "vllm.third_party.deep_gemm",
    "conch",
    "b12x",
}
OPTIONAL |= {"fbgemm_gpu", "quark"}
EXTENSIONS = {
    *(
        f"vllm.{name}"
        for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "_flashmla_C")
    ),
    *(
        f"vllm.{name}"
        for name in (
            "_flashmla_extension_C",
            "_flashkda_C",
            "_deepselect_C",
            "cumem_allocator",
            "fs_io_C",
        )
    ),
    *(f"vllm.{name}" for name in ("spinloop", "_qutlass_C", "third_party.triton_kernels")),
    *(f"vllm.vllm_flash_attn._vllm_fa{version}_C" for version in (2, 3)),
    "triton_kernels",
}
# Dependencies that selection never asks.
UNASKED_MODULES = {
    "aiohttp",
    "fastapi",
    "starlette",
    "openai",
    "anthropic",
    "mcp",
    "opentelemetry",
    "prometheus_client",
    "cv2",
    "tiktoken",
    "sentencepiece",
    "mistral_common",
    "lm_format_enforcer",
    "llguidance",
    "outlines_core",
    "xgrammar",
    "lark",
    "depyf",
    "watchfiles",
    "gguf",
    "diskcache",
    "uvicorn",
    "uvloop",
    "openai_harmony",
    "partial_json_parser",
    "ijson",
    "model_hosting_container_standards",
    "runai_model_streamer",
    "numba",
    "ray",
    "prometheus_fastapi_instrumentator",
    "torchaudio",
    "torchvision",
    "soundfile",
    "oss_harmony",
    "pythonjsonlogger",
    "multidict",
    "orjson",
    "cbor2",
    "setproctitle",
    "jsonschema",
}
OPS = {
    "_C",
    "_moe_C",
    "_C_cache_ops",
    "_C_custom_ar",
    "_C_cuda_utils",
    "_flashmla_C",
    "_flashmla_extension_C",
}
OPS |= {"_vllm_fa2_C", "_vllm_fa3_C", "_qutlass_C", "_C_stable_libtorch", "_flashkda_C"}
# Host functions of the extension that selection asks: capability tables, for CUDA 12.8 and later.
# csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu, csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu
HOST = {
    "cutlass_scaled_mm_supports_fp8": lambda c: c >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda c: c >= 90,
    "cutlass_group_gemm_supported": lambda c: 90 <= c < 120,
    "cutlass_scaled_mm_supports_fp4": lambda c: 100 <= c < 130,
    "mxfp4_experts_quant_supported": lambda c: 100 <= c < 120,
}


# Requirements of a wheel -> modules that come with them and that selection looks for. The image is
# assumed to have FlashInfer's kernels (flashinfer_cubin).
BUNDLED_MODULES = {
    "torch": {"triton"},
    "flashinfer-python": {"flashinfer", "flashinfer_cubin", "tvm_ffi"},
    "apache-tvm-ffi": {"tvm_ffi"},
    "nvidia-cutlass-dsl": {"cutlass", "cuda"},
    "nvidia-cudnn-frontend": {"cudnn"},
    "quack-kernels": {"quack"},
    "tilelang": {"tilelang"},
    "tokenspeed-mla": {"tokenspeed_mla"},
    "humming-kernels": {"humming"},
}
# The wheel of flashinfer-python has b12x from this version on.
_B12X_SINCE = (0, 7, 2)


def required_packages(sources: str) -> set[str]:
    """Optional packages of an installation of these sources, by the wheel's requirements and
    content."""
    result = set()
    metadata = next(Path(sources).glob("vllm-*.dist-info/METADATA")).read_text()
    for name, version in re.findall(
        r"^Requires-Dist: ([\w.-]+)[^;\n]*?(?:==([\d.]+))?[^;\n]*(?:;(?! extra).*)?$",
        metadata,
        re.M,
    ):
        result |= BUNDLED_MODULES.get(name.lower(), set())
        if name == "flashinfer-python" and tuple(map(int, version.split(".")[:3])) >= _B12X_SINCE:
            result.add("b12x")
    if Path(sources, "vllm/third_party/deep_gemm/__init__.py").is_file():
        result.add("vllm.third_party.deep_gemm")
    return result


def boot(
    sources: str,
    capability: tuple[int, int],
    *,
    present_packages: Collection[str] | None = None,
    memory_bytes: int = 24 * GIB,
    count: int = 8,
    name: str = "GPU",
) -> None:
    """Make `import vllm` mean these sources on `count` GPUs of this capability. Once per process.

    present_packages: optional packages that are installed with it; None: those that it requires.
    """
    installed_packages = (
        required_packages(sources) if present_packages is None else {*present_packages}
    )
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_TARGET_DEVICE="cuda"
    )
    sys.path.insert(0, sources)
    stubs.install(
        installed_packages | EXTENSIONS | UNASKED_MODULES,
        UNREQUIRED_MODULES.union(OPTIONAL, *BUNDLED_MODULES.values()) - installed_packages,
    )
    stubs.fake_cuda(capability, memory_bytes, count, "13.0", name)
    stubs.fake_ops(OPS, HOST)
    imagine(capability, memory_bytes, count, name)


def imagine(capability: tuple[int, int], memory_bytes: int, count: int, name: str = "GPU") -> None:
    """`current_platform` is `count` GPUs of this capability from now on, also for modules that have
    it by name."""
    platforms: Any = importlib.import_module("vllm.platforms")
    # This module defines a platform that asks torch.cuda where NVML is missing.
    base: Any = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    device: Any = importlib.import_module("vllm.platforms.interface").DeviceCapability(*capability)
    answers = {
        "get_device_capability": device,
        "get_device_name": name,
        "get_device_total_memory": memory_bytes,
        "device_count": count,
        "is_fully_connected": False,
    }
    methods = {
        name: classmethod(lambda cls, *_, answer=answer, **__: answer)
        for name, answer in answers.items()
    }
    platform = platforms._current_platform = type("FakePlatform", (base,), methods)()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and "current_platform" in vars(
            module
        ):
            vars(module)["current_platform"] = platform
    logging.getLogger("vllm").setLevel(logging.ERROR)


def boot_installation(
    capability: tuple[int, int] | None,
    memory_bytes: int = 24 * GIB,
    count: int = 8,
    name: str = "GPU",
) -> None:
    """Make the vLLM that is installed here answer for `count` GPUs of this capability; None: for
    the machine as it is.

    Extensions that cannot be imported without a driver are stand-ins; every package is the one that
    is installed.
    """
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    if capability is None:
        importlib.import_module("vllm")  # without it nothing here is an answer
        return
    os.environ["VLLM_TARGET_DEVICE"] = "cuda"
    missing_names = {name for name in EXTENSIONS if not _imports(name)}
    if missing_names:
        stubs.stand_in(missing_names)
    stubs.fake_cuda(
        capability,
        memory_bytes,
        count,
        str(importlib.import_module("torch").version.cuda or "13.0"),
        name,
    )
    if "vllm._C" in missing_names and "vllm._C_stable_libtorch" in missing_names:
        stubs.fake_ops(OPS, HOST)
        stubs.fake_triton()
    imagine(capability, memory_bytes, count, name)


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # an extension fails to load in many ways
        _forget_package(name.rpartition(".")[0])
        return False
    return True


def _forget_package(name: str) -> None:
    """Modules of a package whose own import failed remember that the extension is missing."""
    if name not in sys.modules:
        for module in [
            module_name for module_name in sys.modules if module_name.startswith(f"{name}.")
        ]:
            del sys.modules[module]


def configure(dtype: str = "bfloat16", **overrides: Any) -> AbstractContextManager[Any]:
    """A current VllmConfig, with only the fields of a model that selection reads;
    `linear_backend="marlin"` sets a kernel option."""
    torch: Any = importlib.import_module("torch")
    config: Any = importlib.import_module("vllm.config")
    current_config = config.VllmConfig()
    model = types.SimpleNamespace(
        quantization_config=None, is_diffusion=False, is_mm_prefix_lm=False, rswa_window=None,
        use_mla=False, quantization=None, hf_config=types.SimpleNamespace(model_type="llama"),
        dtype=getattr(torch, dtype),
        hf_text_config=types.SimpleNamespace(
            model_type="llama", qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            kv_lora_rank=512, q_lora_rank=1536
        ),
    )  # fmt: skip
    object.__setattr__(current_config, "model_config", model)
    for name, value in overrides.items():
        setattr(current_config.kernel_config, name, value)
    manager: AbstractContextManager[Any] = config.set_current_vllm_config(current_config)
    return manager
