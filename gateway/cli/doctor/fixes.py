"""The fixes of `fitserve doctor --fix`: reversible changes that need no other user's rights.

The gateway's folders are created, and a data folder that others can read is closed, as at a start
of the gateway. Everything that needs root or affects other users stays advice: drivers, limits,
persistence mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.cli.doctor.checks import MachineCheck
from gateway.errors import SettingsError
from gateway.store.data_folder import close_data_folder


def apply_fixes(
    checks: Sequence[MachineCheck],
    data: Path,
    models: Path,
    check_data_folder: Callable[[], MachineCheck],
) -> list[MachineCheck]:
    """The checks after the fixes; that of the data folder is repeated."""
    changes = []
    try:
        existed = data.is_dir()
        is_closed = data.is_dir() and not data.stat().st_mode & 0o077
        close_data_folder(data)
        if not (existed and is_closed):
            changes.append("closed to others" if existed else "created")
        if not models.is_dir():
            models.mkdir(parents=True)
            changes.append(f"created {models}")
    except (OSError, SettingsError) as error:
        # The check describes the problem.
        changes = [f"could not be fixed: {error}"]
    return [
        check_data_folder()._replace(fix=", ".join(changes))
        if check.name == "data folder" and changes
        else check
        for check in checks
    ]
