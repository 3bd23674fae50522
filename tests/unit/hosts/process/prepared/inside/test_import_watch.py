"""Imports that forks survive: CUDA that has begun beside NVML, and many learned modules that each
begin a thread or a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

DRIVER = """
static int begun;
int cuInit(unsigned flags) { begun = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return begun ? 0 : 3; }
"""
PROGRAM = """
import ctypes, sys
from gateway.hosts.process.prepared.inside.import_watch import begins_cuda, fork_refusal
print(begins_cuda(), fork_refusal())
driver = ctypes.CDLL(sys.argv[1])
print(begins_cuda(), fork_refusal())
driver.cuInit(0)
print(begins_cuda(), fork_refusal())
"""


def test_a_driver_that_is_only_loaded_survives_forks(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(library), str(source)], check=True)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == ["False None", "False None", "True begins CUDA"]


CULPRITS = 24
LEARNED = """
import os, sys, threading
from pathlib import Path
from gateway.hosts.process.prepared.inside import import_watch
from gateway.hosts.process.prepared.inside.import_watch import ImportWatch, fork_refusal
import_watch.PATIENCE_S = float(sys.argv[2])
watch = ImportWatch(Path(sys.argv[1]))
watch.import_all(["large"])
print(fork_refusal(), sorted(name for name in watch.refused_names))
print(sorted(name for name in sys.modules if name.startswith(("plain", "inner"))))
"""


def imports_of(folder: Path, learned: list[str], patience_s: float = 0.05) -> list[str]:
    """The lines of a process that imports `large` and learned modules of folder/modules.

    patience_s: the patience with the processes that they start.
    """
    slot = folder / "slot"
    slot.mkdir()
    (slot / "learned").write_text("".join(f"{name}\n" for name in learned))
    result = subprocess.run(
        [sys.executable, "-c", LEARNED, str(slot), str(patience_s)],
        env={
            **os.environ,
            "PYTHONPATH": f"{folder / 'modules'}:{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def test_each_culprit_costs_a_trial_and_no_new_process(tmp_path: Path) -> None:
    """The large import runs once: 20 restarts of 16 s each ended a prepared vLLM 0.26.0."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "large.py").write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('1')")
    culprit_names = []
    for number in range(CULPRITS):
        begins = (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
            if number % 2
            else "import subprocess\nsubprocess.Popen(['sleep', '60'], close_fds=False)"
        )
        (modules / f"inner{number}.py").write_text("")
        (modules / f"culprit{number}.py").write_text(f"import inner{number}\n{begins}")
        (modules / f"plain{number}.py").write_text("")
        culprit_names += [f"culprit{number}", f"plain{number}"]
    state, imports = imports_of(tmp_path, culprit_names)
    assert state == f"None {sorted(f'culprit{number}' for number in range(CULPRITS))}"
    names = [f"{word}{number}" for word in ("plain", "inner") for number in range(CULPRITS)]
    assert imports == str(sorted(names))
    assert (tmp_path / "runs").read_text() == "1"


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_process_that_ends_is_awaited_with_its_thread(tmp_path: Path, is_awaited: bool) -> None:
    """humming 0.1.10 was refused, and with it vLLM's worker, its kernels and its FP8 layers."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "large.py").write_text("")
    # The process ends with its input: after the import, or with the process that imports.
    (modules / "plain1.py").write_text(
        "import subprocess, threading\n"
        "process = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "threading.Thread(target=process.wait, daemon=True).start()\n"
        + ("process.stdin.close()\n" if is_awaited else "")
    )
    state, imports = imports_of(tmp_path, ["plain1"], HANG_S if is_awaited else 0.05)
    assert state == ("None []" if is_awaited else "None ['plain1']")
    assert imports == ("['plain1']" if is_awaited else "[]")


def test_modules_of_a_refused_package_do_not_end_the_imports(tmp_path: Path) -> None:
    """FlashInfer began CUDA at its import: no module was imported that was learned after it."""
    modules = tmp_path / "modules"
    package = modules / "package"
    package.mkdir(parents=True)
    (modules / "large.py").write_text("")
    (package / "__init__.py").write_text("import package.culprit")
    (package / "culprit.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    (package / "inner.py").write_text("")
    (modules / "plain1.py").write_text("")
    learned_names = ["package", "package.culprit", "package.inner", "plain1"]
    state, imports = imports_of(tmp_path, learned_names)
    assert state == "None ['package', 'package.culprit']"
    assert imports == "['plain1']"


def test_a_learned_module_that_ends_its_process_is_left_out(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "large.py").write_text("")
    (modules / "plain1.py").write_text("")
    (modules / "deadly.py").write_text("import os\nos._exit(1)")
    assert imports_of(tmp_path, ["plain1", "deadly"]) == ["None []", "['plain1']"]
