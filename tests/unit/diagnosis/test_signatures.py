"""Errors of libraries beneath the engines: the names and texts of whole tables, each with the kinds
that it means."""

from pathlib import Path

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures

# Texts of cudaError_t and CUresult (driver_types.h, cuda.h and cudaGetErrorString of CUDA 12.9), by
# their meaning: runtime's name, driver's name, text.
CUDA = {
    "gpu_oom": ["MemoryAllocation OUT_OF_MEMORY out of memory"],
    "driver_too_old": [
        "InsufficientDriver - CUDA driver version is insufficient for CUDA runtime version",
        "CallRequiresNewerDriver - API call is not supported in the installed CUDA driver",
        (
            "UnsupportedPtxVersion UNSUPPORTED_PTX_VERSION the provided PTX was compiled with an"
            " unsupported toolchain."
        ),
        (
            "SystemDriverMismatch SYSTEM_DRIVER_MISMATCH system has unsupported display driver /"
            " cuda driver combination"
        ),
        (
            "CompatNotSupportedOnDevice COMPAT_NOT_SUPPORTED_ON_DEVICE forward compatibility was"
            " attempted on non supported HW"
        ),
    ],
    "no_device": [
        "InitializationError NOT_INITIALIZED initialization error",
        "StubLibrary STUB_LIBRARY CUDA driver is a stub library",
        "NoDevice NO_DEVICE no CUDA-capable device is detected",
        "InvalidDevice INVALID_DEVICE invalid device ordinal",
        "DeviceNotLicensed DEVICE_NOT_LICENSED device doesn't have valid Grid license",
        "SystemNotReady SYSTEM_NOT_READY system not yet initialized",
    ],
    "gpu_shared": [
        "DevicesUnavailable DEVICE_UNAVAILABLE CUDA-capable device(s) is/are busy or unavailable",
        (
            "DeviceAlreadyInUse CONTEXT_ALREADY_IN_USE exclusive-thread device already in use by a"
            " different thread"
        ),
        (
            "MpsConnectionFailed MPS_CONNECTION_FAILED MPS client failed to connect to the MPS"
            " control daemon or the MPS server"
        ),
        (
            "MpsRpcFailure MPS_RPC_FAILURE the remote procedural call between the MPS server and"
            " the MPS client failed"
        ),
        (
            "MpsServerNotReady MPS_SERVER_NOT_READY MPS server is not ready to accept new MPS"
            " client requests"
        ),
        (
            "MpsMaxClientsReached MPS_MAX_CLIENTS_REACHED the hardware resources required to create"
            " MPS client have been exhausted"
        ),
        (
            "MpsClientTerminated MPS_CLIENT_TERMINATED the MPS client has been terminated by the"
            " server"
        ),
    ],
    "no_kernel_image": [
        "InvalidDeviceFunction - invalid device function",
        "InvalidKernelImage INVALID_IMAGE device kernel image is invalid",
        (
            "NoKernelImageForDevice NO_BINARY_FOR_GPU no kernel image is available for execution on"
            " the device"
        ),
        "InvalidPtx INVALID_PTX a PTX JIT compilation failed",
        "JitCompilationDisabled JIT_COMPILATION_DISABLED PTX JIT compilation was disabled",
        "InvalidSource INVALID_SOURCE device kernel image is invalid",
    ],
    "toolchain": ["JitCompilerNotFound JIT_COMPILER_NOT_FOUND PTX JIT compiler library not found"],
    "gpu_lost": [
        "ECCUncorrectable ECC_UNCORRECTABLE uncorrectable ECC error encountered",
        (
            "NvlinkUncorrectable NVLINK_UNCORRECTABLE uncorrectable NVLink error detected during"
            " the execution"
        ),
        "Contained CONTAINED Invalid access of peer GPU memory over nvlink or a hardware error",
        "HardwareStackError HARDWARE_STACK_ERROR hardware stack error",
        "Unknown UNKNOWN unknown error",
    ],
    "nccl": [
        (
            "PeerAccessUnsupported PEER_ACCESS_UNSUPPORTED peer access is not supported between"
            " these two devices"
        ),
        "PeerAccessAlreadyEnabled PEER_ACCESS_ALREADY_ENABLED peer access is already enabled",
        "PeerAccessNotEnabled PEER_ACCESS_NOT_ENABLED peer access has not been enabled",
        "TooManyPeers TOO_MANY_PEERS peer mapping resources exhausted",
    ],
    "kernel_runtime": [
        "InvalidValue INVALID_VALUE invalid argument",
        "InvalidConfiguration - invalid configuration argument",
        "InvalidSymbol - invalid device symbol",
        "InvalidDevicePointer - invalid device pointer",
        "DeviceUninitialized INVALID_CONTEXT invalid device context",
        "AlreadyMapped ALREADY_MAPPED resource already mapped",
        "UnsupportedLimit UNSUPPORTED_LIMIT limit is not supported on this architecture",
        "InvalidResourceHandle INVALID_HANDLE invalid resource handle",
        "IllegalState ILLEGAL_STATE the operation cannot be performed in the present state",
        "SymbolNotFound NOT_FOUND named symbol not found",
        "IllegalAddress ILLEGAL_ADDRESS an illegal memory access was encountered",
        "LaunchOutOfResources LAUNCH_OUT_OF_RESOURCES too many resources requested for launch",
        "LaunchTimeout LAUNCH_TIMEOUT the launch timed out and was terminated",
        "Assert ASSERT device-side assert triggered",
        (
            "HostMemoryAlreadyRegistered HOST_MEMORY_ALREADY_REGISTERED part or all of the"
            " requested memory range is already mapped"
        ),
        "IllegalInstruction ILLEGAL_INSTRUCTION an illegal instruction was encountered",
        "MisalignedAddress MISALIGNED_ADDRESS misaligned address",
        "InvalidPc INVALID_PC invalid program counter",
        "LaunchFailure LAUNCH_FAILED unspecified launch failure",
        (
            "CooperativeLaunchTooLarge COOPERATIVE_LAUNCH_TOO_LARGE too many blocks in cooperative"
            " launch"
        ),
        "NotSupported NOT_SUPPORTED operation not supported",
        (
            "CdpNotSupported CDP_NOT_SUPPORTED is using CUDA Dynamic Parallelism, but the current"
            " configuration, like MPS, does not support it"
        ),
        (
            "StreamCaptureUnsupported STREAM_CAPTURE_UNSUPPORTED operation not permitted when"
            " stream is capturing"
        ),
        (
            "StreamCaptureInvalidated STREAM_CAPTURE_INVALIDATED operation failed due to a previous"
            " error during capture"
        ),
        (
            "GraphExecUpdateFailure GRAPH_EXEC_UPDATE_FAILURE the graph update was not performed"
            " because it included changes which violated constraints"
        ),
        (
            "InvalidClusterSize INVALID_CLUSTER_SIZE a kernel launch error has occurred due to"
            " cluster misconfiguration"
        ),
    ],
}
ERRORS = [(kind, *line.split(" ", 2)) for kind, several in CUDA.items() for line in several]


