"""The exit codes of forked engines, which only their parent can read, as files.

    python exit_codes.py {"PID": "FILE", ...}

notes those of its children, and ends with the last of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.2


def write_exit_codes(engines: dict[int, str]) -> None:
    """Write `PID CODE` (-9: killed by signal 9) to the file of each engine that has ended.

    An engine's file is complete before the process is gone from the table of processes.
    """
    for pid, path in list(engines.items()):
        try:
            end_status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            del engines[pid]
            continue
        if end_status is None:
            continue
        code = (
            end_status.si_status if end_status.si_code == os.CLD_EXITED else -end_status.si_status
        )
        with suppress(OSError):
            draft = Path(f"{path}.{pid}")
            draft.write_text(f"{pid} {code}\n")
            draft.replace(path)
        os.waitpid(pid, 0)
        del engines[pid]


def become_writer(engines: dict[int, str]) -> None:
    """Give this process's memory back, and note how these children end. Returns without any."""
    if engines:
        # It ends with its last engine.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A process with the slot's log and no socket counts as one that still imports.
        null_file = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(null_file, number)
        command = [sys.executable, "-I", "-S", __file__, json.dumps(engines)]
        os.execv(sys.executable, command)


def main(engines: dict[int, str]) -> None:
    """Note the exit codes of these children."""
    while engines:
        write_exit_codes(engines)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main({int(pid): path for pid, path in json.loads(sys.argv[1]).items()})
