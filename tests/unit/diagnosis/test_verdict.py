"""The verdict over the evidence of a log: which of several proofs is the cause."""

from __future__ import annotations

import pytest

from gateway.diagnosis.candidate import (
    CAUSE,
    CONSEQUENCE,
    DEATH,
    HARDWARE,
    MAX_FAILED_REQUESTS,
    SYMPTOM,
    UNKNOWN,
    FailureCandidate,
)
from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.signature import TextSignature
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
HEAD = "(EngineCore pid=7) ERROR 03-14 10:22:05 [core.py:1330] "
SERVING = (
    "(APIServer pid=1) INFO:     Application startup complete.",
    '(APIServer pid=1) INFO:     192.0.2.7:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
)
LOST = "kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=7, name=python3, GPU has fallen off the bus."
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CHANNEL = "ray.exceptions.RayChannelTimeoutError: System error: Timed out waiting for object"
ACTOR = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
WAKE = "RuntimeError: CUDA Error: out of memory at /src/csrc/cumem_allocator.cpp:163"
HARMLESS = '(APIServer pid=1) INFO:     192.0.2.7:4242 - "GET /metrics HTTP/1.1" 200 OK'


def traceback_lines(error: str, function: str = "run", head: str = HEAD) -> tuple[str, ...]:
    """The lines of an exception that a function of a worker raised."""
    frame = f'  File "/x/site-packages/vllm/v1/worker/gpu_worker.py", line 7, in {function}'
    return tuple(head + line for line in ("Traceback (most recent call last):", frame, error))


def read(*lines: str) -> Failure:
    return diagnose(["\n".join(lines).encode()], SIGNATURES, "vllm")[0]


def test_evidence_is_ranked_from_a_broken_device_to_a_death() -> None:
    def rank(kind: str, **fields: bool | str) -> int:
        row = TextSignature.model_validate({"kind": kind, "pattern": "frob", **fields})
        return FailureCandidate(row, {}, "", 1, "load").rank

    ranks = [
        rank("gpu_lost"),
        rank("gpu_oom"),
        rank("kernel_runtime", symptom=True),
        rank("nccl", consequence=True),
        FailureCandidate(None, {}, "", 1, "load").rank,
        rank("killed", consequence=True, proves="nothing"),
    ]
    assert ranks == sorted(ranks) == [HARDWARE, CAUSE, SYMPTOM, CONSEQUENCE, UNKNOWN, DEATH]
    # CUDA's "unknown error" is of kind gpu_lost, and can have any cause.
    assert rank("gpu_lost", symptom=True) == SYMPTOM


