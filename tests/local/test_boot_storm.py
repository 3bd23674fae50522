"""After a power cut all models start at once; the whole run is `python -m tests.e2e.boot_storm`."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.boot_storm import BootStorm


def test_models_that_start_at_once_on_shared_gpus_all_get_ready_and_spoil_nothing(
    tmp_path: Path,
) -> None:
    storm = BootStorm(tmp_path, models=5, gpus=2)
    try:
        storm.begin()
        storm.rounds(1)
        assert storm.summary.ready == 10
        assert storm.summary.good, storm.summary
        assert storm.summary.measured >= 10
    finally:
        storm.close()
