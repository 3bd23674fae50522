"""Tables of a profile folder: GPUs, cards, speed, parsers, failures, driver errors, facts.

failures/                   -> Signatures: failures as engines print them (diagnosis/signature.py)
gpus.yaml                   -> GpuTable: traits by compute capability
parsers.yaml                -> ParserTable: how models write tool calls and thoughts
chat_templates.yaml         -> RepairTable: repairs of broken published chat templates
cards.yaml                  -> CardTable: peaks of cards from their data sheets
instances.yaml              -> InstanceTable: cards of machines that clouds rent
speed.yaml                  -> SpeedTable: fractions of the peaks that engines reach
engine_history/KIND/VERSION -> CodeStep: functions, lines and messages that a version changed
engine_checks/KIND          -> CheckIndex: places of an engine's source that raise an error
facts.yaml                  -> Fact list: combinations that pass every rule and still fail
xids.yaml                   -> XidTable: error numbers of NVIDIA's driver
hardware/NAME.json          -> Hardware, as `fitserve probe --json` prints it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.domain import Cluster, Fact, Hardware, Network, Value
from gateway.domain.base import ValidationError
from gateway.domain.value import first_problem
from gateway.engines.common.chat.parsers import ParserTable
from gateway.engines.common.chat.repair import RepairTable
from gateway.engines.common.kernels.cards import CardTable
from gateway.engines.common.kernels.gpus import GpuTable
from gateway.engines.common.speed.machine import SpeedKnowledge, SpeedTable
from gateway.errors import BadRequest, NotFound, SettingsError, near_name
from gateway.profiles.yaml_cache import Documents

if TYPE_CHECKING:
    from gateway.diagnosis.checks.check_index import CheckIndex
    from gateway.diagnosis.code_history import CodeHistory
    from gateway.diagnosis.signatures import Signatures
    from gateway.domain.hardware import XidTable
    from gateway.profiles.cloud_instances import InstanceTable
    from gateway.profiles.machine_names import Term

V = TypeVar("V", bound=Value)
K = TypeVar("K")
E = TypeVar("E")
_REINSTALL = "Install fitserve again: `pip install --force-reinstall fitserve`."


class ProfileTables:
    """Reads each table when it is first asked for."""

    def __init__(self, roots: tuple[Path, ...], cache: Path | None) -> None:
        """roots: the folders, those first whose rows win.
        cache: the store of parsed files (Documents).
        """
        self.roots = roots
        self.documents = Documents(cache)

    def cluster(self, name: str, network: Network | None) -> Cluster | None:
        """A cluster by the form of its machines (`2xgb10`), or by path; None: `name` is one
        machine.

        network: the network between its nodes; None: unknown, or as in the file. Raises BadRequest,
            NotFound.
        """
        # The import is not needed for one machine.
        from gateway.profiles.cluster_forms import build_cluster, read_machines

        if "/" in name or name.endswith(".json"):
            return self._cluster_file(Path(name).expanduser(), network)
        if self._snapshot(name) is not None:
            return None
        machines = read_machines(name, self._machine)
        return build_cluster(machines, network or Network()) if machines else None

    def _cluster_file(self, path: Path, network: Network | None) -> Cluster | None:
        try:
            text = path.read_bytes()
        except OSError:
            return None  # the reader of a machine says why
        if b"fitserve.cluster/" not in text:
            return None
        try:
            cluster = Cluster.model_validate_json(text)
        except ValidationError as error:
            raise BadRequest(
                f"{path} is not a cluster: {first_problem(error)}.",
                hint="docs/plan.md describes the file.",
            ) from None
        return cluster.evolve(network=network) if network else cluster

    def _snapshot(self, name: str) -> Path | None:
        """The file of a snapshot; None: there is none of this name."""
        paths = (root / "hardware" / f"{name}.json" for root in self.roots)
        # The name may be too long for a file.
        with suppress(OSError):
            return next((path for path in paths if path.is_file()), None)
        return None

    def hardware(self, name: str) -> Hardware:
        """A snapshot by name (`2x3090`) or by path."""
        if "/" in name or name.endswith(".json"):
            return self._hardware_file(Path(name).expanduser())
        machine = self._machine(name)
        if machine is None:
            names = [*self.snapshot_names(), *(card.name for card in self.card_table.cards)]
            suggestion = near_name(name, names)
            raise NotFound(
                f"No machine or card is named {name[:80]}"
                f"{f'; did you mean {suggestion}?' if suggestion else '.'}",
                hint=(
                    "`fitserve plan --hardware list` prints the names: 4x4090 is four cards,"
                    " 3090+4090 two unlike ones, 2x(8xh100) two machines. Or give a file that"
                    " `fitserve probe --json` wrote."
                ),
            )
        return machine

    def snapshot_names(self) -> list[str]:
        """Names of machines with a snapshot, sorted."""
        return sorted(
            {file.stem for root in self.roots for file in (root / "hardware").glob("*.json")}
        )

    def _machine(self, name: str) -> Hardware | None:
        """The machine of a snapshot, or of the cards that the name lists; None: neither."""
        if path := self._snapshot(name):
            return self._hardware_file(path)
        from gateway.profiles.cloud_instances import is_instance_name
        from gateway.profiles.machine_composition import bridged_machine, card_key, gpu_key
        from gateway.profiles.machine_names import parse_terms

        paths = [self._snapshot(stem) for stem in self.snapshot_names()]
        machines = [self._hardware_file(path) for path in paths if path]
        counts = Counter(gpu_key(gpu) for machine in machines for gpu in machine.gpus)
        text = (self.instances.cards_of(name) if is_instance_name(name) else None) or name
        terms = parse_terms(text, self.card_table.cards, lambda card: counts[card_key(card)])
        if terms is None:
            return None
        machine = self._machine_of_terms(name, terms, machines)
        return bridged_machine(machine, terms) if "nvlink" in name.lower() else machine

    def _machine_of_terms(
        self, name: str, terms: Sequence[Term], machines: Sequence[Hardware]
    ) -> Hardware:
        """The machine with these cards: a known one, else a composed one."""
        from gateway.profiles.machine_composition import (
            card_key,
            composed_machine,
            gpu_key,
            other_meanings,
        )

        cards = Counter(card_key(term.card) for term in terms for _ in range(term.count))
        is_cut = any(term.part for term in terms)
        for machine in machines:
            if not is_cut and Counter(map(gpu_key, machine.gpus)) == cards:
                return machine.evolve(notes=(*machine.notes, *other_meanings(terms)))
        return composed_machine(name, terms, machines)

    def _hardware_file(self, path: Path) -> Hardware:
        try:
            return Hardware.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadRequest(
                f"The hardware snapshot {path} cannot be read: {error.strerror}.",
                hint="Give a file that `fitserve probe --json` wrote.",
            ) from None
        except ValidationError as error:
            raise BadRequest(
                f"{path} is not a hardware snapshot: {first_problem(error)}.",
                hint="Write one with `fitserve probe --json`.",
            ) from None

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Combinations that are known to fail, of every root."""
        paths = [root / "facts.yaml" for root in self.roots]
        return tuple(
            validate(path, Fact, entry)
            for path in paths
            if path.is_file()
            for entry in self.document(path)
        )

    @cached_property
    def gpus(self) -> GpuTable:
        """Traits by compute capability; a user's file adds to ours and goes first."""
        tables = self._tables("gpus.yaml", GpuTable)
        return GpuTable(
            sources=_merge([table.sources for table in tables]),
            capabilities=_merge([table.capabilities for table in tables]),
            schemes=_merge([table.schemes for table in tables]),
        )

    @cached_property
    def card_table(self) -> CardTable:
        """Peaks of cards; a user's file adds to ours and goes first."""
        tables = self._tables("cards.yaml", CardTable)
        return CardTable(
            sources=_merge([table.sources for table in tables]),
            cards=tuple(card for table in tables for card in table.cards),
        )

    @cached_property
    def instances(self) -> InstanceTable:
        """The cards of machines that clouds rent; a user's file adds to ours and goes first."""
        from gateway.profiles.cloud_instances import InstanceTable  # only where a name is unknown

        tables = self._tables("instances.yaml", InstanceTable)
        return InstanceTable(families=tuple(row for table in tables for row in table.families))

    @cached_property
    def speed_knowledge(self) -> SpeedKnowledge:
        """The speeds of GPUs and engines. In the table of speeds that engines reach a user's file
        wins over ours."""
        path = self._nearest_file("speed.yaml")
        return SpeedKnowledge(self.card_table, validate(path, SpeedTable, self.document(path)))

    @cached_property
    def parsers(self) -> ParserTable:
        """How models write tool calls and thoughts; a user's rows go first."""
        tables = self._tables("parsers.yaml", ParserTable)
        return ParserTable(
            tools=tuple(row for table in tables for row in table.tools),
            reasoning=tuple(row for table in tables for row in table.reasoning),
            repairs=tuple(
                row
                for table in self._tables("chat_templates.yaml", RepairTable)
                for row in table.repairs
            ),
        )

    @cached_property
    def xids(self) -> XidTable:
        """Error numbers of NVIDIA's driver; a user's file wins over ours."""
        from gateway.domain.hardware import XidTable  # not before it is needed: a plan does without

        path = self._nearest_file("xids.yaml")
        return validate(path, XidTable, self.document(path))

    @cached_property
    def signatures(self) -> Signatures:
        """The failure signatures of every root, the user's before ours."""
        from gateway.diagnosis.cures import CureRows
        from gateway.diagnosis.likely import KindWords
        from gateway.diagnosis.signature import (
            Circumstance,
            ComponentFolder,
            ConditionalSteps,
            EndingLine,
            EnginePackages,
            Feature,
            FrameMark,
            ImportName,
            ProgressLine,
            Remedy,
            StructuralSignature,
            TextSignature,
        )
        from gateway.diagnosis.signatures import FailureRows, Signatures

        rows = FailureRows(
            texts=self._failure_rows("texts/*.yaml", TextSignature),
            structures=self._failure_rows("structures.yaml", StructuralSignature),
            cures=CureRows(
                remedies=self._failure_rows("remedies.yaml", Remedy),
                levers=self._failure_rows("levers.yaml", ConditionalSteps),
                circumstances=self._failure_rows("circumstances.yaml", Circumstance),
                versions=self._versions(),
                names=cache(self._names_by_version),
                flags=cache(self._flags_by_version),
                history=cache(self._history),
                checks=cache(self._checks),
                packages=self._failure_rows("packages.yaml", EnginePackages),
                imports=self._failure_rows("imports.yaml", ImportName),
                folders=self._failure_rows("folders.yaml", ComponentFolder),
                features=self._failure_rows("features.yaml", Feature),
            ),
            progress=self._failure_rows("progress.yaml", ProgressLine),
            endings=self._failure_rows("endings.yaml", EndingLine),
            frames=self._failure_rows("frames.yaml", FrameMark),
            words=self._failure_rows("words.yaml", KindWords),
        )
        cured = {row.kind for row in rows.cures.remedies}
        for kind in sorted({row.kind for row in (*rows.texts, *rows.structures)} - cured):
            raise SettingsError(
                f"The failure kind {kind} has no cure.",
                hint=f"Add an item `kind: {kind}` with steps to failures/remedies.yaml.",
            )
        return Signatures(rows)

    def _names_by_version(self, kind: str, field: str) -> dict[str, frozenset[str]]:
        """The names in a field of each described version of a kind of engine, by version."""
        entries_by_version = self._entries_by_version(kind, field)
        return {version: frozenset(entries) for version, entries in entries_by_version.items()}

    def _flags_by_version(self, kind: str) -> dict[str, dict[str, Any]]:
        """The flags of each described version of a kind of engine, as its profile has them."""
        return self._entries_by_version(kind, "flags")

    def _entries_by_version(self, kind: str, field: str) -> dict[str, dict[str, Any]]:
        """The entries of a field of each described version, by version and name; those of a list
        without values."""
        entries: dict[str, dict[str, Any]] = {}
        for path in self._files_of_kind("engines", kind):
            entries[path.stem] = {}
            for document in self.documents.read(path):
                if isinstance(document, dict):
                    entries[path.stem] |= _entries_by_name(document.get(field))
        for path in self._files_of_kind("engine_diffs", kind):
            diff = self.document(path)
            near_entries = entries.get(str(diff["guessed_from"]).rpartition("==")[2], {})
            missing_names = (diff.get("without") or {}).get(field) or ()
            common_entries = {
                name: value for name, value in near_entries.items() if name not in missing_names
            }
            entries[path.stem] = common_entries | _entries_by_name(diff.get(field))
        return entries

    def _files_of_kind(self, folder: str, kind: str) -> Iterator[Path]:
        """The files of a kind of engine in a folder of each root, the user's last."""
        for root in reversed(self.roots):
            yield from (root / folder / kind).glob("*.yaml")

    def _history(self, kind: str) -> CodeHistory:
        """The history of an engine's code. A step is read when a diagnosis asks for it."""
        from gateway.diagnosis.code_history import CodeHistory, CodeStep, decode

        def read(path: Path) -> CodeStep:
            try:
                return decode(path.read_bytes())
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"The history {path} cannot be read: {error}.", hint=_REINSTALL
                ) from None

        paths = {
            path.name: path
            for root in reversed(self.roots)
            for path in (root / "engine_history" / kind).glob("*")
        }
        return CodeHistory(
            tuple(paths),
            lambda version: read(paths[version]),
            lambda: read(self._nearest_file(f"engine_history/{kind}.all")),
        )

    def _checks(self, kind: str) -> CheckIndex:
        """The places of an engine's source that raise an error, read when a diagnosis asks."""
        from gateway.diagnosis.checks.check_index import CheckIndex
        from gateway.diagnosis.checks.check_site import CheckBook, decode

        def read() -> CheckBook:
            path = self._nearest_file(f"engine_checks/{kind}")
            try:
                return decode(path.read_bytes())
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"The checks {path} cannot be read: {error}.", hint=_REINSTALL
                ) from None

        return CheckIndex(read)

    def _versions(self) -> dict[str, tuple[str, ...]]:
        """The described versions of each kind of engine, as their files are named."""
        refs: dict[str, set[str]] = {}
        for folder in ("engines", "engine_diffs"):
            for path in (file for root in self.roots for file in (root / folder).glob("*/*.yaml")):
                refs.setdefault(path.parent.name, set()).add(path.stem)
        return {kind: tuple(sorted(versions)) for kind, versions in refs.items()}

    def _failure_rows(self, files: str, model: type[V]) -> tuple[V, ...]:
        """The rows of these files of `failures/`, the files of a folder by name."""
        paths = [path for root in self.roots for path in sorted((root / "failures").glob(files))]
        return tuple(
            validate(path, model, entry) for path in paths for entry in self.document(path) or ()
        )

    def _tables(self, name: str, model: type[V]) -> list[V]:
        """The file of this name in each folder that has one, the user's first."""
        paths = [root / name for root in self.roots]
        return [validate(path, model, self.document(path)) for path in paths if path.is_file()]

    def _nearest_file(self, name: str) -> Path:
        """The file of the first folder that has it. Raises SettingsError."""
        for root in self.roots:
            if (path := root / name).is_file():
                return path
        raise SettingsError(
            f"The profile {name} is missing: {', '.join(map(str, self.roots))} do not have it.",
            hint=_REINSTALL,
        )

    def document(self, path: Path) -> Any:
        """The file's one document."""
        return next(iter(self.documents.read(path)), None)


