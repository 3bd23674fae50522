"""What `fitserve doctor --fix` does by itself: what can be undone, needs no other user's rights,
and no engine would notice.

It makes the folders of the gateway, and closes a data folder that others can read, as the gateway
does at its start. Whatever needs root, or changes the machine for others (drivers, limits,
persistence mode), stays a line to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.cli.doctor.checks import MachineCheck
from gateway.errors import SettingsError
from gateway.store.data_folder import close_data_folder


def fixed(
    checks: Sequence[MachineCheck], data: Path, models: Path, again: Callable[[], MachineCheck]
) -> list[MachineCheck]:
    """The checks, with that of the data folder made anew (`again`) after it was mended."""
    done = []
    try:
        existed, closed = data.is_dir(), data.is_dir() and not data.stat().st_mode & 0o077
        close_data_folder(data)
        done += ["made" if not existed else "closed to others"] if not (existed and closed) else []
        if not models.is_dir():
            models.mkdir(parents=True)
            done.append(f"made {models}")
    except (OSError, SettingsError) as error:
        # The check says it in its own words.
        done = [f"could not be mended: {error}"]
    return [
        again()._replace(fixed=", ".join(done)) if check.name == "data folder" and done else check
        for check in checks
    ]
