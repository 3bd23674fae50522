"""The transcripts of a gateway: whose requests are copied, the keeper, and the archive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gateway.errors import SettingsError
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.transcripts.copying import copy_requests
from gateway.proxy.transcripts.copying_meter import CopyingMeter
from gateway.proxy.transcripts.transcript_setup import TranscriptSetup
from gateway.server.transcripts.archive import TranscriptArchive
from gateway.server.transcripts.keeper_messages import KeeperSetup
from gateway.server.transcripts.keeper_process import KeeperProcess
from gateway.settings import Settings

FOLDER = "transcripts"
EXTRA_HINT = (
    "Run `pip install '.[transcripts]'` in a clone of the repository, or unset the variable."
)
_DAY_S = 86_400


class Transcripts:
    """The parts of one gateway.

    copying: the meter of the data plane in this process; None: workers have the data plane.
    """

    def __init__(
        self, setup: TranscriptSetup, keeper: KeeperProcess, archive: TranscriptArchive
    ) -> None:
        self.setup = setup
        self.keeper = keeper
        self.archive = archive
        self.copying: CopyingMeter | None = None

    def copy_requests(self, plane: DataPlane) -> None:
        """Copy the requests of the data plane in this process."""
        self.copying = copy_requests(plane, self.setup)

    def samples(self) -> Iterator[Sample]:
        dropped_count = self.keeper.dropped_count
        if self.copying is not None:
            dropped_count += self.copying.link.dropped_count
        yield "fitserve_transcripts_total", ("written",), self.keeper.written_count
        yield "fitserve_transcripts_total", ("dropped",), dropped_count

    async def close(self) -> None:
        """Write the last copies, and end."""
        if self.copying is not None:
            await self.copying.link.close()
        await self.keeper.close()


def build_transcripts(settings: Settings) -> Transcripts:
    """The parts for the operator's keys. Raises SettingsError."""
    assert settings.transcript_key_file is not None  # noqa: S101 - the caller looked
    try:
        from gateway.server.transcripts.transcript_cipher import TranscriptCipher, read_keys
    except ModuleNotFoundError as error:
        raise SettingsError(
            "FITSERVE_TRANSCRIPT_KEY_FILE is set, and the library that encrypts transcripts is not"
            f" installed ({error.name}).",
            hint=EXTRA_HINT,
        ) from None
    keys = read_keys(settings.transcript_key_file, settings.data)
    _remove_stale_sockets(settings.data)
    folder = settings.data / FOLDER
    # Two gateways, one after the other, may use the folder at a time.
    socket = settings.data / "run" / f"transcripts-{os.getpid()}.sock"
    keeper_setup = KeeperSetup(
        socket=str(socket),
        folder=str(folder),
        keys=tuple(key.reveal() for key in keys),
        rules=settings.transcript_redact,
        max_bytes=settings.transcript_bytes,
        keep_s=settings.transcript_days * _DAY_S,
    )
    return Transcripts(
        TranscriptSetup(str(socket), settings.transcribed_models),
        KeeperProcess(keeper_setup),
        TranscriptArchive(folder, TranscriptCipher(keys)),
    )


def _remove_stale_sockets(data: Path) -> None:
    """Remove the sockets of gateways that have ended."""
    for path in (data / "run").glob("transcripts-*.sock"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