@pytest.mark.parametrize(
    "error", [ILLEGAL, MEMORY, "RuntimeError: NCCL error: unhandled cuda error"]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_broken_gpu_explains_every_error_beside_it(error: str, *, is_first: bool) -> None:
    lines = (LOST, *traceback_lines(error)) if is_first else (*traceback_lines(error), LOST)
    assert read(*lines).kind == "gpu_lost"


@pytest.mark.parametrize(
    "line",
    [
        "[88.1] NVRM: Xid (PCI:0000:41:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2 0x8)",
        "NVRM: Xid (PCI:0000:41:00): 45, pid=7, name=python3, Ch 01 caused by previous Xid 149",
        "host:88:131 [2] enqueue.cc:1520 NCCL WARN Cuda failure 214 'uncorrectable ECC error"
        " encountered'",
        "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error",
        "amdgpu 0000:dd:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
        "I1007 11:13:04.117318  1 health.go:172] XidCriticalError: Xid=48 on Device=GPU-0a1b; x",
    ],
)
def test_a_broken_device_is_known_in_the_words_of_each_program(line: str) -> None:
    died = (
        HEAD + "EngineCore encountered a fatal error.",
        *traceback_lines(ILLEGAL, "execute_model"),
    )
    assert read(*SERVING, *died, line).kind == "gpu_lost"


@pytest.mark.parametrize("number", [13, 31, 43])
def test_an_xid_of_the_program_is_no_broken_device(number: int) -> None:
    xid = f"NVRM: Xid (PCI:0000:41:00): {number}, pid=7, name=python3, boom"
    assert read(*traceback_lines(ILLEGAL), xid).kind == "kernel_runtime"


def test_a_link_that_recovers_does_not_end_an_engine_that_serves() -> None:
    link = "NVRM: Xid (PCI:0000:41:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x8)"
    assert read(*SERVING, link, *SERVING[1:]).kind == "none"
    assert read(*traceback_lines(ILLEGAL), link).kind == "gpu_lost"


def test_a_cause_near_a_symptom_is_preferred_and_not_that_of_a_later_start() -> None:
    assert read(*traceback_lines(ILLEGAL), *traceback_lines(MEMORY)).kind == "gpu_oom"
    between = [HARMLESS] * 300
    assert (
        read(*traceback_lines(ILLEGAL), *between, *traceback_lines(MEMORY)).kind == "kernel_runtime"
    )


def test_a_gpu_that_a_failed_rank_still_holds_is_no_cause() -> None:
    busy = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert read(*traceback_lines(ILLEGAL), *traceback_lines(busy)).kind == "kernel_runtime"
    assert read(*traceback_lines(busy), *traceback_lines(ILLEGAL)).kind == "gpu_shared"


def test_a_flood_of_symptoms_leaves_room_for_the_cause() -> None:
    floods = [
        line
        for rank in range(100)
        for line in traceback_lines(
            ILLEGAL, head=f"(Worker_TP{rank} pid={rank}) ERROR 03-14 10:22:05 [w.py:1] "
        )
    ]
    assert read(*floods, LOST).kind == "gpu_lost"


def test_a_flood_of_proofs_is_compared_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 0
    rank_of = vars(FailureCandidate)["rank"].fget

    def counted_rank(candidate: FailureCandidate) -> int:
        nonlocal count
        count += 1
        return int(rank_of(candidate))

    monkeypatch.setattr(FailureCandidate, "rank", property(counted_rank))
    names = ("alpha", "beta", "gamma", "delta", "theta", "kappa", "omega", "sigma", "lambda", "rho")
    words = [f"{a}-{b}-{c}" for a in names for b in names for c in names]
    lines = [
        line
        for word in words
        for line in traceback_lines(f"{ILLEGAL} {word}", head=f"({word} pid=7) ")
    ]
    read(*lines)
    assert count < 10 * len(words)


@pytest.mark.parametrize("consequence", [CHANNEL, ACTOR])
@pytest.mark.parametrize("is_first", [True, False])
def test_errors_of_ray_follow_from_the_rank_that_failed(
    consequence: str, *, is_first: bool
) -> None:
    rank = traceback_lines(MEMORY, head="(RayWorkerWrapper pid=9, ip=192.0.2.9) ")
    core = traceback_lines(consequence)
    assert read(*((*core, *rank) if is_first else (*rank, *core))).kind == "gpu_oom"


def test_errors_of_ray_are_the_failure_where_nothing_else_is() -> None:
    assert [read(*traceback_lines(error)).kind for error in (CHANNEL, ACTOR)] == ["hang", "killed"]


def test_a_failed_wake_up_is_named_while_the_engine_serves_on() -> None:
    failure = read(*SERVING, *traceback_lines(WAKE, "wake_up"), HARMLESS, *SERVING[1:])
    assert (failure.kind, failure.phase) == ("gpu_oom", "waking")
    assert "A call to wake up failed so, and the engine serves on." in failure.message
    assert "while the engine slept" in failure.steps[0]


@pytest.mark.parametrize(("quiet_lines", "kind"), [(3, "gpu_oom"), (600, "kernel_runtime")])
def test_a_failed_wake_up_is_the_cause_of_the_symptom_that_follows(
    quiet_lines: int, kind: str
) -> None:
    died = (
        HEAD + "EngineCore encountered a fatal error.",
        *traceback_lines(ILLEGAL, "execute_model"),
    )
    lines = (*SERVING, *traceback_lines(WAKE, "wake_up"), *[HARMLESS] * quiet_lines, *died)
    assert read(*lines).kind == kind


def record(text: str) -> str:
    """A record of information."""
    return f"(EngineCore pid=7) INFO 03-14 10:22:05 [frob.py:42] {text}"


START_TIMEOUT = (
    f"{HEAD}TimeoutError: Timed out waiting for engines to send initial message on input socket."
)
DEAD_THREAD = (
    "Exception in thread kv_listener:",
    "Traceback (most recent call last):",
    '  File "/x/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/nixl/worker.py", line 7,'
    " in _handshake_listener",
    "zmq.error.ZMQError: Address already in use (addr='tcp://192.0.2.7:4242')",
)


def test_a_dead_thread_explains_the_timeout_of_its_start() -> None:
    sized = record("GPU KV cache size: 4,242 tokens")
    failure = read(*DEAD_THREAD, sized, START_TIMEOUT)
    assert (failure.kind, failure.line_number) == ("port_in_use", 4)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in failure.steps[0]
    assert read(sized, START_TIMEOUT).kind == "start_timeout"
    assert read(sized, START_TIMEOUT, *DEAD_THREAD).kind == "start_timeout"


NINJA = (
    "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/c/frob']' returned non-zero"
    " exit status 1."
)
GCC = (
    "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc',"
    " '/tmp/frob.c', '-O3']' returned non-zero exit status 1."
)
HEADER = "(EngineCore pid=7) /tmp/frob.c:3:10: fatal error: Python.h: No such file or directory"
NCCL_ERROR = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"
NCCL_WARNING = (
    "node-1:42:77 [0] misc/ibvwrap.cc:42 NCCL WARN Call to ibv_reg_mr failed with error Cannot"
    " allocate memory"
)


@pytest.mark.parametrize(
    ("lines", "kind", "number", "culprit"),
    [
        ((HEADER, *traceback_lines(GCC)), "toolchain", 1, {"header": "Python.h"}),
        (
            (*traceback_lines(NINJA), f"{HEAD}/bin/sh: 1: /opt/cuda/bin/nvcc: not found"),
            "toolchain",
            4,
            {"tool": "nvcc"},
        ),
        (
            (*traceback_lines(NINJA), f"{HEAD}/bin/sh: 1: /a:/opt/cuda/bin/nvcc: not found"),
            "toolchain",
            4,
            {"tool": "nvcc", "folders": "/a:/opt/cuda"},
        ),
        (
            (NCCL_WARNING, *traceback_lines("cupy.NcclError: NCCL_ERROR_SYSTEM_ERROR: unhandled")),
            "nccl",
            1,
            {"call": "ibv_reg_mr", "problem": "Cannot allocate memory"},
        ),
    ],
)
def test_the_line_that_names_a_tool_file_or_call_is_the_proof(
    lines: tuple[str, ...], kind: str, number: int, culprit: dict[str, str]
) -> None:
    failure = read(*lines)
    assert (failure.kind, failure.line_number, failure.culprit) == (kind, number, culprit)


def test_a_line_of_an_earlier_episode_is_not_the_proof() -> None:
    progress = [record(f"Loading weights took {number} seconds") for number in range(250)]
    assert read(HEADER, *progress, *traceback_lines(GCC)).line_number == 254


PLACEMENT = (
    f"{HEAD}EngineCore failed to start.",
    *traceback_lines("ValueError: Cannot provide a placement group within 42 seconds."),
)
UNPLACED = (
    "(autoscaler +42s) Error: No available node types can fulfill resource request {'GPU': 1.0,"
    " 'node:192.0.2.7': 0.001}."
)


def test_a_known_text_outweighs_a_vague_structure_and_names_both_addresses() -> None:
    joined = record("Connecting to existing Ray cluster at address: 198.51.100.4:6379...")
    failure = read(joined, UNPLACED, *PLACEMENT)
    assert (failure.kind, failure.line_number) == ("illegal_parallelism", 2)
    assert "192.0.2.7" in failure.message
    assert "198.51.100.4" in failure.message
    assert "VLLM_HOST_IP" in failure.steps[0]
    assert read(joined, *PLACEMENT).line_number == 5


CONNECTING = record(
    "world_size=4 rank=1 local_rank=1 distributed_init_method=tcp://127.0.0.1:42 backend=nccl"
)
PROBE = "  Normal   Killing    4s   kubelet  Container frob failed startup probe, will be restarted"


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("[HAMI-core Msg(42:77:libvgpu.c:42)]: Initialized", "libvgpu"),
        ("LD_PRELOAD=/opt/frob/libfrob_cuda.so vllm serve frob", "libfrob_cuda"),
    ],
)
def test_a_library_before_the_driver_explains_ranks_that_stand_still(
    library: str, name: str
) -> None:
    failure = read(library, CONNECTING, PROBE)
    assert failure.kind == "hang"
    assert name in failure.message
    assert any(name in step for step in failure.steps[:2])
    assert any("CUDA_DISABLE_CONTROL" in step for step in failure.steps) is (name == "libvgpu")
    assert read(CONNECTING, PROBE).kind == "start_timeout"
    loading = record("Starting to load model frob")
    assert read(library, CONNECTING, loading, PROBE).kind == "start_timeout"