def read(*lines: str) -> Failure:
    return diagnose(["\n".join(lines).encode()], SIGNATURES)[0]


@pytest.mark.parametrize(
    ("kind", "runtime", "driver", "text"), ERRORS, ids=lambda part: part if " " not in part else ""
)
def test_every_cuda_error_is_named_by_its_meaning_from_any_library(
    kind: str, runtime: str, driver: str, text: str
) -> None:
    lines = [
        f"RuntimeError: CUDA error: {text}",
        f"torch.AcceleratorError: CUDA error: {text}",
        f"RuntimeError: CUDA driver error: {text}",
        f"RuntimeError: Triton Error [CUDA]: {text}",
        f"RuntimeError: cudaMalloc failed with cudaError{runtime}",
        f"RuntimeError: CUDA runtime error (/deep_gemm/csrc/x.hpp:12): 7 ({text})",
    ]
    if driver != "-":
        lines += [
            f"CudaAPIError: [7] Call to cuLaunchKernel results in CUDA_ERROR_{driver}",
            f"RuntimeError: CUDA_ERROR_{driver}",
        ]
    assert {line: read(line).kind for line in lines} == dict.fromkeys(lines, kind)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling"
                " `cublasGemmEx(handle, opa)`"
            ),
            "kernel_runtime",
        ),
        (
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"
                " `cublasCreate(handle)`"
            ),
            "gpu_oom",
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART", "kernel_runtime"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "package"),
        (
            "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "gpu_oom",
        ),
        (
            "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER",
            "driver_too_old",
        ),
        ("RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR", "kernel_runtime"),
        ("RuntimeError: NVRTC error: NVRTC_ERROR_COMPILATION", "toolchain"),
        ("pynvml.NVMLError_GpuIsLost: GPU is lost", "gpu_lost"),
        ("pynvml.NVMLError_ResetRequired: GPU requires restart", "gpu_lost"),
        ("pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded", "no_device"),
        ("pynvml.NVMLError_InvalidArgument: Invalid Argument", "no_device"),
        ("pynvml.NVMLError_FunctionNotFound: Function Not Found", "driver_too_old"),
        ("pynvml.NVMLError_InUse: In Use", "gpu_shared"),
        ("pynvml.NVMLError_NotSupported: Not Supported", "platform"),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver_too_old"),
        ("Failed to initialize NVML: Driver Not Loaded", "no_device"),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "nccl"),
        (
            (
                "gpu01:1:2 [0] init.cc:880 NCCL WARN Duplicate GPU detected : rank 1 and rank 0"
                " both on CUDA device 1000"
            ),
            "nccl",
        ),
    ],
)
def test_states_of_nvidias_libraries_are_named(line: str, kind: str) -> None:
    assert read(line).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            (
                "[Mon Nov 23 18:29:55 2026] NVRM: Xid (PCI:0000:06:00): 79, pid=12, GPU has fallen"
                " off the bus."
            ),
            "gpu_lost",
        ),
        (
            (
                "Nov 22 18:29:55 node1 kernel: [ 966.5] NVRM: Xid (PCI:0000:06:00): 94, pid=12,"
                " Contained: SM (0x1)."
            ),
            "gpu_lost",
        ),
        (
            "NVRM: Xid (PCI:0000:06:00): 31, pid=12, name=python3, Ch 00000008, MMU Fault",
            "kernel_runtime",
        ),
        (
            "kernel: [  966.5] NVRM: Xid (0000:01:00): 13, Ch 0000000b, engmask 00000120",
            "kernel_runtime",
        ),
        (
            "NVRM: Xid (PCI:0000:06:00): 63, pid=12, Row Remapper: New row marked for remapping",
            "none",
        ),
        ("[   12.1] NVRM: GPU 0000:06:00.0: RmInitAdapter failed! (0x62:0x0:2015)", "gpu_lost"),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "gpu_lost",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up",
            "none",
        ),
        (
            (
                "NVRM: API mismatch: the client has the version 550.54, but NVRM: this kernel"
                " module has 535.1"
            ),
            "driver_too_old",
        ),
        (
            (
                "[12345.678] python3[4242]: segfault at 0 ip 00007f12 sp 00007ffd error 4 in"
                " libcuda.so.550.54[7f12+1]"
            ),
            "exited",
        ),
        (
            (
                "[12345.678] traps: python3[4242] general protection fault ip:7f12 sp:7ffd error:0"
                " in x.so"
            ),
            "exited",
        ),
        (
            "[12345.678] traps: python3[4242] trap invalid opcode ip:7f12 sp:7ffd error:0 in x.so",
            "platform",
        ),
        ("double free or corruption (!prev)", "exited"),
        ("free(): invalid pointer", "exited"),
        ("*** stack smashing detected ***: terminated", "exited"),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "platform"),
        ("libc.so.6: version `GLIBC_2.38' not found (required by /opt/vllm/_C.abi3.so)", "package"),
        (
            "OMP: Error #15: Initializing libiomp5.so, but found libomp.so already initialized.",
            "package",
        ),
        (
            "OSError: [WinError 1455] The paging file is too small for this operation to complete.",
            "host_oom",
        ),
        ("OSError: [WinError 126] The specified module could not be found.", "package"),
        ("PermissionError: [WinError 5] Access is denied: 'C:\\\\x'", "permission"),
        (
            "OSError: [WinError 10048] Only one usage of each socket address is normally permitted",
            "port_in_use",
        ),
        ("toomanyrequests: You have reached your unauthenticated pull rate limit.", "download"),
        (
            "docker: no matching manifest for linux/arm64/v8 in the manifest list entries.",
            "platform",
        ),
        (
            (
                "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi,"
                " available: 9Gi."
            ),
            "disk_full",
        ),
    ],
)
def test_messages_of_the_system_are_named(line: str, kind: str) -> None:
    assert read(line).kind == kind


