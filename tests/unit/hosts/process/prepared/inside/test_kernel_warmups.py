"""Kernels of a warm-up that processes compile side by side before the warm-up runs."""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.hosts.process.prepared.inside import kernel_warmups

TORCH = """
class Cuda:
    blocks = 0
    def empty_cache(self): self.blocks = 0
    def set_device(self, number): pass
    def synchronize(self): pass
    def get_device_capability(self): return (9, 0)
    def mem_get_info(self): return (4 * 1024**3, 80 * 1024**3)
    def current_device(self): return 0
class Tensor:
    def __init__(self, shape, strides, dtype):
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
    def untyped_storage(self): pass
    def stride(self): return self.strides
    def zero_(self): return self
def empty_strided(shape, strides, dtype, device):
    cuda.blocks += 1
    return Tensor(shape, strides, dtype)
cuda, int32, float8_e4m3fn = Cuda(), "torch.int32", "torch.float8_e4m3fn"
__version__ = "2.11.0"
"""
# It keeps a "kernel" for each shape, as a file, as DeepGEMM does for each configuration. Another
# process has memory for the two tensors of one call.
FUNCTIONS = """
import os, pathlib, sys
import torch
def fp8_gemm_nt(pair, out, **options):
    values, scales = pair
    if sys.argv[0].endswith("kernel_compiler.py") and torch.cuda.blocks > 2:
        raise RuntimeError("CUDA out of memory")
    name = "x".join(map(str, values.shape))
    path = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"], name)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\\n")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of kernels, and modules that stand in for a GPU and for DeepGEMM."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text(TORCH)
    (modules / "gemm_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv(kernel_warmups.CACHE, str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel_warmups, "FUNCTIONS", "gemm_functions")
    monkeypatch.setattr(kernel_warmups, "available_bytes", lambda: 64 * 1024**3)
    for name in ("torch", "gemm_functions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "kernels"


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a warm-up of twenty shapes, which it makes once."""
    import gemm_functions  # type: ignore[import-not-found]
    import torch

    module = types.ModuleType("engine.warmup")
    values: dict[str, Any] = vars(module)
    values |= {"DONE": set(), "fp8_gemm_nt": gemm_functions.fp8_gemm_nt}

    def warm_up(rows: int) -> int:
        if "all" in values["DONE"]:
            return 0
        for count in range(1, rows + 1):
            tensor = torch.empty_strided((count, 8), (8, 1), torch.float8_e4m3fn, "cuda")
            index = torch.empty_strided((count,), (1,), torch.int32, "cuda")
            values["fp8_gemm_nt"]((tensor, index), None, disable_ue8m0_cast=True)
        values["DONE"].add("all")
        return rows

    values["warm_up"] = warm_up
    monkeypatch.setitem(sys.modules, "engine.warmup", module)
    return module


def pids(folder: Path, rows: int) -> list[list[int]]:
    """The processes that made each call."""
    return [
        [int(pid) for pid in (folder / f"{count}x8").read_text().split()]
        for count in range(1, rows + 1)
    ]


def test_other_processes_make_each_call_once_before_the_warmup(
    folder: Path, module: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    assert module.warm_up(20) == 20
    rows = pids(folder, 20)
    assert all(len(row) == 2 and row[1] == os.getpid() for row in rows)
    helpers = {row[0] for row in rows}
    # 4 GiB are free, a process takes a little over one, and one of them stays free.
    assert len(helpers) == min(2, len(os.sched_getaffinity(0)))
    assert os.getpid() not in helpers
    assert "compiled the kernels of 20 calls" in capsys.readouterr().out
    assert {"all"} == module.DONE


def test_a_second_start_with_the_same_cache_asks_no_other_process(
    folder: Path, module: types.ModuleType
) -> None:
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    module.warm_up(3)
    module.DONE.clear()
    assert module.warm_up(3) == 3
    assert [len(pid) for pid in pids(folder, 3)] == [3, 3, 3]


def test_the_warmup_without_free_memory_runs_as_ever(
    folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1024**3, 80 * 1024**3))
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    assert module.warm_up(3) == 3
    assert pids(folder, 3) == [[os.getpid()]] * 3


def test_memory_of_the_machine_bounds_the_processes(
    folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_warmups, "available_bytes", lambda: 5 * 1024**3)
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    assert module.warm_up(3) == 3
    assert pids(folder, 3) == [[os.getpid()]] * 3


def test_available_memory_is_that_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_warmups, "MEMINFO", tmp_path / "meminfo")
    kernel_warmups.MEMINFO.write_text("MemFree:  10 kB\nMemAvailable:   2048 kB\nCached: 5 kB\n")
    assert kernel_warmups.available_bytes() == 2 * 1024**2
    kernel_warmups.MEMINFO.write_text("MemFree:  10 kB\n")
    assert kernel_warmups.available_bytes() == 0


