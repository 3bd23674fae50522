"""Profile of an undescribed engine version: its own answers, and the rest from the nearest known
version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway import variables
from gateway.domain import Engine, EngineRef
from gateway.domain.profile_diff import derive_profile
from gateway.engines.common.open_flags import flag
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.inquiry_document import StatedGpus
from gateway.errors import HostError
from gateway.store import atomic_file

# The oldest driver that runs a CUDA version, by its major number:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
_DRIVERS = {"12": "525", "13": "580"}
# Answers of a version other than its flags, by the names of Engine.
_OWN_FIELDS = (
    "default_utilization",
    "default_batched_tokens",
    "default_seqs",
    "block_size",
    "config_classes",
    "tokenizers",
)


def build_profile(
    near_engine: Engine, version: str, image: str | None, answer: Mapping[str, Any], identity: str
) -> Engine:
    """Profile of a version from its answers.

    near_engine: the nearest known version of the kind.
    answer: the answer of `Inquirer.version`.
    identity: the source of the answers.

    Raises HostError for answers that no engine gives.
    """
    try:
        flags_asked = {
            "flags": {name: flag(name, item) for name, item in answer["flags"].items()},
            "architectures": [name for names in answer["architectures"].values() for name in names],
            "quantizations": answer["quantizations"],
            "user_env": variables.user_variables(answer["environment"], near_engine.device),
            **{name: answer[name] for name in _OWN_FIELDS if name in answer},
        }
        derived_fields = derive_profile(near_engine, version, image).model_dump(
            exclude={"sources", "head_dims"}
        )
        cuda = _cuda(near_engine, answer)
        return Engine.model_validate(
            {
                **derived_fields,
                **flags_asked,
                "cuda": cuda,
                "min_driver": _DRIVERS.get(str(cuda).partition(".")[0]),
                # The content of its own extensions is more exact than a limit read of another
                # version.
                **(
                    {"compiled": answer["compiled"], "min_capability": None}
                    if answer.get("compiled")
                    else {}
                ),
                "sources": {
                    "flags": f"asked of {identity}",
                    "rules": f"those of {near_engine.ref}",
                },
            }
        )
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise HostError(
            f"{near_engine.kind}=={version} describes itself in a form that makes no profile:"
            f" {str(error).splitlines()[0]}.",
            hint="Check that the image holds the engine that its name says.",
        ) from None


def _cuda(near_engine: Engine, answer: Mapping[str, Any]) -> str | None:
    """The CUDA version of the engine's extensions.

    If the major version of torch or of the profile agrees, its full version; else `MAJOR.0`.
    """
    runtime = answer.get("cuda_runtime")
    torch = answer.get("cuda")
    if runtime is None:
        return torch
    version = next(
        (
            item
            for item in (torch, near_engine.cuda)
            if item and item.partition(".")[0] == str(runtime)
        ),
        None,
    )
    return version or f"{runtime}.0"


async def learn(
    inquirer: Inquirer, near_engine: Engine, engine: EngineRef, folder: Path, limit_s: float
) -> tuple[Engine, str, Path]:
    """Ask a version about itself, and store its profile.

    Returns the profile, the identity of its source, and its path. Raises HostError.
    """
    # Flags and registries are the same on any GPU; a small one is stated.
    gpus = StatedGpus("8.6", 24 << 30, 1, "GPU") if near_engine.device == "cuda" else None
    answer, identity = await inquirer.version(engine, gpus, limit_s)
    version = str(answer.get("version", engine.version))[:80]
    if version.partition("+")[0] != engine.version.partition("+")[0]:
        raise HostError(
            f"The image or environment holds {engine.kind} {version}, not {engine.version}.",
            hint=(
                f"Learn {engine.kind}=={version}, or name an image or Python with {engine.version}"
                " (--image, --python). If the image of a model changed its version, remove the"
                " model and add it again."
            ),
        )
    profile = build_profile(near_engine, engine.version, engine.image, answer, identity)
    try:
        return profile, identity, await asyncio.to_thread(store_profile, profile, folder)
    except OSError as error:
        raise HostError(
            f"The profile of {engine} cannot be stored: {error}.",
            hint="Free disk space, then try again.",
        ) from None


def store_profile(profile: Engine, folder: Path) -> Path:
    """Store a profile, and return its path, where `Profiles` finds the file. Raises OSError."""
    import yaml  # commands that learn nothing read no YAML

    path = folder / "engines" / profile.kind / f"{profile.version}.yaml"
    text = yaml.safe_dump(
        profile.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=128
    )
    atomic_file.write(path, text.encode())
    return path
