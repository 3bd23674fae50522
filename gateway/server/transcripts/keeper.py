"""The process that writes transcripts: it redacts and encrypts, so no other process has to.

    python -m gateway.server.transcripts.keeper

Its input has one line, a `KeeperSetup` as JSON, and ends with the gateway. Then the process serves
the data planes that are still connected, and ends. Its output has a `KeeperReport` a line.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.disk_fault import disk_fault
from gateway.proxy.transcripts.exchange_copy import DECODER, LENGTH_BYTES, MAX_FRAME_BYTES
from gateway.proxy.workers.sockets import listen_at
from gateway.secret import Secret
from gateway.server.transcripts.keeper_messages import KeeperReport, KeeperSetup
from gateway.server.transcripts.redaction import Redactor
from gateway.server.transcripts.segments import SegmentWriter
from gateway.server.transcripts.transcript import build_transcript
from gateway.server.transcripts.transcript_cipher import TranscriptCipher

_BACKLOG = 128
_READ_BYTES = 256 * 1024
# Seconds between two brings to the disk, and between two sweeps of old files.
_SYNC_S = 1.0
_SWEEP_S = 30.0
# Seconds between two tries while the disk takes nothing.
_RETRY_S = 10.0


class Keeper:
    """Writes transcripts, and counts those that the disk does not take."""

    def __init__(self, setup: KeeperSetup) -> None:
        self._cipher = TranscriptCipher([Secret(key) for key in setup.keys])
        self._redactor = Redactor(setup.rules)
        self._folder = Path(setup.folder)
        self._writer = SegmentWriter(self._folder, setup.max_bytes, setup.keep_s)
        self._written_count = self._dropped_count = 0
        self._problem = self._cure = ""
        self._retry_at = self._sync_at = self._sweep_at = 0.0

    def write(self, frame: bytes) -> None:
        """Write the transcript of a copy. While the disk takes nothing, it is dropped."""
        if time.monotonic() < self._retry_at:
            self._dropped_count += 1
            return
        try:
            transcript = build_transcript(DECODER.decode(frame), self._redactor)
            self._writer.append(self._cipher.encrypt(msgspec.json.encode(transcript)))
            self._written_count += 1
            self._problem = self._cure = ""
        except DECODE_ERRORS:
            self._dropped_count += 1
        except OSError as error:
            self._dropped_count += 1
            self._record_fault(error)

    def maintain(self) -> None:
        """Bring lines to the disk, and delete old files, where it is time."""
        now = time.monotonic()
        try:
            if now >= self._sync_at:
                self._sync_at = now + _SYNC_S
                self._writer.sync()
            if now >= self._sweep_at:
                self._sweep_at = now + _SWEEP_S
                self._writer.sweep()
        except OSError as error:
            self._record_fault(error)

    def report(self) -> KeeperReport:
        return KeeperReport(self._written_count, self._dropped_count, self._problem, self._cure)

    def _record_fault(self, error: OSError) -> None:
        fault = disk_fault(self._folder, error)
        self._problem = fault.cause if fault else f"{error.strerror} in {self._folder}"
        self._cure = fault.cure if fault else f"Repair the disk of {self._folder}"
        self._retry_at = time.monotonic() + _RETRY_S


class _Reports:
    """Lines for the gateway, which may be gone."""

    def __init__(self) -> None:
        self._last = KeeperReport()

    def send(self, report: KeeperReport) -> None:
        if report != self._last:
            self._last = report
            with suppress(OSError):
                os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")


def split_frames(data: bytearray) -> list[bytes]:
    """The complete messages at the begin of `data`, which are removed. Raises ValueError for a
    message of another program."""
    frames = []
    while len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        if end > MAX_FRAME_BYTES:
            raise ValueError("a message is too long")
        if len(data) < end:
            break
        frames.append(bytes(data[LENGTH_BYTES:end]))
        del data[:end]
    return frames


def serve(keeper: Keeper, listener: socket.socket) -> None:
    """Serve data planes until the gateway and all of them are gone."""
    reports = _Reports()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    buffers: dict[socket.socket, bytearray] = {}
    is_ending = False
    while not is_ending or buffers:
        for key, _ in selector.select(_SYNC_S):
            source = key.fileobj
            if source is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
                buffers[connection] = bytearray()
            elif isinstance(source, socket.socket):
                if not _receive(source, buffers[source], keeper):
                    selector.unregister(source)
                    buffers.pop(source)
                    source.close()
            elif not os.read(sys.stdin.fileno(), _READ_BYTES):
                is_ending = True
                selector.unregister(source)
        keeper.maintain()
        reports.send(keeper.report())


def _receive(source: socket.socket, buffer: bytearray, keeper: Keeper) -> bool:
    """Write the copies that arrived. Returns whether the connection is still open."""
    try:
        data = source.recv(_READ_BYTES)
        buffer += data
        frames = split_frames(buffer)
    except (OSError, ValueError):
        return False
    for frame in frames:
        keeper.write(frame)
    return bool(data)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the last copies come after the gateway's end
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperSetup)
    path = Path(setup.socket)
    listener = listen_at(path, _BACKLOG)
    try:
        serve(Keeper(setup), listener)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
