"""The copying of requests in one data plane."""

from __future__ import annotations

from pathlib import Path

from gateway.proxy.data_plane import DataPlane
from gateway.proxy.transcripts.copy_link import CopyLink
from gateway.proxy.transcripts.copying_meter import CopyingMeter
from gateway.proxy.transcripts.transcript_setup import TranscriptSetup


def copy_requests(plane: DataPlane, setup: TranscriptSetup) -> CopyingMeter:
    """The meter that copies requests of the data plane from now on."""
    meter = CopyingMeter(plane.meter, setup, CopyLink(Path(setup.socket)))
    plane.meter = meter
    # Connections to the keeper begin with the first copy.
    plane.models_list.transcripts = setup
    return meter