PACKAGES = "/usr/local/lib/python3.12/dist-packages"
LOADING = ("INFO 11-22 03:04:05 [gpu_model_runner.py:9] Starting to load model x...",)
PROFILING = (*LOADING, "INFO 11-22 03:04:05 [gpu_model_runner.py:9] Model loading took 4 GiB")
TO_THE_MODEL = (
    "vllm/v1/worker/gpu_model_runner.py:_dummy_run",
    "vllm/model_executor/models/llama.py:forward",
)
TO_THE_LOADER = (
    "vllm/v1/worker/gpu_model_runner.py:load_model",
    "vllm/model_executor/model_loader/base_loader.py:load_model",
)


def through(frames: tuple[str, ...], error: str, before: tuple[str, ...] = ()) -> str:
    """The kind of a failure that went through these frames, `file:function`, the innermost last."""
    steps = (frame.split(":") for frame in frames)
    trace = [f'  File "{PACKAGES}/{file}", line 7, in {function}' for file, function in steps]
    return read(*before, "Traceback (most recent call last):", *trace, error).kind


@pytest.mark.parametrize(
    ("frame", "error", "kind"),
    [
        ("torch/fx/experimental/symbolic_shapes.py:hint_int", "AssertionError", "kernel_runtime"),
        (
            "torch/_subclasses/fake_tensor.py:f",
            "AssertionError: device must be `meta`",
            "kernel_runtime",
        ),
        (
            "triton_kernels/matmul.py:matmul",
            "AssertionError: scatter not supported in batched mode",
            "kernel_runtime",
        ),
        (
            "tvm_ffi/registry.py:_register",
            "ValueError: Cannot find object type index",
            "kernel_runtime",
        ),
        ("einops/einops.py:parse_shape", "RuntimeError: boom", "kernel_runtime"),
        ("numba/cuda/deviceufunc.py:f", "AssertionError: cannot add dim", "kernel_runtime"),
        ("deep_ep/buffer.py:__init__", "ValueError: boom", "nccl"),
        ("torch/distributed/device_mesh.py:f", "ValueError: boom", "nccl"),
        ("nixl_cu12/_api.py:query_memory", "ValueError: Backend 'x' not found", "nccl"),
        (
            "transformers/audio_utils.py:f",
            "ValueError: reference must be greater than zero",
            "multimodal",
        ),
        ("PIL/Image.py:open", "ValueError: boom", "multimodal"),
        (
            "mistral_common/protocol/instruct/request.py:f",
            "ValueError: must define the schema",
            "tokenizer",
        ),
        (
            "jinja2/runtime.py:__call__",
            "TypeError: macro x takes no keyword argument 'y'",
            "tokenizer",
        ),
        # No setting, no architecture: nobody knows their meaning for an engine.
        ("starlette/datastructures.py:__init__", "AssertionError: Cannot set both", "unknown"),
        (
            "ray/dag/compiled_dag_node.py:f",
            "ValueError: can only bind methods to an actor",
            "unknown",
        ),
    ],
)
def test_the_library_that_raised_it_tells_where_its_text_does_not(
    frame: str, error: str, kind: str
) -> None:
    assert through((*TO_THE_MODEL, frame), error, PROFILING) == kind


