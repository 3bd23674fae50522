"""Plans in this process, without a running gateway.

`plan` (`gateway.plan`) is for notebooks, tests and benchmarks.
`OfflinePlanner` plans many models on many machines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack

from gateway.domain import (
    ChatTemplate,
    Cluster,
    Decision,
    Engine,
    EngineRef,
    Fact,
    Hardware,
    InquiryResult,
    ModelSpec,
    Policy,
    Scalar,
    Wish,
)
from gateway.domain.base import ValidationError
from gateway.domain.image_name import exact
from gateway.domain.plan_request import PlanRequest
from gateway.domain.release import engine_name
from gateway.domain.value import first_problem
from gateway.domain.wish import Goal
from gateway.errors import BadRequest, HostError
from gateway.model_folder import model_folder
from gateway.models.catalog.hub import Hub
from gateway.planner.engine_answers import open_questions
from gateway.planner.service.engine_check import REQUESTED_LIMIT_S, EngineCheck, model_files
from gateway.planner.service.model_planner import ModelPlanner, ModelPlanning, WishedModel
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings, load_settings

# Only for types: only inquiries need this import, so other commands must not pay for it.
if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer


class WishFields(TypedDict, total=False):
    """The fields of Wish other than the model and the engines."""

    revision: str | None
    commits: dict[str, str]
    image: str | None
    tensor_parallel: int | None
    data_parallel: int | None
    replicas: int | None
    copies: str | None
    goal: Goal
    concurrency: int | None
    gpus: Literal["all", "few"] | int | tuple[str, ...] | None
    context: int | str | None
    min_context: int | str | None
    max_context: int | str | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    text_only: bool
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
    engines: str | Iterable[str] = (),
    **wish: Unpack[WishFields],
) -> Decision:
    """The plans for a model, best first, with reasons, and the rejected variants. Starts nothing.

        decision = gateway.plan("models/llama-3.1-8b", hardware="2x3090", engines="vllm",
        context="32k")

    source: a folder, or a Hugging Face repository.
    hardware: a snapshot by name, the path of a snapshot's file, or a machine that was read; None:
        this machine.
    engines: "kind" or "kind==version", one or several; empty: all.
    wish: the other fields of Wish.

    Profiles and the Hugging Face Hub are those of the environment (FITSERVE_PROFILES_DIR,
    FITSERVE_HF_ENDPOINT, FITSERVE_HF_TOKEN). Raises BadRequest, BadModel, BadFlag, NotFound.
    """
    fields = {
        "source": model_folder(str(source)) if isinstance(source, str | Path) else source,
        "engines": _engine_names(engines),
        **wish,
    }
    try:
        plan_wish = Wish.model_validate({"name": "plan", **fields})
    except ValidationError as error:
        raise BadRequest(
            f"{first_problem(error, Wish.model_fields)}.",
            hint="docs/plan.md lists the fields of a wish.",
        ) from None
    return OfflinePlanner.read_environment().decide(plan_wish, hardware, include_alternatives=True)


def _engine_names(engines: object) -> object:
    """The references of engines; values of another type stay, for the wish to refuse."""
    names = (engines,) if isinstance(engines, str) else engines
    if not isinstance(names, Iterable):
        return names
    return tuple(engine_name(name) if isinstance(name, str) else name for name in names)


class OfflinePlanner:
    """Plans by the profiles, without a running gateway. Each model is read once."""

    def __init__(self, profiles: Profiles, hub: Hub, settings: Settings | None = None) -> None:
        """settings: settings of this machine's GPUs, its RAM and the environment of engines; None:
        none."""
        self.profiles = profiles
        self._hub = hub
        self._settings = settings
        self._models: dict[Hashable, WishedModel] = {}

    @classmethod
    def read_environment(cls) -> Self:
        settings = load_settings()
        data = settings.data
        profiles = Profiles(settings.profiles_dir, cache=data / "profiles.msgpack", data=data)
        return cls(
            profiles,
            Hub(settings.hf_endpoint, settings.hf_token, data / "hub", models=settings.models),
            settings,
        )

    def machine(self, hardware: str | Path | Hardware | None) -> tuple[str, Hardware]:
        """The machine with its name in decisions: a snapshot, a given machine, or this one."""
        if isinstance(hardware, Hardware):
            return "the given hardware", hardware
        if hardware is not None:
            return str(hardware), self.profiles.hardware(str(hardware))
        from gateway.machine.gpu_watch import (
            allowed_devices,  # not before this machine is asked for
        )
        from gateway.machine.probe import probe

        return "this machine", allowed_devices(Path.cwd(), self._settings).mark(probe(Path.cwd()))

    def decide_on_cluster(self, wish: Wish, name: str, cluster: Cluster) -> Decision:
        """The decision for the nodes of a cluster. name: of the cluster, for the decision."""
        request = PlanRequest(
            wish, cluster.nodes[0].hardware, name, include_uninstalled=True, cluster=cluster
        )
        return self._prepare_planning(request, None, ()).decision()

    def spec(self, wish: Wish) -> ModelSpec:
        """The model of a wish, as its files describe it. Raises BadModel."""
        return self._wished_model(wish).spec

    @property
    def hub(self) -> Hub:
        return self._hub

    def engines(self, wish: Wish, machine: Hardware) -> list[Engine]:
        """The engine versions for the wish on this machine."""
        return self.profiles.engines_for(machine, wish.engines, wish.image)

    def decide(
        self,
        wish: Wish,
        hardware: str | Path | Hardware | None = None,
        *,
        include_alternatives: bool = False,
    ) -> Decision:
        """The decision for a machine, as `machine` reads it.

        include_alternatives: whether a decision without a plan lists forms of the model that would
            fit.
        """
        return self.decide_on(wish, *self.machine(hardware), include_alternatives)

    def decide_on(
        self, wish: Wish, name: str, machine: Hardware, include_alternatives: bool = False
    ) -> Decision:
        """The decision for a machine that was read before."""
        request = PlanRequest(wish, machine, name, include_uninstalled=include_alternatives)
        return self._prepare_planning(request, None, self._local_measurements(machine)).decision()

    def decide_request(
        self, request: PlanRequest, startable: Startable | None = None, facts: Iterable[Fact] = ()
    ) -> Decision:
        """The decision for a request. startable: the only engines to plan with."""
        return self._prepare_planning(request, startable, facts).decision()

    def decide_here(self, wish: Wish, startable: Startable, facts: Iterable[Fact] = ()) -> Decision:
        """The plan that a gateway with this data folder would start on this machine.

        With the plans of engines that are not installed. facts: those that the gateway learned.
        """
        _, machine = self.machine(None)
        request = PlanRequest(wish, machine, include_uninstalled=True)
        return self._prepare_planning(request, startable, facts).decision()

    async def check_on(
        self,
        wish: Wish,
        name: str,
        machine: Hardware,
        inquirer: Inquirer,
        startable: Startable | None = None,
    ) -> tuple[Decision, InquiryResult]:
        """The decision after questions to the installed engines, and the outcome of these.

        startable: the only engines to plan with.
        """
        if wish.image is not None:
            from gateway.planner.service.images import learn_engine  # asyncio

            (engine,) = self.engines(wish, machine)
            with suppress(HostError):  # the question about the model says why
                await learn_engine(
                    EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
                    self.profiles,
                    inquirer,
                    REQUESTED_LIMIT_S,
                )
        request = PlanRequest(wish, machine, name)
        planning = self._prepare_planning(request, startable, self._local_measurements(machine))
        files = self._wished_model(wish).files
        model = model_files(files.config, files.tensors, files.quant_files)
        check = EngineCheck(inquirer, machine, model, REQUESTED_LIMIT_S)
        decision = planning.decide()
        while await check.query(open_questions(decision)):
            decision = planning.decide(answers=check.answers)
        await check.report(decision.gaps)
        plans = tuple(plan.evolve(engine=exact(plan.engine, check.pins)) for plan in decision.plans)
        return decision.evolve(plans=plans), check.outcome

    def _prepare_planning(
        self, request: PlanRequest, startable: Startable | None, facts: Iterable[Fact]
    ) -> ModelPlanning:
        env = self._settings.engine_env if self._settings is not None else {}
        planner = ModelPlanner(self.profiles, self._hub, env)
        model = self._wished_model(request.wish)
        return planner.prepare(request, model, facts, startable, model.spec.source)

    def _local_measurements(self, machine: Hardware) -> list[Fact]:
        """Measurements of this machine's GPUs, by UUID; snapshots have other UUIDs."""
        if self._settings is None or not machine.gpus:
            return []
        from gateway.store.measured_facts import measured_facts  # not before there are GPUs

        return measured_facts(self._settings.data / "fitserve.db")

    def _wished_model(self, wish: Wish) -> WishedModel:
        parts = tuple(wish.loras.items()), tuple(wish.commits.items())
        key = wish.source, wish.revision, wish.policy.allow_remote_code, wish.drafter, *parts
        if key not in self._models:
            self._models[key] = WishedModel.read(wish, self._hub.pin_commits(wish.commits))
        return self._models[key]