def test_a_gpu_of_another_kind_runs_its_warmup_once(
    folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    runs: list[int] = []
    vars(module)["warm_up"] = runs.append
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    module.warm_up(7)
    assert runs == [7]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of processes of each try, of which none compiles everything."""
    counts: list[int] = []

    def fail(command: Any, lines: Any, count: int) -> bool:
        del command, lines
        counts.append(count)
        return False

    monkeypatch.setattr(kernel_warmups, "make_calls", fail)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return counts


def test_a_failed_compilation_is_not_repeated_by_other_ranks(
    folder: Path,
    module: types.ModuleType,
    failures: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(3):
        kernel_warmups.compile_kernels(lambda: module.warm_up(4), module)
    assert failures == [2]
    assert "2 processes could not compile all kernels of 4 calls" in capsys.readouterr().out
    # The next engine has another session.
    monkeypatch.setattr(os, "getsid", lambda pid: 1)
    kernel_warmups.compile_kernels(lambda: module.warm_up(4), module)
    assert failures == [2, 2]


def test_a_start_after_a_whole_warmup_asks_no_other_process(
    module: types.ModuleType, failures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    module.warm_up(4)
    module.DONE.clear()
    monkeypatch.setattr(os, "getsid", lambda pid: 1)
    module.warm_up(4)
    assert failures == [2]


def test_a_call_that_cannot_be_recorded_leaves_the_warmup_alone(
    folder: Path, module: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    original = module.fp8_gemm_nt
    vars(module)["warm_up"] = lambda: module.fp8_gemm_nt(object())
    kernel_warmups.compile_side_by_side(["engine.warmup:warm_up"])
    with pytest.raises(TypeError):
        module.warm_up()
    assert module.fp8_gemm_nt is original
    assert "cannot be recorded" in capsys.readouterr().err


def test_a_warmup_is_replaced_at_its_import_and_where_it_was_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder.parent / "modules" / "late_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "warmup.py").write_text("def warm_up():\n    return 1\n")
    (package / "worker.py").write_text("from late_engine.warmup import warm_up\n")
    meta_path = list(sys.meta_path)
    kernel_warmups.compile_side_by_side(["late_engine.warmup:warm_up"])
    from late_engine import worker  # type: ignore[import-not-found]

    assert worker.warm_up.__qualname__.startswith("precompile_kernels")
    assert sys.meta_path == meta_path
    original = vars(sys.modules["late_engine.warmup"])
    original["warm_up"] = worker.warm_up = lambda: 2
    kernel_warmups.compile_side_by_side(["late_engine.warmup:warm_up"])
    assert worker.warm_up is original["warm_up"]
    assert worker.warm_up.__qualname__.startswith("precompile_kernels")
    for name in [name for name in sys.modules if name.startswith("late_engine")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 921])
def test_the_order_has_each_number_once_and_spreads_the_first(count: int) -> None:
    order = kernel_warmups.spread_order(count)
    assert sorted(order) == list(range(count))
    first = sorted(order[: max(1, count // 64)])
    gaps = [later - former for former, later in itertools.pairwise(first)]
    assert not gaps or min(gaps) >= 32


@pytest.mark.parametrize(
    ("program", "is_done"),
    [
        ("import os, sys\nfor line in sys.stdin: os.write(int(sys.argv[1]), b'.')", True),
        ("import sys; sys.exit(1)", False),
        ("import sys; sys.stdin.readline(); sys.exit(0)", False),
    ],
)
def test_a_process_that_ends_early_is_noticed(program: str, is_done: bool) -> None:
    lines = [json.dumps({"call": number}) for number in range(7)]
    command = [sys.executable, "-c", program]
    assert kernel_warmups.make_calls(command, lines, 3) is is_done


# The first process is broken, and notes its calls as the other one does.
FAILING_PROGRAM = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "broken").mkdir()
    reply = b"!"
except FileExistsError:
    reply = b"."
for line in sys.stdin:
    with (folder / f"{os.getpid()}.calls").open("a") as file:
        file.write(line)
    os.write(int(sys.argv[2]), reply)
"""


def test_a_process_whose_call_fails_gets_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING_PROGRAM, str(tmp_path)]
    assert kernel_warmups.make_calls(command, ["{}"] * 40, 2)
    counts = [len(path.read_text().splitlines()) for path in tmp_path.glob("*.calls")]
    assert sorted(counts) == [1, 39]


def test_calls_without_a_sound_process_are_not_done(tmp_path: Path) -> None:
    program = FAILING_PROGRAM.replace('b"."', 'b"!"')
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert not kernel_warmups.make_calls(command, ["{}"] * 40, 2)


def test_a_process_without_a_reply_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_warmups, "LIMIT_S", 0.2)
    processes: list[Any] = []
    begin: Callable[..., Any] = kernel_warmups.start_compiler

    def note(command: Any) -> Any:
        processes.append(begin(command))
        return processes[-1]

    monkeypatch.setattr(kernel_warmups, "start_compiler", note)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert not kernel_warmups.make_calls(command, ["{}"], 2)
    assert [process.returncode for process, _ in processes] == [-9, -9]