@pytest.mark.parametrize(
    ("frame", "error", "kind"),
    [
        (
            "compressed_tensors/compressors/pack_quantized/helpers.py:f",
            "ValueError: only num_bits in [1, 8]",
            None,
        ),
        ("bitsandbytes/functional.py:dequantize", "ValueError: blocksize must be positive", None),
        ("torchao/core/config.py:f", "ValueError: boom", None),
        ("transformers/quantizers/auto.py:f", "TypeError: boom", None),
        ("transformers/integrations/finegrained_fp8.py:f", "NotImplementedError: boom", None),
        (
            "fastsafetensors/copier/gds.py:submit_io",
            "RuntimeError: submit_io failed, err=5",
            "weights_corrupt",
        ),
        ("gguf/gguf_reader.py:__init__", "ValueError: boom", "weights_corrupt"),
        ("torch/serialization.py:load", "RuntimeError: boom", "weights_corrupt"),
    ],
)
def test_readers_of_weights_and_of_quantization_are_separated_while_they_load(
    frame: str, error: str, kind: str | None
) -> None:
    assert through((*TO_THE_LOADER, frame), error, LOADING) == (kind or "unsupported_quantization")


def test_a_folder_that_is_called_like_a_library_is_none() -> None:
    lines = [
        '  File "/home/me/torch/vllm/vllm/v1/worker/gpu_worker.py", line 7, in f',
        "RuntimeError: boom",
    ]
    assert read(*PROFILING, "Traceback (most recent call last):", *lines).kind == "unknown"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("AssertionError: Stride of last dimension must be 1", "kernel_runtime"),
        ("ValueError: hidden_states and router_weight must be 2D tensors", "kernel_runtime"),
        ("ValueError: EPLB requires tensor or data parallelism", "config_refused"),
        ("ValueError: max_num_frobs must be positive", "config_refused"),
    ],
)
def test_words_of_arrays_are_no_setting(line: str, kind: str) -> None:
    assert read(line).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("httpx.ConnectError: [Errno -2] Name or service not known", "download"),
        ("httpx.ReadTimeout: The read operation timed out", "download"),
        (
            (
                "requests.exceptions.ChunkedEncodingError: ('Connection broken: IncompleteRead(12"
                " bytes read)')"
            ),
            "download",
        ),
        (
            (
                "huggingface_hub.errors.FileMetadataError: Distant resource does not have a"
                " Content-Length."
            ),
            "download",
        ),
        (
            "torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped",
            "kernel_runtime",
        ),
        ("torch._dynamo.exc.FailOnRecompileLimitHit: boom", "kernel_runtime"),
        (
            "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode: boom",
            "kernel_runtime",
        ),
        ("torch._inductor.exc.CppCompileError: boom", "toolchain"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: boom", "nccl"),
        ("flashinfer.utils.GPUArchitectureError: boom", "no_backend"),
        ("cutlass.base_dsl.common.DSLRuntimeError: boom", "kernel_runtime"),
        ("soundfile.LibsndfileError: Error opening it: Format not recognised.", "multimodal"),
        ("jinja2.exceptions.TemplateRuntimeError: boom", "tokenizer"),
        ("ray.exceptions.OutOfDiskError: boom", "disk_full"),
        ("zmq.error.Again: Resource temporarily unavailable", "unknown"),
        (
            "lark.exceptions.UnexpectedCharacters: No terminal matches '}' in the current context",
            "unknown",
        ),
    ],
)
def test_an_exception_that_one_library_alone_has_is_named_by_it(line: str, kind: str) -> None:
    assert read(line).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            (
                "torch._inductor.exc.InductorError: RuntimeError: No valid triton configs."
                " OutOfMemoryError: out of resource: triton_mm Required: 131072 Hardware"
                " limit:101376 Reducing block sizes or `num_stages` may help."
            ),
            "kernel_runtime",
        ),
        (
            "OutOfResources: out of resource: tensor memory, Required: 1024, Hardware limit: 512.",
            "kernel_runtime",
        ),
        (
            '"hipErrorNoBinaryForGpu: Unable to find code object for all current devices!"',
            "no_kernel_image",
        ),
        ("Error invalid device function at line 508 in file /src/csrc/ops.cu", "no_kernel_image"),
        ("RuntimeError: 0 active drivers ([]). There should only be one.", "no_device"),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 304: OS call failed",
            "no_device",
        ),
        (
            (
                "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has"
                " unsupported"
            ),
            "driver_too_old",
        ),
        (
            "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f.",
            "kernel_runtime",
        ),
        ("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.shfl.sync.bfly.i32", "kernel_runtime"),
        (
            (
                "ERROR:    [Errno 99] error while attempting to bind on address ('10.1.2.3', 8000):"
                " cannot assign"
            ),
            "bad_flag",
        ),
        ("RuntimeError: Unable to find address for: eth9", "nccl"),
        ("Exception: expected `,` or `}` at line 1 column 5", "tokenizer"),
        (
            "RuntimeError: Configured CUDA binary not found at /x/libbitsandbytes_cuda128.so",
            "package",
        ),
    ],
)
def test_messages_of_libraries_are_named(line: str, kind: str) -> None:
    assert read(line).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("AssertionError: This line should be unreachable.", "engine_bug"),
        ("AssertionError: The block already has a hash. This should not happen.", "engine_bug"),
        ("NotImplementedError: Subclasses must implement frob()", "engine_bug"),
        ("ValueError: frobs cannot be had. Please file an issue.", "engine_bug"),
        (
            "ValueError: frobs are not supported by this backend. Please open an issue.",
            "config_refused",
        ),
        ("ValueError: --frob-buffer-len must be positive", "config_refused"),
    ],
)
def test_a_declared_fault_of_the_code_is_no_setting(line: str, kind: str) -> None:
    assert read(line).kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        # triton/language/semantic.py, triton_kernels/matmul_details/opt_flags.py,
        # starlette/datastructures.py, xformers/ops/fmha/ck.py
        ("ValueError: program_id axis must be 0, 1, or 2 but got 3", "unknown"),
        (
            "AssertionError: setting constraints is incompatible with manual flags override",
            "unknown",
        ),
        ('AssertionError: Cannot set both "scope" and "**components".', "unknown"),
        ("NotImplementedError: Invalid rng_state: 8", "unknown"),
        ("ValueError: frob must be one of 1 and 2", "unknown"),
        ("ValueError: frob_cache_mode must be one of 1 and 2", "config_refused"),
        (
            "NotImplementedError: Frobs with speculative decoding are not supported",
            "config_refused",
        ),
        ("ValueError: invalid literal for int() with base 10: 'GPU-3f'", "config_refused"),
    ],
)
def test_a_demand_in_a_single_line_is_a_setting_if_it_names_one(line: str, kind: str) -> None:
    assert read(line).kind == kind