def request_error(error: str, place: str = "vllm/v1/engine/frob") -> tuple[str, ...]:
    """The lines of an error of a request."""
    head = "(APIServer pid=1) ERROR 03-14 10:22:05 [serving.py:42] "
    frames = (
        '  File "/x/site-packages/vllm/entrypoints/openai/chat_completion/serving.py", line 7, in'
        " create_chat_completion",
        f'  File "/x/site-packages/{place}.py", line 7, in _validate',
    )
    return tuple(head + line for line in ("Traceback (most recent call last):", *frames, error))


def test_a_request_that_an_option_of_the_start_refuses_is_a_failure() -> None:
    refusal = (
        "ValueError: An audio item has 4242 tokens, more than the cache. Please increase the cache"
        " by setting --limit-mm-per-prompt at startup."
    )
    failure = read(*SERVING, *request_error(refusal), HARMLESS)
    assert (failure.kind, failure.phase, failure.line_number) == ("config_refused", "serving", 6)
    assert "4242 tokens" in failure.message
    assert failure.steps[0].startswith("Set --limit-mm-per-prompt")
    wish = "ValueError: The prompt has 42 tokens, please use fewer."
    assert read(*SERVING, *request_error(wish), HARMLESS).kind == "none"


def transfer(request: str, side: str = "Prefill") -> str:
    """The report of a failed transfer."""
    return (
        f"[2026-03-14 10:22:05] {side} transfer failed for request rank=0 req.rid='{request}' with"
        " exception KVTransferError(bootstrap_room=42): Failed to send kv chunk"
    )


