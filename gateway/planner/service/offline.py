"""Plans in this process, without a gateway that runs: `plan` (`gateway.plan`) is for notebooks,
tests and benchmarks, `OfflinePlanner` the
same for many models and machines. All come to `decide_with`, for a model that was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack

from pydantic import ValidationError

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.scope import standing
from gateway.domain import (
    Adapter,
    ChatTemplate,
    Decision,
    Engine,
    EngineAnswer,
    EngineRef,
    Fact,
    Hardware,
    ModelSpec,
    Policy,
    Question,
    Scalar,
    Sharing,
    Wish,
)
from gateway.domain.image_name import exact
from gateway.domain.plan import ALONE
from gateway.domain.value import first_problem
from gateway.domain.wish import Goal
from gateway.engines.common.planning_input import PlanningInput
from gateway.errors import BadRequest, HostError, NeedsRemoteCode
from gateway.models.adapter import check_base
from gateway.models.catalog.catalog import gather, load, load_adapter, load_drafter
from gateway.models.catalog.hub import Hub
from gateway.models.drafter import Drafter
from gateway.planner.asked import open_questions
from gateway.planner.decide import decide
from gateway.planner.service.alternatives import Unplanned, with_alternatives
from gateway.planner.service.checking import LIMIT_S, Checked, Forecast, checked, model_files
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings, load_settings

# Only for types: a command must not pay for what only asking needs.
if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer


def decide_with(
    profiles: Profiles,
    engines: Sequence[Engine],
    spec: ModelSpec,
    drafter: Drafter | None,
    hardware: Hardware,
    wish: Wish,
    facts: Iterable[Fact] = (),
    claims: Mapping[str, int] | None = None,
    hardware_name: str = "this machine",
    answers: Mapping[Question, EngineAnswer] | None = None,
    everywhere: Mapping[str, str] | None = None,
    sharing: Sharing = ALONE,
    adapters: tuple[Adapter, ...] = (),
) -> Decision:
    """The decision for a model and a machine, by the rules and the facts of the profiles, and by
    `facts`; `answers` are what engines
    said of this model; `everywhere`: environment variables for all engines; `sharing`: as `decide`
    wants it; `adapters`: those of the wish. Raises BadFlag, and NeedsRemoteCode where every engine
    that has the architecture would run the repository's code.
    """
    if wish.chat_template is not None:
        from gateway.models.catalog.template_syntax import check  # not before there is one

        check(wish.chat_template.text, wish.chat_template.name)
    given = PlanningInput(
        spec,
        hardware,
        wish,
        KnownFacts((*profiles.facts, *facts)),
        claims or {},
        profiles.gpus,
        answers or {},
        profiles.pace,
        profiles.parsers,
        everywhere or {},
        sharing,
        adapters,
        drafter,
        hardware_name,
    )
    found = decide(given, engines, profiles.rules(engines))
    verdicts = {one.verdict for one in found.rejected}
    if (
        not found.plans
        and "untrusted_code" in verdicts
        and verdicts <= {"untrusted_code", "unsupported_architecture"}
    ):
        raise NeedsRemoteCode.of(spec.source, spec.remote_code)
    return found


def read_adapters(wish: Wish, spec: ModelSpec, hub: Hub) -> tuple[Adapter, ...]:
    """The LoRA adapters of the wish, which fit the model. Raises BadModel."""
    adapters = tuple(load_adapter(name, source, hub=hub) for name, source in wish.loras.items())
    for adapter in adapters:
        check_base(adapter, spec)
    return adapters


class WishFields(TypedDict, total=False):
    """What a user may wish for beside the model and the engines: the fields of Wish."""

    revision: str | None
    commits: dict[str, str]
    image: str | None
    tensor_parallel: int | None
    replicas: int | None
    goal: Goal
    concurrency: int | None
    gpus: Literal["all", "few"] | int | tuple[str, ...] | None
    context: int | None
    min_context: int | None
    max_context: int | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    chat_template: ChatTemplate | None
    loras: dict[str, str]
    drafter: str | None
    speculative: Literal["auto", "off", "mtp", "ngram"] | None
    num_speculative_tokens: int | None
    args: dict[str, Scalar]
    env: dict[str, str]
    policy: Policy


def plan(
    source: str | Path,
    hardware: str | Path | Hardware | None = None,
    engines: Iterable[str] = (),
    **wish: Unpack[WishFields],
) -> Decision:
    """How a model would be served, and why: all plans, best first, and what was ruled out. Nothing
        is started.

        decision = gateway.plan("models/llama-3.1-8b", hardware="2x3090", engines=["vllm"],
        min_context=8192)

    source: a folder, or a Hugging Face repository. hardware: a snapshot by name, the path of a
    snapshot's file, or a machine that was read; None: this machine. engines: "kind" or
    "kind==version"; empty: all. wish: the other fields of Wish. Profiles and the Hugging Face Hub
    are those of the environment (FITSERVE_PROFILES_DIR, FITSERVE_HF_ENDPOINT, FITSERVE_HF_TOKEN).

    Raises BadRequest, BadModel, BadFlag, NotFound.
    """
    try:
        wanted = Wish(name="plan", source=str(source), engines=tuple(engines), **wish)
    except ValidationError as error:
        raise BadRequest(
            f"{first_problem(error)}.", hint="docs/plan.md lists what can be wished for."
        ) from None
    return OfflinePlanner.from_environment().decide(wanted, hardware)


class OfflinePlanner:
    """Plans by the profiles alone, without a gateway that runs. A model and a drafter are read once
    each."""

    def __init__(self, profiles: Profiles, hub: Hub, settings: Settings | None = None) -> None:
        """settings: what they say of this machine's GPUs and RAM, and of all engines' environment;
        None: nothing."""
        self.profiles = profiles
        self._hub = hub
        self._settings = settings
        self._specs: dict[tuple[str, str | None, bool, tuple[tuple[str, str], ...]], ModelSpec] = {}
        self._drafters: dict[tuple[str, tuple[tuple[str, str], ...]], Drafter] = {}

    @classmethod
    def from_environment(cls) -> Self:
        settings = load_settings()
        data = settings.data
        profiles = Profiles(
            settings.profiles_dir, cache=data / "profiles.json", learned=data / "learned"
        )
        token = settings.hf_token.get_secret_value() if settings.hf_token is not None else None
        return cls(
            profiles,
            Hub(settings.hf_endpoint, token, data / "hub", models=settings.models),
            settings,
        )

    def machine(self, hardware: str | Path | Hardware | None) -> tuple[str, Hardware]:
        """What decisions call the machine, and the machine."""
        if isinstance(hardware, Hardware):
            return "the given hardware", hardware
        if hardware is not None:
            return str(hardware), self.profiles.hardware(str(hardware))
        from gateway.machine.gpu_watch import kept_here  # not before this machine is asked for
        from gateway.machine.probe import probe

        wanted, ram = (
            (self._settings.gpus, self._settings.ram_bytes)
            if self._settings is not None
            else (None, None)
        )
        return "this machine", kept_here(Path.cwd(), wanted, ram).mark(probe(Path.cwd()))

    def engines(self, wish: Wish, machine: Hardware) -> list[Engine]:
        """The engine versions that are considered."""
        return self.profiles.engines_for(machine, wish.engines, wish.image)

    def decide(self, wish: Wish, hardware: str | Path | Hardware | None = None) -> Decision:
        return self.decide_on(wish, *self.machine(hardware))

    def explained(
        self,
        decision: Decision,
        wish: Wish,
        machine: Hardware,
        engines: Sequence[Engine] | None = None,
    ) -> Decision:
        """Where there is no plan, with what would fit instead. engines: those alone."""
        facts, considered = (
            self._measured(machine),
            self.engines(wish, machine) if engines is None else engines,
        )

        def now(spec: ModelSpec, wish: Wish) -> Decision:
            return decide_with(
                self.profiles,
                considered,
                spec,
                None,
                machine,
                wish,
                facts,
                everywhere=self._everywhere,
            )

        return with_alternatives(
            decision,
            Unplanned(self._spec(wish), wish, now, partial(load, hub=self._hub)),
            self._hub,
        )

    def decide_on(self, wish: Wish, name: str, machine: Hardware) -> Decision:
        """The decision for a machine that was read before."""
        drafter, spec, facts = self._drafter(wish), self._spec(wish), self._measured(machine)
        engines = self.engines(wish, machine)
        return decide_with(
            *(self.profiles, engines, spec, drafter, machine, wish, facts),
            hardware_name=name,
            everywhere=self._everywhere,
            adapters=read_adapters(wish, spec, self._hub.with_commits(wish.commits)),
        )

    def decide_here(self, wish: Wish, startable: Startable, facts: Iterable[Fact] = ()) -> Decision:
        """What a gateway with this data folder would start on this machine, and what engines would
        give that are not here."""
        name, machine = self.machine(None)
        drafter, spec = self._drafter(wish), self._spec(wish)
        adapters = read_adapters(wish, spec, self._hub.with_commits(wish.commits))
        here, away = startable.split(self.engines(wish, machine))
        if not here and not away:
            raise startable.refusal(away, spec.source)
        images = self.profiles.images | ({wish.image} if wish.image else set())
        learned = standing(facts, machine.driver, images)

        def decided(engines: list[Engine]) -> Decision:
            return decide_with(
                *(self.profiles, engines, spec, drafter, machine, wish, learned),
                hardware_name=name,
                everywhere=self._everywhere,
                adapters=adapters,
            )

        return startable.told(
            self.explained(decided(here), wish, machine, here), here, away, wish, decided
        )

    async def check_on(
        self,
        wish: Wish,
        name: str,
        machine: Hardware,
        inquirer: Inquirer,
        startable: Startable | None = None,
    ) -> Checked[Decision]:
        """As `decide_on`, once the engines that are here were asked about it; startable: of these
        alone."""
        if wish.image is not None:
            from gateway.planner.service.images import hear  # asyncio, which most plans do not need

            (one,) = self.engines(wish, machine)
            with suppress(HostError):  # the question about the model says why
                await hear(
                    EngineRef(kind=one.kind, version=one.version, image=one.image),
                    self.profiles,
                    inquirer,
                    LIMIT_S,
                )
        drafter, spec, engines = self._drafter(wish), self._spec(wish), self.engines(wish, machine)
        if startable is not None:
            engines, away = startable.split(engines)
            if not engines:
                raise startable.refusal(away, spec.source)
        facts, everywhere = self._measured(machine), self._everywhere
        decided = partial(
            decide_with,
            *(self.profiles, engines, spec, drafter, machine, wish, facts),
            hardware_name=name,
            everywhere=everywhere,
            adapters=read_adapters(wish, spec, self._hub.with_commits(wish.commits)),
        )

        async def again(answers: Mapping[Question, EngineAnswer]) -> Forecast[Decision]:
            decision = decided(answers=answers)
            return Forecast(decision, open_questions(decision), decision.gaps)

        hub = self._hub.with_commits(wish.commits)
        found = gather(
            wish.source or "",
            wish.revision,
            allow_remote_code=wish.policy.allow_remote_code,
            hub=hub,
        )
        files = model_files(found.config, found.tensors)
        decision, asked = await checked(await again({}), again, inquirer, machine, files)
        plans = tuple(plan.evolve(engine=exact(plan.engine, asked.pins)) for plan in decision.plans)
        return Checked(decision.evolve(plans=plans), asked)

    @property
    def _everywhere(self) -> dict[str, str]:
        return self._settings.engine_env if self._settings is not None else {}

    def _measured(self, machine: Hardware) -> list[Fact]:
        """What was measured of GPUs; those of a snapshot are others, which have other UUIDs."""
        if self._settings is None or not machine.gpus:
            return []
        from gateway.store.store import measured_facts  # not before there are GPUs

        return standing(measured_facts(self._settings.data / "fitserve.db"), machine.driver, ())

    def _spec(self, wish: Wish) -> ModelSpec:
        source, revision, allowed = wish.source or "", wish.revision, wish.policy.allow_remote_code
        key = source, revision, allowed, tuple(wish.commits.items())
        if key not in self._specs:
            self._specs[key] = load(
                source,
                revision=revision,
                allow_remote_code=allowed,
                hub=self._hub.with_commits(wish.commits),
            )
        return self._specs[key]

    def _drafter(self, wish: Wish) -> Drafter | None:
        if wish.drafter is None:
            return None
        key = wish.drafter, tuple(wish.commits.items())
        if key not in self._drafters:
            self._drafters[key] = load_drafter(
                wish.drafter, hub=self._hub.with_commits(wish.commits)
            )
        return self._drafters[key]