def test_an_xid_is_read_out_of_a_log_as_the_table_of_xids_has_it() -> None:
    table = Profiles().xids.xids
    kinds = {
        number: read(f"NVRM: Xid (PCI:0000:06:00): {number}, pid=12, name=python3, boom").kind
        for number in table
    }
    fatal_xids = {number for number, xid in table.items() if xid.loses_gpu}
    # An error that a GPU contains ends the program, and is the GPU's fault all the same.
    assert {number for number, kind in kinds.items() if kind == "gpu_lost"} == fatal_xids | {94}
    faults = {number for number, xid in table.items() if xid.action == "RESTART_APP"}
    assert {number for number, kind in kinds.items() if kind == "kernel_runtime"} == faults | {43}


def test_a_folder_of_the_user_adds_rows_that_go_before_ours(tmp_path: Path) -> None:
    texts = tmp_path / "failures" / "texts"
    texts.mkdir(parents=True)
    (texts / "mine.yaml").write_text(
        "- {kind: my_driver, pattern: No available memory for the cache blocks, source: me}\n"
    )
    (tmp_path / "failures" / "remedies.yaml").write_text(
        "- {kind: my_driver, message: Mine., advice: Call me., steps: [Call me.]}\n"
        "- {kind: disk_full, message: Full., advice: Ask me., steps: [Ask me.]}\n"
    )
    signatures = Profiles(tmp_path).signatures
    lines = (b"ValueError: No available memory for the cache blocks.", b"OSError: [Errno 122]")
    failure_of_user, full = (diagnose([line], signatures)[0] for line in lines)
    assert (failure_of_user.kind, failure_of_user.message, failure_of_user.advice) == (
        "my_driver",
        "Mine.",
        "Call me.",
    )
    assert (full.kind, full.steps[-1]) == ("disk_full", "Ask me.")