def test_failed_transfers_of_a_serving_engine_are_a_failure() -> None:
    failure = read(*SERVING, transfer("a"), transfer("a", "Decode"), transfer("b"), HARMLESS)
    assert (failure.kind, failure.phase) == ("nccl", "serving")
    assert "2 requests failed so" in failure.message
    assert "transferred between prefill and decode" in failure.message
    # A prompt in the log begins no record.
    prompt = transfer("a").partition("] ")[2]
    assert read(*SERVING, prompt, HARMLESS).kind == "none"


def test_a_transport_without_rdma_is_the_cause_of_failed_transfers() -> None:
    lines = (
        "[2026-03-14 10:22:05] server_args=ServerArgs(model_path='frob',"
        " disaggregation_mode='prefill')",
        "I0314 10:22:05.123456  42 tcp_transport.cpp:42] TcpTransport: listen on port 4242",
    )
    failure = diagnose(
        ["\n".join((*lines, *SERVING, transfer("a"))).encode()], SIGNATURES, "sglang"
    )[0]
    assert "TCP" in failure.message
    assert "RDMA" in failure.steps[0]


def answer(status: str, number: int = 42) -> str:
    return (
        f'(APIServer pid=1) INFO:     192.0.2.7:{number} - "POST /v1/completions HTTP/1.1" {status}'
    )


