"""Profiles: knowledge of engines, failures and machines as YAML and JSON that users can extend.

    engines/KIND/VERSION.yaml        -> Engine
    engine_diffs/KIND/VERSION.yaml   -> ProfileDiff: an engine version without rules, as the
                                        difference to a version with rules
    everything else                  -> gateway/profiles/profile_tables.py

A folder named by FITSERVE_PROFILES_DIR is searched first, so its files add to, or win over, the
shipped ones.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from gateway.domain import Engine, EngineRef, Hardware
from gateway.domain.image_name import AllowedImages, repository
from gateway.domain.profile_diff import ProfileDiff, apply_diff, derive_profile
from gateway.domain.release import release
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.kind_rules import rules_class
from gateway.errors import BadRequest, NotFound, SettingsError
from gateway.profiles.knowledge_folder import KnowledgeFolder
from gateway.profiles.profile_tables import ProfileTables, shipped_profiles, validate
from gateway.profiles.rule_sets import RuleSets

# A version as part of a file name, which cannot leave its folder.
_WORD = re.compile(r"[\w.+-]{1,60}", re.ASCII)
_VERSION = re.compile(r"\d+(\.\d+)+[A-Za-z0-9.+-]{0,40}")


# Files of the form before `failures/`, and where their rows stand now.
_OLD_FAILURES = {
    "failures.yaml": "texts/*.yaml, structures.yaml, remedies.yaml, one list of rows each",
    "failure_words.yaml": "words.yaml, a list of rows",
}


class Profiles(ProfileTables):
    """Profiles, read on demand: a plan needs one engine, not all of them.

    extra: a user's folder, searched first.
    cache: the file of the cache (Documents).
    data: the data folder. It has the knowledge bundle in use (gateway/profiles/knowledge_folder.py)
        and profiles that engine versions gave of themselves
        (gateway/engines/inquiry/learned_profile.py).
    roots: the folders of another process's Profiles, in place of these.
    """

    def __init__(
        self,
        extra: Path | None = None,
        cache: Path | None = None,
        data: Path | None = None,
        roots: tuple[Path, ...] = (),
    ) -> None:
        if extra is not None and not extra.is_dir():
            raise SettingsError(
                f"The profiles folder {extra} does not exist.",
                hint="Set FITSERVE_PROFILES_DIR to an existing folder, or unset it.",
            )
        for name, now in _OLD_FAILURES.items():
            if extra is not None and (extra / name).exists():
                raise SettingsError(
                    f"The file {extra / name} has a form that is no longer read.",
                    hint=f"Move its rows into {extra / 'failures'}/: {now}.",
                )
        self._extra = extra
        self._data = data
        self._learned_path = data / "learned" if data is not None else None
        super().__init__(roots or self._present_roots(), cache)
        self._clear_engines()

    def _present_roots(self) -> tuple[Path, ...]:
        """The folders now: the user's, the taken bundle's or the shipped one, the learned one."""
        bundle_profiles = (
            KnowledgeFolder(self._data).profiles_in_use() if self._data is not None else None
        )
        return (
            *([self._extra] if self._extra else []),
            bundle_profiles or shipped_profiles(),
            *([self._learned_path] if self._learned_path else []),
        )

    def reload(self) -> None:
        """Read from the folders that are in use now, after a change of the knowledge bundle."""
        self.roots = self._present_roots()
        for kind in type(self).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, cached_property):
                    self.__dict__.pop(name, None)
        self._clear_engines()

    def _clear_engines(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._learned_engines: dict[Path, tuple[int, Engine]] = {}
        self._heads: dict[str, dict[str, Any]] = {}
        self._known_rules: dict[str, EngineRules | None] = {}
        self._rule_sets = RuleSets(self.documents, self._rules_folder)

    @cached_property
    def engine_files(self) -> dict[str, Path]:
        """`kind==version` -> file, newest version of each kind first: those that are considered
        where no version is named."""
        return self._files("engines")

    @cached_property
    def diff_files(self) -> dict[str, Path]:
        """`kind==version` -> file, for versions that are described by their difference from a known
        one. A plan considers such a version only where a wish names it."""
        return {
            ref: path
            for ref, path in self._files("engine_diffs").items()
            if ref not in self.engine_files
        }

    def _files(self, folder: str) -> dict[str, Path]:
        files: dict[str, Path] = {}
        for root in self.roots:
            for path in (root / folder).glob("*/*.yaml"):
                files.setdefault(f"{path.parent.name}=={path.stem}", path)
        return dict(sorted(files.items(), key=lambda row: _version_key(row[0]), reverse=True))

    def engine(self, ref: str) -> Engine:
        """The engine `kind==version`, derived from the nearest version if no profile describes it.

        Raises NotFound that names the nearest known version.
        """
        if ref not in self._engines:
            if not self.describes(ref):
                equal_ref = self._equal_ref(ref)
                return self.engine(equal_ref) if equal_ref else self._derive_engine(ref)
            if self._learned_path is not None and self.engine_files.get(ref, Path()).is_relative_to(
                self._learned_path
            ):
                return self._learned_profile(self.engine_files[ref])
            if ref in self.engine_files:
                path = self.engine_files[ref]
                engine = validate(path, Engine, self._merge(path))
            else:
                path = self.diff_files[ref]
                diff = validate(path, ProfileDiff, self.document(path))
                engine = apply_diff(self.engine(diff.guessed_from), diff)
            if engine.ref != ref:
                raise SettingsError(
                    f"The profile {path} describes {engine.ref}, but its name stands for {ref}.",
                    hint="Correct its `kind` and `version`, or its name.",
                )
            self._engines[ref] = engine
        return self._engines[ref]

    def engine_in_image(self, engine: EngineRef) -> Engine:
        """The profile of an engine in its image. Raises NotFound.

        An image of another publisher has the profile that it gave of itself; before the inquiry,
        the profile of its declared version.
        """
        described_engine = self.engine(str(engine))
        if engine.image in (None, described_engine.image):
            return described_engine
        path = self._learned_file(engine)
        if path is not None and path.is_file():
            return self._learned_profile(path)
        return derive_profile(described_engine, described_engine.version, engine.image)

    def learned_in(self, engine: EngineRef) -> Path:
        """The folder for the profile that an engine in its image gives of itself."""
        if self._learned_path is None:
            raise SettingsError(
                "Profiles that engines give of themselves need a data folder, and none is set.",
                hint="Set FITSERVE_DATA_DIR.",
            )
        if engine.image in (None, self.engine(str(engine)).image):
            return self._learned_path
        return (
            self._learned_path
            / "images"
            / hashlib.sha256(str(engine.image).encode()).hexdigest()[:16]
        )

    def _learned_file(self, engine: EngineRef) -> Path | None:
        return (
            self.learned_in(engine) / "engines" / engine.kind / f"{engine.version}.yaml"
            if self._learned_path
            else None
        )

    def _learned_profile(self, path: Path) -> Engine:
        """The profile that an engine gave of itself, read again if the file has changed."""
        written_ns = path.stat().st_mtime_ns
        if self._learned_engines.get(path, (0,))[0] != written_ns:
            self._learned_engines[path] = written_ns, validate(path, Engine, self.document(path))
        return self._learned_engines[path][1]

    def needs_description(self, engine: EngineRef) -> bool:
        """Whether only the engine itself can describe it: no shipped profile, or another image."""
        if not self.describes(str(engine)) or engine.image not in (
            None,
            self.engine(str(engine)).image,
        ):
            return True
        path = self.engine_files.get(str(engine))
        return (
            path is not None
            and self._learned_path is not None
            and path.is_relative_to(self._learned_path)
        )

    def has_learned(self, engine: EngineRef, identity: str) -> bool:
        """Whether the engine has described itself, in the image with the id `identity`."""
        path = self._learned_file(engine)
        if path is None or not path.is_file():
            return False
        source = self._learned_profile(path).sources.get("flags", "")
        return source == f"asked of {identity}" or not source.startswith("asked of sha256:")

    @property
    def _refs(self) -> list[str]:
        return sorted([*self.engine_files, *self.diff_files], key=_version_key, reverse=True)

    def describes(self, ref: str) -> bool:
        """Whether a profile exists, also if the running gateway has just learned it."""
        if ref not in self.engine_files and ref not in self.diff_files and self._has_file(ref):
            for name in ("engine_files", "diff_files", "images"):
                self.__dict__.pop(name, None)
        return ref in self.engine_files or ref in self.diff_files

    def _has_file(self, ref: str) -> bool:
        """Whether a folder has a profile of this engine now."""
        name = ref[:200].replace("==", "/", 1) + ".yaml"  # within the limit of a file's name
        return any(
            (root / folder / name).is_file()
            for root in self.roots
            for folder in ("engines", "engine_diffs")
        )

    def _equal_ref(self, ref: str) -> str | None:
        """The described engine with the same version in another spelling: 0.33 is 0.33.0."""
        kind, _, version = ref.partition("==")
        if not _VERSION.fullmatch(version):
            return None
        wanted_key = _version_key(ref)
        return next(
            (
                known_ref
                for known_ref in (*self.engine_files, *self.diff_files)
                if known_ref.startswith(f"{kind}==") and _version_key(known_ref) == wanted_key
            ),
            None,
        )

    def newest_of_each_kind(self) -> list[Engine]:
        """The newest engine with rules of each kind."""
        refs = {ref.partition("==")[0]: ref for ref in reversed(self.engine_files)}
        return [self.engine(ref) for ref in refs.values()]

    def _derive_engine(self, ref: str) -> Engine:
        """A derived profile, never kept: the version may still describe itself. Raises NotFound."""
        kind, _, version = ref.partition("==")
        if not _VERSION.fullmatch(version) or not any(
            engine_ref.startswith(f"{kind}==") for engine_ref in self.engine_files
        ):
            raise NotFound(
                f"There is no profile for the engine {ref}.", hint=_nearest_hint(ref, self._refs)
            )
        # The architectures are unknown: new versions have more.
        return derive_profile(self.nearest(ref), version).evolve(architectures=())

    def nearest(self, ref: str) -> Engine:
        """The newest known version of the kind that is not newer than `ref`, else the oldest.

        Raises NotFound for an unknown kind.
        """
        kind = ref.partition("==")[0]
        same_kind = [
            engine_ref
            for engine_ref in self.engine_files
            if engine_ref.partition("==")[0] == kind
            and self.engine(engine_ref).guessed_from is None
        ]
        older_refs = [
            engine_ref for engine_ref in same_kind if _version_key(engine_ref) <= _version_key(ref)
        ]
        if not same_kind or not _WORD.fullmatch(ref.partition("==")[2]):
            kinds = ", ".join(
                sorted({engine_ref.partition("==")[0] for engine_ref in self.engine_files})
            )
            raise NotFound(
                f"There is no engine {ref}.",
                hint=f"Write KIND==VERSION, as vllm==0.33.0; known kinds: {kinds}.",
            )
        return self.engine((older_refs or same_kind[-1:])[0])

    def rules(self, engines: Iterable[Engine]) -> dict[str, EngineRules]:
        """The rules of these engine versions, for versions with a folder of rules."""
        return {
            engine.ref: rules
            for engine in engines
            if (rules := self._rules_of(engine.ref)) is not None
        }

    def _rules_of(self, ref: str) -> EngineRules | None:
        """The rules of a version, or those of the version that its profile names; None: none."""
        if ref not in self._known_rules:
            # A version without rules uses those of the version that its profile names.
            ruled = self.engine(ref).guessed_from or ref
            folder = (self.engine_files.get(ruled) or self.engine_files[ref]).with_suffix("")
            kind = rules_class(ref.partition("==")[0])
            fields: dict[str, Any] = {
                name: validate(folder / f"{name}.yaml", file, rules)
                for name, file in kind.FILES.items()
                if (rules := self._rule_sets.read(folder, name)) is not None
            }
            if isinstance(linear := fields.get("linear"), LinearRules):
                fields["linear"] = self._add_shared_kernels(ref, linear)
            choices = self.engine(ref).choices
            for name in fields.keys() & {choice.rules_file for choice in choices}:
                file_choices = [choice for choice in choices if choice.rules_file == name]
                other_rules = {
                    choice.rules: getattr(self._rules_of(choice.rules), name)
                    for choice in file_choices
                    if choice.rules
                }
                fields[name] = fields[name].add_choices(file_choices, other_rules)
            self._known_rules[ref] = kind(**fields) if fields else None
        return self._known_rules[ref]

    def _add_shared_kernels(self, ref: str, linear: LinearRules) -> LinearRules:
        """The rules of linear kernels; those whose code is a further version's are taken there."""
        kernels = dict(linear.kernels)
        for version, names in self.engine(ref).kernels_as.items():
            rules = self._rules_of(version)
            if rules is not None and rules.linear is not None:
                other_kernels = rules.linear.kernels
                kernels |= {
                    name: other_kernels[name]
                    for name in names
                    if name in kernels.keys() & other_kernels
                }
        return linear if kernels == linear.kernels else linear.evolve(kernels=kernels)

    def _rules_folder(self, ref: str) -> Path | None:
        file = self.engine_files.get(ref)
        return file.with_suffix("") if file is not None else None

    def install_file(self, engine: Engine) -> Path | None:
        """The lock file that the engine's recipe names, from the folder of its profile."""
        if engine.install is None or engine.install.lock is None:
            return None
        return self.engine_files[engine.ref].with_name(engine.install.lock)

    def engines(self, names: tuple[str, ...] = (), *, device: str) -> list[Engine]:
        """The engines that `names` allows for this device ("cuda" or "cpu"), newest first; empty
        `names`: all."""
        refs: list[str] = []
        for want in names:
            if "==" in want:
                refs.append(self.engine(want).ref)
            else:
                kind_refs = [ref for ref in self.engine_files if ref.partition("==")[0] == want]
                if not kind_refs:
                    kinds = ", ".join(sorted({ref.partition("==")[0] for ref in self.engine_files}))
                    raise NotFound(f"There is no engine {want}.", hint=f"Known kinds: {kinds}.")
                refs.extend(kind_refs)
        return [
            self.engine(ref)
            for ref in refs or self.engine_files
            if names or self._device(ref) == device
        ]

    def engines_for(
        self, machine: Hardware, names: tuple[str, ...] = (), image: str | None = None
    ) -> list[Engine]:
        """The engines that `names` allows on this machine, newest first; empty `names`: all.

        image: the image of the one wanted engine. Raises BadRequest, NotFound.
        """
        if image is not None:
            kind, _, version = (names[0] if names else "").partition("==")
            if not version:
                raise BadRequest(
                    f"The engine in the image {image} is unknown.",
                    hint="Name the engine: --engine KIND==VERSION.",
                    param="engines",
                )
            return [self.engine_in_image(EngineRef(kind=kind, version=version, image=image))]
        return self.engines(
            names,
            device="cuda" if any(gpu.reservation_reason is None for gpu in machine.gpus) else "cpu",
        )

    def references(self, device: str) -> list[EngineRef]:
        """Names and images of all described versions for this device, versions with rules first.

        The profiles of the versions are not read.
        """
        references = [
            EngineRef(
                kind=ref.partition("==")[0],
                version=ref.partition("==")[2],
                image=self._profile_head(ref).get("image"),
            )
            for ref in self.engine_files
            if self._device(ref) == device
        ]
        kinds = {reference.kind: reference for reference in reversed(references)}
        for ref in self.diff_files:
            kind, _, version = ref.partition("==")
            # Versions of a kind have images of one name.
            if (sibling := kinds.get(kind)) is not None:
                references.append(
                    sibling.evolve(
                        version=version,
                        image=sibling.image and sibling.image.replace(sibling.version, version),
                    )
                )
        return references

    def _device(self, ref: str) -> str:
        """The engine's device, from the first document of its file: the second is much larger."""
        return (
            self._engines[ref].device
            if ref in self._engines
            else str(self._profile_head(ref).get("device"))
        )

    @cached_property
    def images(self) -> frozenset[str]:
        """The image of every engine."""
        images = {ref: str(self._profile_head(ref).get("image")) for ref in self.engine_files}
        # Versions of a kind have images of one name.
        derived_images = {
            image.replace(ref.partition("==")[2], diff_file.partition("==")[2])
            for diff_file in self.diff_files
            for ref, image in images.items()
            if ref.partition("==")[0] == diff_file.partition("==")[0]
        }
        return frozenset(images.values()) | derived_images

    def allowed_images(self, named_images: str | None) -> AllowedImages:
        """The images that may be started: the named ones, else the repositories of all profiles.

        A profile that an image gave of itself (`learned`) allows nothing.
        """
        if named_images is not None:
            return AllowedImages(named_images.split(","))
        shipped_refs = [
            ref
            for ref, path in self.engine_files.items()
            if self._learned_path is None or not path.is_relative_to(self._learned_path)
        ]
        return AllowedImages(
            repository(str(self._profile_head(ref).get("image"))) for ref in shipped_refs
        )

    def _profile_head(self, ref: str) -> dict[str, Any]:
        """The part of an engine's file before the generated one."""
        if ref not in self._heads:
            head = self.documents.first(self.engine_files[ref])
            self._heads[ref] = head if isinstance(head, dict) else {}
        return self._heads[ref]

    def _merge(self, path: Path) -> dict[str, Any]:
        """An engine profile: a handwritten document merged with a generated one.

        `scripts/engine-profile` writes the generated document.
        """
        documents = self.documents.read(path)
        if not all(isinstance(document, dict) for document in documents):
            raise SettingsError(
                f"The profile {path} is not a mapping.",
                hint="Write lines `FIELD: VALUE`, as the files in profiles/engines have.",
            )
        return {name: value for document in documents for name, value in document.items()}


def _nearest_hint(ref: str, choices: Iterable[str]) -> str:
    """A hint that names the nearest version of the kind, else the most similar name."""
    refs = list(choices)
    same_kind = [
        engine_ref for engine_ref in refs if engine_ref.startswith(ref.partition("==")[0] + "==")
    ]
    older_refs = [
        engine_ref for engine_ref in same_kind if _version_key(engine_ref) <= _version_key(ref)
    ]
    near_refs = (
        older_refs[:1] or same_kind[-1:] or difflib.get_close_matches(ref, refs, n=1, cutoff=0.0)
    )
    known_refs = f"; known are {', '.join(same_kind)}" if len(same_kind) > 1 else ""
    return f"The nearest known one is {near_refs[0]}{known_refs}." if near_refs else ""


def _version_key(ref: str) -> tuple[Version, str]:
    kind, _, version = ref.partition("==")
    return release(version), kind
