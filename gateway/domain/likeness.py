"""One engine version told by its differences from another: what nobody described is as the nearest
known version has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from gateway.domain.engine import Engine, Flag, Method
from gateway.domain.release import release
from gateway.domain.value import Scalar, Value


class Likeness(Value):
    """What an engine version said of itself, as far as it is not what `guessed_from` has. Read from
    `profiles/asked/`, which
    `scripts/engine-profile KIND==VERSION` writes."""

    kind: str
    version: str
    guessed_from: str = Field(description='"kind==version" whose rules forecast for it')
    source: str = Field(description="what was asked, with a digest")
    without: dict[str, tuple[str, ...]] = Field(
        {}, description="field of Engine -> names that the other version has, and this not"
    )
    values: dict[str, Scalar | tuple[str, ...] | None] = Field(
        {}, description="fields of Engine that have one value, or a short list"
    )
    flags: dict[str, Flag] = Field({})
    quantizations: dict[str, Method] = Field({})
    architectures: tuple[str, ...] = ()
    config_classes: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    user_env: tuple[str, ...] = ()

    @property
    def ref(self) -> str:
        return f"{self.kind}=={self.version}"


# Fields of Engine by what is different in them.
_NAMED = ("flags", "quantizations")
_LISTED = ("architectures", "config_classes", "tokenizers", "user_env")
_VALUES = (
    "default_utilization",
    "default_batched_tokens",
    "default_seqs",
    "block_size",
    "cuda",
    "min_driver",
    "min_capability",
    "compiled",
)


def like(near: Engine, version: str, image: str | None = None) -> Engine:
    """Another version of the known one's kind, as far as that can be told without asking it: how it
    is installed and started."""
    this, recipe = release(version), near.install
    if recipe is not None:
        packages = tuple(
            package.replace(f"=={near.version}", f"=={version}") for package in recipe.packages
        )
        recipe = recipe.evolve(packages=packages or (f"{near.kind}=={version}",), lock=None)
    return near.evolve(
        version=version,
        image=image or near.image.replace(near.version, version),
        install=recipe,
        # A weakness that a later version mends is in this one too; of versions before the known one
        # nothing is known.
        advisories=(
            tuple(
                one
                for one in near.advisories
                if one.fixed_in is None or release(one.fixed_in) > this
            )
            if this >= release(near.version)
            else ()
        ),
        guessed_from=near.guessed_from or near.ref,
    )


def differences(near: Engine, learned: Engine, source: str) -> Likeness:
    """What `learned` has otherwise than `near`."""
    without: dict[str, tuple[str, ...]] = {}
    found: dict[str, Any] = {}
    for field in _NAMED:
        old, new = getattr(near, field), getattr(learned, field)
        found[field] = {name: value for name, value in new.items() if old.get(name) != value}
        without[field] = tuple(name for name in old if name not in new)
    for field in _LISTED:
        old, new = getattr(near, field), getattr(learned, field)
        found[field] = tuple(name for name in new if name not in {*old})
        without[field] = tuple(name for name in old if name not in {*new})
    return Likeness(
        kind=learned.kind,
        version=learned.version,
        guessed_from=near.ref,
        source=source,
        without={field: names for field, names in without.items() if names},
        values={
            name: getattr(learned, name)
            for name in _VALUES
            if getattr(learned, name) != getattr(near, name)
        },
        **found,
    )


def different(near: Engine, told: Likeness) -> Engine:
    """The version that these are the differences of. near: the version that they are differences
    from."""
    changed: dict[str, Any] = dict(told.values)
    for field in _NAMED:
        changed[field] = _kept(getattr(near, field), told.without.get(field, ())) | getattr(
            told, field
        )
    for field in _LISTED:
        gone = {*told.without.get(field, ())}
        changed[field] = (
            *(name for name in getattr(near, field) if name not in gone),
            *getattr(told, field),
        )
    return like(near, told.version).evolve(
        **changed, sources={"flags": f"asked of {told.source}", "rules": f"those of {near.ref}"}
    )


def _kept(named: Mapping[str, Any], gone: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in gone}