def test_lost_answers_of_a_serving_engine_are_told_without_a_cause() -> None:
    lines = [answer("500 Internal Server Error", number) for number in range(3)]
    failure = read(*SERVING, *lines, HARMLESS)
    assert (failure.kind, failure.phase) == ("unknown", "serving")
    assert failure.message.startswith("3 requests failed with status 500")
    assert failure.proven_subject == "nothing"
    assert "--log-error-stack" in failure.steps[1]
    # A client's own error, and the words of a user.
    assert read(*SERVING, answer("400 Bad Request"), HARMLESS).kind == "none"
    words = 'frob - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    assert read(*SERVING, words, HARMLESS).kind == "none"


def test_a_flood_of_lost_answers_is_counted_to_a_bound() -> None:
    lines = [answer("500 Internal Server Error", number) for number in range(MAX_FAILED_REQUESTS)]
    failure = read(*SERVING, *lines, *lines, HARMLESS)
    assert failure.message.startswith(f"At least {MAX_FAILED_REQUESTS} requests")


def uncaught_error(error: str, file: str) -> tuple[str, ...]:
    return (
        answer("500 Internal Server Error"),
        "(APIServer pid=1) ERROR:    Exception in ASGI application",
        *(
            f"(APIServer pid=1) {line}"
            for line in (
                "Traceback (most recent call last):",
                '  File "/x/site-packages/uvicorn/protocols/http/h11_impl.py", line 7, in run_asgi',
                '  File "/x/site-packages/vllm/entrypoints/chat_utils.py", line 7, in apply',
                f'  File "{file}", line 7, in render',
                error,
            )
        ),
    )


def test_an_uncaught_error_of_a_request_is_a_fault_of_the_server() -> None:
    error = "jinja2.exceptions.TemplateError: This frob takes one call at once!"
    lines = uncaught_error(error, "/x/site-packages/jinja2/environment.py")
    failure = read(*SERVING, *lines, *lines, HARMLESS)
    assert failure.kind == "tokenizer"
    assert "2 requests failed so" in failure.message
    # One request alone may be wrong itself.
    no_failure, reader = diagnose(["\n".join((*SERVING, *lines, HARMLESS)).encode()], SIGNATURES)
    assert no_failure.kind == "none"
    assert "a request failed with status 500" in no_failure.message
    assert reader.failed_requests == 1


def test_the_error_that_a_start_ignored_explains_a_death_without_a_cause() -> None:
    head = "(VllmWorker rank=0 pid=7) ERROR 03-14 10:22:05 [parallel_state.py:42] "
    error = (
        "Error ignored in is_frob: [/src/gloo/gloo/transport/tcp/unbound_buffer.cc:42] Timed out"
        " waiting 1800000ms for send operation to complete"
    )
    death = (
        "CRITICAL 03-14 10:22:05 [core_client.py:42] Got fatal signal from worker processes,"
        " shutting down. See stack trace above for root cause issue."
    )
    failure = read(head + error, death)
    assert failure.kind == "nccl"
    assert "GLOO_SOCKET_IFNAME" in failure.steps[0]
    assert read(death).kind == "unknown"
    # A named cause counts before it.
    assert read(head + error, *traceback_lines(MEMORY), death).kind == "gpu_oom"


