"""The profile of an engine version that nobody described: what the version says of itself, and the rest as the nearest known one has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.domain import Engine
from gateway.errors import HostError
from gateway.inquiry.open_flags import flag, user_env
from gateway.store import atomic_file

# What a version says of itself beside its flags, by the names of Engine.
_OWN = ("default_utilization", "default_batched_tokens", "default_seqs", "block_size")


def like(near: Engine, version: str, image: str | None = None) -> Engine:
    """Another version of the known one's kind, as far as that can be told without asking it: how it is installed and started."""
    recipe = near.install
    if recipe is not None:
        packages = tuple(package.replace(f"=={near.version}", f"=={version}") for package in recipe.packages)
        recipe = recipe.evolve(packages=packages or (f"{near.kind}=={version}",), lock=None)
    made: Engine = near.evolve(
        version=version,
        image=image or near.image.replace(near.version, version),
        install=recipe,
        advisories=(),
        guessed_from=near.guessed_from or near.ref,
    )
    return made


def profile_of(near: Engine, version: str, image: str | None, said: Mapping[str, Any], identity: str) -> Engine:
    """near: the known version of the kind that is nearest. said: `Inquirer.version`. identity: what said it.

    Raises HostError for what is no engine's answer.
    """
    try:
        asked = {
            "flags": {name: flag(name, one) for name, one in said["flags"].items()},
            "architectures": [name for names in said["architectures"].values() for name in names],
            "quantizations": said["quantizations"],
            "user_env": user_env(said["environment"], near.device),
            **{name: said[name] for name in _OWN if name in said},
        }
        held = like(near, version, image).model_dump(exclude={"sources", "head_dims"})
        cuda = said.get("cuda")
        return Engine.model_validate(
            {
                **held,
                **asked,
                "cuda": cuda,
                "min_driver": near.min_driver if cuda == near.cuda else None,
                "sources": {"flags": f"asked of {identity}", "rules": f"those of {near.ref}"},
            }
        )
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise HostError(
            f"What {near.kind}=={version} says of itself is no profile: {str(error).splitlines()[0]}.",
            hint="See whether the image is what it says it is.",
        ) from None


def keep(profile: Engine, folder: Path) -> Path:
    """Where `Profiles` finds it. Raises OSError."""
    path = folder / "engines" / profile.kind / f"{profile.version}.yaml"
    text = yaml.safe_dump(profile.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=128)
    atomic_file.write(path, text.encode())
    return path
