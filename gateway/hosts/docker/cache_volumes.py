"""Volumes for the compiled code of engines in containers, one for each image and
`LaunchSpec.cache`.

The name of a volume follows from the image itself, not from its name. So only those that may start
this image can write the code of its next engine.
"""

from __future__ import annotations

import hashlib
import io
import re
import secrets
import tarfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway.domain import LaunchSpec
from gateway.domain.units import GIB
from gateway.secret import Secret

if TYPE_CHECKING:
    from docker.api import APIClient

_KEY = "fitserve.engine_key"
FOLDER = "/var/cache/fitserve"
# The limit is for one installation, as on the process host.
MAX_BYTES = 32 * GIB
# The most volumes where Docker does not report their sizes.
MAX_UNMEASURED_VOLUMES = 16
_PASSWD = "/etc/passwd"  # noqa: S105 - the names of users
_MAX_PASSWD_BYTES = 2**20

Attributes = dict[str, Any]


def cache_volume(client: APIClient, image: Attributes, spec: LaunchSpec, owner: str) -> str | None:
    """The volume for such starts, made if needed; None if nothing is kept.

    Starts without a shared cache, and images with an unknown user, keep nothing. The oldest other
    volumes of this installation are removed if all are too large.
    """
    if not spec.cache:
        return None
    name = _volume_name(image, spec.cache, owner)
    own_volumes = _volumes(client, owner)
    other_volumes = [volume for volume in own_volumes if volume["Name"] != name]
    if len(other_volumes) == len(own_volumes):
        user = _user(client, image)
        if user is None:
            return None
        labels = {
            "fitserve.cache": owner,
            "fitserve.engine": str(spec.engine),
            "fitserve.user": str(user),
            _KEY: secrets.token_hex(32),
        }
        client.create_volume(name, labels=labels)
    _remove_old_volumes(client, name, other_volumes)
    return name


def has_volume(image: Attributes, cache: str, owner: str, client: APIClient) -> bool:
    """Whether an earlier start left a volume for such starts."""
    return _volume_name(image, cache, owner) in {
        volume["Name"] for volume in _volumes(client, owner)
    }


def volume_labels(client: APIClient, volume: str | None) -> dict[str, str]:
    """The labels of a volume; of none without one."""
    labels: dict[str, str] | None = (
        client.inspect_volume(volume)["Labels"] if volume is not None else None
    )
    return labels or {}


def engine_key(labels: Mapping[str, str]) -> Secret:
    """The key of all engines with a volume of these labels; else a new one.

    vLLM before 0.30.0 names its compiled graphs by its variables, and VLLM_API_KEY is among them
    (vllm/envs.py). With a new key each start would compile all graphs again.
    """
    return Secret(labels.get(_KEY) or secrets.token_hex(32))


def make_folders(
    client: APIClient, container: str, labels: Mapping[str, str], spec: LaunchSpec
) -> None:
    """Make the folders in the volume for the user of the image: a new volume belongs to root."""
    archive_stream = io.BytesIO()
    with tarfile.open(fileobj=archive_stream, mode="w") as folders:
        for folder in sorted({*spec.caches.values()}):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o700
            entry.uid = int(labels.get("fitserve.user", "0"))
            folders.addfile(entry)
    client.put_archive(container, FOLDER, archive_stream.getvalue())


def _volume_name(image: Attributes, cache: str, owner: str) -> str:
    key = f"{image['Id']} {cache}"
    return f"fitserve-cache-{owner}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _volumes(client: APIClient, owner: str) -> list[Attributes]:
    """The volumes of this installation."""
    volumes = client.volumes(filters={"label": f"fitserve.cache={owner}"})["Volumes"]
    return [*(volumes or ())]


def _remove_old_volumes(client: APIClient, volume: str, unused_volumes: list[Attributes]) -> None:
    """Remove the oldest unused other volumes until all are small enough together."""
    from docker.errors import APIError

    sizes = _volume_sizes(client) if unused_volumes else {}
    names = [
        unused_volume["Name"]
        for unused_volume in sorted(
            unused_volumes, key=lambda unused_volume: str(unused_volume["CreatedAt"])
        )
    ]
    for name in (*names,):
        if (
            sum(sizes.get(volume_name, 0) for volume_name in (volume, *names)) <= MAX_BYTES
            if sizes
            else len(names) < MAX_UNMEASURED_VOLUMES
        ):
            return
        try:
            client.remove_volume(name)
            names.remove(name)
        except APIError as error:
            if error.status_code not in (404, 409):  # gone, or used by a container
                raise


def _volume_sizes(client: APIClient) -> dict[str, int]:
    """Bytes of volumes by name; empty where Docker does not report them."""
    from requests.exceptions import RequestException

    try:
        # `df` of the SDK would count images too, which may take long.
        endpoint = f"{client.base_url}/v{client.api_version}/system/df"
        answer = client.get(endpoint, params={"type": "volume"}, timeout=client.timeout)
        answer.raise_for_status()
        volumes = answer.json()["Volumes"] or []
        return {volume["Name"]: max(0, volume["UsageData"]["Size"]) for volume in volumes}
    except (RequestException, ValueError, KeyError, TypeError):
        return {}


def _user(client: APIClient, image: Attributes) -> int | None:
    """The id of the image's user; None if the image names an unknown user."""
    name = (image["Config"].get("User") or "0").split(":")[0]
    if name in ("root", "0"):
        return 0
    if name.isdecimal():
        return int(name)
    from docker.errors import APIError

    # The container never runs: Docker gives files of a created container.
    container = client.create_container(image["Id"], ["true"], labels={"fitserve.reading": name})[
        "Id"
    ]
    try:
        pieces, _ = client.get_archive(container, _PASSWD)
        archive = b""
        for piece in pieces:
            archive += piece
            if len(archive) > _MAX_PASSWD_BYTES:
                return None
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            file = files.extractfile("passwd")
            lines = file.read().decode(errors="replace") if file is not None else ""
    except (APIError, tarfile.TarError, KeyError):
        return None
    finally:
        client.remove_container(container, v=True, force=True)
    match = re.search(rf"^{re.escape(name)}:[^:\n]*:(\d+):", lines, re.MULTILINE)
    return int(match[1]) if match else None