def _merge(mappings: Sequence[Mapping[K, E]]) -> dict[K, E]:
    """The entries of all mappings; the first mapping with a name wins."""
    return {name: entry for mapping in reversed(mappings) for name, entry in mapping.items()}


def _entries_by_name(entries: Any) -> dict[str, Any]:
    return dict(entries) if isinstance(entries, dict) else dict.fromkeys(entries or ())


@cache
def shipped_profiles() -> Path:
    """The folder of the shipped profiles: in the package, or next to it in a source checkout.

    Raises SettingsError.
    """
    packaged_data = Path(__file__).parent / "data"
    checkout = Path(__file__).parents[2] / "profiles"
    for folder in (packaged_data, checkout):
        if folder.is_dir():
            return folder
    raise SettingsError(
        f"The profiles of fitserve are missing: there is no folder {packaged_data} and no"
        f" {checkout}.",
        hint=_REINSTALL,
    )


def validate(path: Path, model: type[V], data: Any) -> V:
    """The data of the file as a value of the model. Raises SettingsError.

    Of shipped files nothing is checked: tests have validated them.
    """
    try:
        if path.is_relative_to(shipped_profiles()):
            return model.trust_data(data)
        return model.model_validate(data)
    except ValidationError as error:
        raise SettingsError(
            f"The profile {path} is wrong at {first_problem(error)}.",
            hint="Correct this field. profiles/engines has files of the same form.",
        ) from None
