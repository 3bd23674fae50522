"""An engine version as its difference from a version with rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.domain.base import Field
from gateway.domain.engine import Engine, Flag, KnownChoice, Method
from gateway.domain.release import release
from gateway.domain.value import Scalar, Value


class ProfileDiff(Value):
    """The difference of an engine version's own answers from the profile of `guessed_from`.

    Read from `profiles/engine_diffs/`, which `scripts/engine-profile KIND==VERSION` writes.
    """

    kind: str
    version: str
    guessed_from: str = Field(description='"kind==version" whose rules forecast for it')
    source: str = Field(description="questions to the engine, with a digest")
    without: dict[str, tuple[str, ...]] = Field(
        {}, description="field of Engine -> names that the other version has, and this not"
    )
    values: dict[str, Scalar | tuple[str, ...] | None] = Field(
        {}, description="fields of Engine that have one value, or a short list"
    )
    kernels_as: dict[str, tuple[str, ...]] = Field(
        {}, description="the field of Engine of this name"
    )
    choices: tuple[KnownChoice, ...] = Field((), description="the field of Engine of this name")
    flags: dict[str, Flag] = Field({})
    quantizations: dict[str, Method] = Field({})
    traits: tuple[str, ...] = ()
    no_stages: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    config_classes: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    user_env: tuple[str, ...] = ()

    @property
    def ref(self) -> str:
        return f"{self.kind}=={self.version}"


# Fields of Engine by the form of their differences.
_MAPPING_FIELDS = ("flags", "quantizations")
_LIST_FIELDS = (
    "traits",
    "no_stages",
    "architectures",
    "config_classes",
    "tokenizers",
    "user_env",
)
_VALUE_FIELDS = (
    "default_utilization",
    "default_batched_tokens",
    "default_seqs",
    "block_size",
    "cuda",
    "min_driver",
    "min_capability",
    "compiled",
)


def derive_profile(near_engine: Engine, version: str, image: str | None = None) -> Engine:
    """The profile of another version of `near_engine`'s kind: installation, start, and guessed
    rules."""
    new_version = release(version)
    recipe = near_engine.install
    if recipe is not None:
        packages = tuple(
            package.replace(f"=={near_engine.version}", f"=={version}")
            for package in recipe.packages
        )
        recipe = recipe.evolve(packages=packages or (f"{near_engine.kind}=={version}",), lock=None)
    return near_engine.evolve(
        version=version,
        image=image or near_engine.image.replace(near_engine.version, version),
        install=recipe,
        # The new version still has a weakness that a later one fixes. Nothing is known of versions
        # before the known one.
        advisories=tuple(
            advisory
            for advisory in near_engine.advisories
            if new_version >= release(near_engine.version)
            and (advisory.fixed_in is None or release(advisory.fixed_in) > new_version)
        ),
        guessed_from=near_engine.guessed_from or near_engine.ref,
    )


def diff_profiles(near_engine: Engine, learned_engine: Engine, source: str) -> ProfileDiff:
    """The difference of `learned_engine` from `near_engine`."""
    removed_names: dict[str, tuple[str, ...]] = {}
    additions: dict[str, Any] = {}
    for field in _MAPPING_FIELDS:
        near_value = getattr(near_engine, field)
        learned_value = getattr(learned_engine, field)
        additions[field] = {
            name: value for name, value in learned_value.items() if near_value.get(name) != value
        }
        removed_names[field] = tuple(name for name in near_value if name not in learned_value)
    for field in _LIST_FIELDS:
        near_value = getattr(near_engine, field)
        learned_value = getattr(learned_engine, field)
        additions[field] = tuple(name for name in learned_value if name not in {*near_value})
        removed_names[field] = tuple(name for name in near_value if name not in {*learned_value})
    return ProfileDiff(
        kind=learned_engine.kind,
        version=learned_engine.version,
        guessed_from=near_engine.ref,
        source=source,
        without={field: names for field, names in removed_names.items() if names},
        values={
            name: getattr(learned_engine, name)
            for name in _VALUE_FIELDS
            if getattr(learned_engine, name) != getattr(near_engine, name)
        },
        **additions,
    )


def apply_diff(near_engine: Engine, diff: ProfileDiff) -> Engine:
    """The profile of the version that differs from `near_engine` by `diff`."""
    changes: dict[str, Any] = dict(diff.values)
    for field in _MAPPING_FIELDS:
        entries = _kept_rows(getattr(near_engine, field), diff.without.get(field, ()))
        changes[field] = entries | getattr(diff, field)
    for field in _LIST_FIELDS:
        dropped_names = {*diff.without.get(field, ())}
        changes[field] = (
            *(name for name in getattr(near_engine, field) if name not in dropped_names),
            *getattr(diff, field),
        )
    return derive_profile(near_engine, diff.version).evolve(
        **changes,
        kernels_as=diff.kernels_as,
        choices=diff.choices,
        sources={"flags": f"asked of {diff.source}", "rules": f"those of {near_engine.ref}"},
    )


def _kept_rows(named_rows: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in named_rows.items() if name not in names}
