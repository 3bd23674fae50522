"""The part of an engine kind's contract that holds for all of its versions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.domain import Choice, Engine, Scalar
from gateway.engines.common.code_sources import CodeSources
from gateway.engines.common.span import Rendezvous


class EngineKind(Protocol):
    """Conventions of an engine kind that hold for every version."""

    @property
    def env_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the environment variables that belong to the engine."""

    @property
    def stage_layers_env(self) -> str:
        """Environment variable with the number of layers of each pipeline stage; "": none."""

    @property
    def disabled_kernels_env(self) -> str:
        """Environment variable with the kernels that the engine passes over, between commas; "":
        none."""

    @property
    def whole_tower_flag(self) -> tuple[str, Scalar]:
        """The flag, by the planner's name, that keeps a vision tower whole on every rank, and its
        value."""

    @property
    def code_sources(self) -> CodeSources:
        """Places in the engine's code that choices and refusals name as their source."""

    @property
    def limits_answers(self) -> bool:
        """Whether max_new_tokens of generation_config.json ends answers without `max_tokens`."""

    @property
    def thoughts(self) -> str:
        """The name of a model's thoughts in the engine's chat answers."""

    @property
    def classify_path(self) -> str:
        """The path of the engine's server that labels texts."""

    @property
    def weights_prefix(self) -> str:
        """Begin of the names of files that are the only ones read where a folder has them and no
        format is named; "": none."""

    @property
    def magnitudes(self) -> Mapping[str, int]:
        """Ends of whole numbers on the engine's command line, such as the k of 128k, as factors."""

    @property
    def address_env(self) -> str:
        """Environment variable with the address at which other nodes reach this one."""

    def node_flags(self, meeting: Rendezvous, node_rank: int, /) -> dict[str, Scalar]:
        """The flags, by the engine's names, with which one of several nodes meets the others."""

    def rank_command(self, command: tuple[str, ...], /) -> tuple[str, ...]:
        """The program of a node that answers no requests, by the command of an engine."""

    def serve_command(self, argv: tuple[str, ...], /) -> tuple[str, ...]:
        """A start with flags, as the engine's documentation writes it."""

    def stage_remainder(self, stages: int, extra: int) -> range:
        """The `extra` stages that the engine gives one layer more than the others."""

    def ports(self, port: int, groups: int, /) -> frozenset[int]:
        """The ports of an engine that listens on `port`: those that it derives from this one for
        groups of ranks among them."""

    def start_method(
        self, engine: Engine, args: Mapping[str, Scalar], architecture: str, /
    ) -> dict[str, Choice[str]]:
        """The variable that lets an engine fork its processes, where that is sound; empty: none."""

    def compile_variables(
        self, engine: Engine, env: Mapping[str, str], /
    ) -> dict[str, Choice[str]]:
        """The variable for the form of a compiled model in the cache; empty: none. `env` has the
        user's variables."""

    @property
    def forked_calls(self) -> tuple[str, ...]:
        """Functions, as MODULE.NAME, that begin a new interpreter to call their one argument."""

    @property
    def kernel_warmups(self) -> tuple[str, ...]:
        """Functions, as MODULE:NAME, that compile one kernel after the other into a cache of
        files."""

    @property
    def kernel_builds(self) -> Mapping[str, str]:
        """Functions that the engine calls when it chooses kernels which are built at their first
        call -> functions of their builds, each as MODULE:NAME."""

    def adapter_slots(self, adapters: int) -> int:
        """LoRA slots that the engine allocates for this many adapters."""

    def priority_factor(self, argv: tuple[str, ...], /) -> int:
        """The factor of a priority for the engine's own queue, by its flags: 1 where the smallest
        goes first, -1 where the largest does, 0 without an order by priority."""

    def has_default_priority(self, argv: tuple[str, ...], /) -> bool:
        """Whether a request without a priority counts as one of priority 0, by the flags of the
        engine."""

    def priority_flags(self, engine: Engine, /) -> dict[str, Scalar]:
        """The flags with which the smallest priority goes first in the engine's own queue, and a
        request without one counts as 0; empty: the version has none."""

    def prompt_piece_flags(self, engine: Engine, tokens: int, /) -> dict[str, Scalar]:
        """The flags with which one prompt takes at most this many tokens of a step; empty: the
        version has none."""

    def priority_objection(self, args: Mapping[str, Scalar], /) -> str:
        """Why an engine with these flags of a user has no order by priority; "": nothing."""

    def adapter_name(self, model: str, adapter: str, /) -> str:
        """The name by which requests to a model's engine select an adapter."""
