"""Known failures with cures for one machine: they name only engine versions that run on it."""

from __future__ import annotations

from gateway.diagnosis.signatures import Signatures
from gateway.domain import Hardware
from gateway.planner.gates.machine_gates import runs_on
from gateway.profiles.profiles import Profiles


def signatures_for(machine: Hardware, profiles: Profiles) -> Signatures:
    """The signatures of the profiles, whose cures name the described versions that the planner
    admits on the machine: by its processor, driver and GPUs."""
    described_versions = profiles.signatures.cures.rows.versions
    return profiles.signatures.select_versions(
        {
            kind: tuple(
                version
                for version in versions
                if runs_on(machine, profiles.engine(f"{kind}=={version}"))
            )
            for kind, versions in described_versions.items()
        }
    )
