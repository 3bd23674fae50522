"""The membership of this machine in a cluster: a file in the data folder, and the token's file.

DATA/cluster/membership.json   this machine's part in the cluster
DATA/cluster/node.sock         the socket of the node service
DATA/cluster/lease.json        the owner of this machine's engines
DATA/cluster/drained           present while this machine starts no engines
DATA/cluster/raylet-starts     the number of starts of this machine's raylet
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gateway.domain import Value
from gateway.errors import SettingsError
from gateway.store import atomic_file

MIN_TOKEN_BYTES = 32
FIRST_PORT = 19_900
"""The first of PORTS ports of Ray on each machine, below the ports of engines (from 20,000)."""
PORTS = 100
LEASE_S = 300.0

NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Membership(Value):
    """The membership of this machine in a cluster.

    head: the address of Ray's head with its port.
    address: the address of this machine on the interface of the cluster.
    """

    name: NodeName
    role: Literal["head", "node"]
    head: str = Field(pattern=r"^[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5}$")
    address: str = Field(min_length=1, max_length=64)
    token_file: Path
    first_port: int = Field(FIRST_PORT, ge=1024, le=65535 - PORTS)
    lease_s: float = Field(LEASE_S, ge=5, le=86400)


def folder(data: Path) -> Path:
    return data / "cluster"


def node_socket(data: Path) -> Path:
    return folder(data) / "node.sock"


def read_membership(data: Path) -> Membership | None:
    """None: this machine belongs to no cluster. Raises SettingsError for a damaged file."""
    path = folder(data) / "membership.json"
    try:
        return Membership.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise SettingsError(
            f"The file {path} cannot be read as a membership: {type(error).__name__}.",
            hint="Remove it, then run `fitserve cluster join` again.",
        ) from None


def write_membership(data: Path, membership: Membership) -> None:
    """Write the membership to its file. Raises OSError."""
    text = membership.model_dump_json(indent=1)
    atomic_file.write(folder(data) / "membership.json", text.encode())


def remove_membership(data: Path) -> None:
    for name in ("membership.json", "lease.json", "drained"):
        (folder(data) / name).unlink(missing_ok=True)


def count_raylet_start(data: Path) -> int:
    """The number of starts of the raylet before this one, also of those before the last boot."""
    path = folder(data) / "raylet-starts"
    count = 0
    with suppress(OSError, ValueError):
        count = int(path.read_bytes())
    # On a full disk the ports repeat, and the machine joins later.
    with suppress(OSError):
        atomic_file.write(path, str(count + 1).encode())
    return count


def make_token(path: Path) -> None:
    """Write a new token, unless the file exists. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(MIN_TOKEN_BYTES))
    except OSError:
        # The next call would take an empty file for the token.
        path.unlink(missing_ok=True)
        raise


def check_token(path: Path) -> None:
    """Check that the file holds a token that only its owner can read. Raises SettingsError."""
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(
            f"The token file {path} cannot be read: {error.strerror}.",
            hint=f"Copy it from the head with its mode: scp -p HEAD:{path} {path}",
        ) from None
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o177:
        raise SettingsError(
            f"Other users can use the token file {path} (mode {stat.S_IMODE(mode):o}). A token lets"
            " its holder run programs on every machine.",
            hint=f"Run `chmod 600 {path}`.",
        )
    if len(token) < MIN_TOKEN_BYTES:
        raise SettingsError(
            f"The token in {path} has {len(token)} bytes; {MIN_TOKEN_BYTES} are the least.",
            hint="Remove the file on the head, run `fitserve cluster init`, and copy the new one.",
        )