def test_a_message_that_points_above_yields_to_the_error_there() -> None:
    head = "ERROR 03-14 10:22:05 [registry.py:42] "
    frames = (
        "/x/site-packages/vllm/models/frob/ops.py:<module>",
        "/x/site-packages/triton/runtime/jit.py:__init__",
    )
    subprocess = (
        "Traceback (most recent call last):",
        *(f'  File "{file}", line 7, in {name}' for file, name in (f.split(":") for f in frames)),
        "AttributeError: 'NoneType' object has no attribute 'start'",
    )
    refusal = (
        "ValueError: Model architectures ['FrobForCausalLM'] failed to be inspected. Please check"
        " the logs for more details."
    )
    failure = read(*(head + line for line in subprocess), *traceback_lines(refusal))
    assert failure.kind == "package"
    assert failure.culprit["exception"] == "AttributeError"
    assert read(*traceback_lines(refusal)).kind == "unsupported_architecture"


def test_the_check_of_a_kernel_shows_a_context_beyond_its_table() -> None:
    start = "INFO 03-14 10:22:05 [utils.py:42] non-default args: {'max_model_len': 87040}"
    check = (
        "/tmp/frob.py:97: unknown: block: [4,0,0], thread: [{},0,0] Assertion `index out of bounds:"
        " 0 <= tmp48 < 40960` failed."
    )
    error = "torch.AcceleratorError: CUDA error: device-side assert triggered"
    end = (HEAD + "EngineCore encountered a fatal error.", *traceback_lines(error, "execute_model"))
    failure = read(start, *SERVING, check.format(0), check.format(1), *end)
    assert failure.kind == "kernel_runtime"
    assert "0 <= tmp48 < 40960" in failure.message
    assert failure.steps[0].startswith("Lower --max-model-len to 40960")
    # Nothing is concluded without a longer context.
    short_context = read(start.replace("87040", "4096"), *SERVING, check.format(0), *end)
    assert not any("40960" in step for step in short_context.steps)


def test_a_driver_without_memory_counts_only_at_the_end_of_a_log() -> None:
    line = (
        "[88.1] NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY]"
        " (0x00000051) returned from _memdescAllocInternal(pMemDesc)"
    )
    assert read(*SERVING, line, line).kind == "gpu_oom"
    assert read(*SERVING, line, *[HARMLESS] * 20).kind == "none"


def test_a_scheduler_that_is_dead_ends_an_engine_that_serves() -> None:
    serving = (
        "[2026-03-14 10:22:05] The server is fired up and ready to roll!",
        *["[2026-03-14 10:22:06] Decode batch. #running-req: 1, #token: 513"] * 100,
    )
    dead = (
        "[2026-03-14 10:22:07] Rank 0 scheduler is dead. Please check if there are relevant logs."
    )
    log = "\n".join((*serving, dead, *["[2026-03-14 10:22:08] bye"] * 20))
    assert diagnose([log.encode()], SIGNATURES, "sglang")[0].kind == "killed"


@pytest.mark.parametrize(
    "line",
    [
        "command terminated with exit code 137",
        "      Exit Code:    137",
        "frob-1 exited with code 137",
    ],
)
def test_an_exit_code_of_a_container_names_the_signal(line: str) -> None:
    start = (
        "INFO 03-14 10:22:05 [utils.py:42] non-default args: {'kv_transfer_config':"
        " KVTransferConfig(kv_connector='FrobConnector')}"
    )
    failure = read(start, line)
    assert failure.kind == "killed"
    assert failure.steps[0].startswith("Start with a smaller cache in RAM")


def test_a_kernel_that_the_start_chose_is_named_before_a_part_on_the_stack() -> None:
    lines = (
        "(EngineCore pid=7) INFO 03-14 10:22:05 [x.py:4] Selected CutlassFrobScaledMMKernel for x",
        HEAD + "Traceback (most recent call last):",
        HEAD + '  File "/x/site-packages/vllm/compilation/cuda_graph.py", line 7, in __call__',
        HEAD + '  File "/x/site-packages/torch/_ops.py", line 7, in __call__',
        HEAD + "RuntimeError: Error Internal at /src/csrc/cutlass/frob/gemm_caller.cuh:61",
    )
    failure = read(*lines)
    assert failure.culprit["kernel"] == "CutlassFrobScaledMMKernel"
    assert any("VLLM_DISABLED_KERNELS" in step for step in failure.steps[:2])
