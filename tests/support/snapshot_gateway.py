"""`python -m tests.support.snapshot_gateway SNAPSHOT PROFILES`: `fitserve serve` on the machine of
a hardware snapshot, with the profiles of a
folder in the place of the shipped ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from gateway.__main__ import serve
from gateway.domain import Hardware


def main() -> None:
    snapshot, profiles = map(Path, sys.argv[1:])
    machine = Hardware.model_validate_json(snapshot.read_bytes())
    with (
        mock.patch("gateway.machine.gpu_watch.probe", return_value=machine),
        mock.patch("gateway.profiles.profiles.shipped_profiles", return_value=profiles),
    ):
        serve()


if __name__ == "__main__":
    main()
