"""Workers without a control process: the next gateway on the same data folder ends them."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def stop_orphaned_workers(data: Path) -> bool:
    """End the workers of a dead gateway on `data` after their current answers. Returns whether
    there were any.

    Only the holder of the lock of `data` may call this. A pid file descriptor makes sure that no
    other process gets the signal.
    """
    has_ended = False
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            descriptor = os.pidfd_open(int(entry.name))
        except OSError:
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if arguments[1:4] == [
                b"-m",
                b"gateway.proxy.workers.worker",
                os.fsencode(data.resolve()),
            ]:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                has_ended = True
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return has_ended
