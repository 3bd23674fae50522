"""Command lines as FlashInfer, DeepGEMM, SGLang and PyTorch run their compilers."""

from __future__ import annotations

import pytest

from gateway.diagnosis.compilers import compiling

NINJA = (
    "ninja -v -C /d/flashinfer/.cache/flashinfer/0.6.9/90a -f"
    " /d/flashinfer/.cache/flashinfer/0.6.9/90a/cached_ops/sampling/build.ninja"
)
NVCC = (
    "/usr/local/cuda/bin/nvcc --generate-dependencies -DTORCH_EXTENSION_NAME=sampling -c"
    " /s/csrc/sampling.cu -o cached_ops/sampling/sampling.cuda.o"
)


@pytest.mark.parametrize(
    ("commands", "library"),
    [
        ((), ""),
        (
            (
                "/v/bin/python -m vllm.entrypoints.openai.api_server --model=/models/ninja",
                "VLLM::EngineCore",
                "gcc x.c",
            ),
            "",
        ),
        (
            ("VLLM::EngineCore", NINJA, NVCC, "cicc --c++17 --orig_src_file_name sampling.cu"),
            "compiling kernels: flashinfer sampling",
        ),
        (("/usr/local/cuda/bin/nvcc -c a.cu",), "compiling kernels"),
        (("ptxas -arch=sm_90a /tmp/x.ptx",), "compiling kernels"),
        (
            (
                (
                    "nvcc /d/vllm/deep_gemm/tmp/1-2-3/kernel.cu -o"
                    " /d/vllm/deep_gemm/cache/kernel.sm90_fp8_gemm_1d2d.0a1b/kernel.cubin"
                ),
            ),
            "compiling kernels: deep_gemm",
        ),
        (
            ("ninja -C /d/sglang/jit/sm_90a/gptq_marlin/build-1/",),
            "compiling kernels: sglang gptq_marlin",
        ),
        (
            ("nvcc -o /h/.cache/torch_extensions/py312_cu130/fused_moe/moe.o",),
            "compiling kernels: fused_moe",
        ),
        (
            tuple(
                NVCC.replace("cached_ops/sampling", f"cached_ops/op{number}") for number in range(5)
            ),
            "compiling kernels: flashinfer op0 and 4 others",
        ),
    ],
)
def test_the_compiled_library_is_named(commands: tuple[str, ...], library: str) -> None:
    words = compiling(commands)
    assert words.startswith(library) if library.endswith("deep_gemm") else words == library
