"""Conventions that every SGLang version shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.domain import Choice, Engine, Scalar
from gateway.domain.value import served_name
from gateway.engines.common.programs import replace_program
from gateway.engines.common.span import Rendezvous
from gateway.engines.sglang.code_sources import SOURCES


class SglangKind:
    """Implements EngineKind for SGLang."""

    env_prefixes: tuple[str, ...] = ("SGLANG_", "SGL_")
    stage_layers_env = "SGLANG_PP_LAYER_PARTITION"
    disabled_kernels_env = ""
    # Source: ServerArgs in sglang/srt/server_args.py.
    whole_tower_flag: tuple[str, Scalar] = ("mm-enable-dp-encoder", True)
    code_sources = SOURCES

    # Source: get_default_sampling_params in sglang/srt/configs/model_config.py, 0.5.10 to 0.5.23.
    limits_answers = False
    thoughts = "reasoning_content"
    classify_path = "/v1/classify"
    weights_prefix = ""
    forked_calls = ()
    kernel_warmups = ()
    kernel_builds: Mapping[str, str] = MappingProxyType({})
    # Source: human_readable_int in sglang/srt/utils/common.py of 0.5.23.
    magnitudes = MappingProxyType(
        {letter: 10 ** (3 * power) for power, letter in enumerate("kMGT", 1)}
        | {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)}
    )
    # Source: get_local_ip_auto in sglang/srt/utils (network.py of 0.5.23, common.py before).
    address_env = "SGLANG_HOST_IP"

    def node_flags(self, meeting: Rendezvous, node_rank: int, /) -> dict[str, Scalar]:
        """Groups of ranks take the ports after the first: PortArgs in sglang/srt/server_args.py.
        A later node answers only /health: sglang/srt/entrypoints/engine.py."""
        host = f"[{meeting.address}]" if ":" in meeting.address else meeting.address
        return {
            "nnodes": meeting.nodes,
            "node-rank": node_rank,
            "dist-init-addr": f"{host}:{meeting.port}",
        }

    def rank_command(self, command: tuple[str, ...], /) -> tuple[str, ...]:
        """The command of every rank: one program, whose part follows from the node's rank."""
        return command

    def serve_command(self, argv: tuple[str, ...], /) -> tuple[str, ...]:
        """`sglang serve`. Source: sglang/launch_server.py recommends it, and sglang/cli/serve.py
        calls the same functions (0.5.10.post1 and 0.5.23)."""
        return replace_program(argv, (("sglang.launch_server",),), ("sglang", "serve"))

    def stage_remainder(self, stages: int, extra: int) -> range:
        """The last stages. Source: get_pp_indices in sglang/srt/distributed/utils.py."""
        return range(stages - extra, stages)

    def ports(self, port: int, groups: int, /) -> frozenset[int]:
        """Source: PortArgs.init_new in sglang/srt/server_args.py, which counts from 233 above the
        port: six of 0.5.10.post1, seven of 0.5.23, and one for each group with a Rust server."""
        derived_ports = range(port + 233, port + 233 + 7 + groups) if groups > 1 else ()
        return frozenset({port, *derived_ports})

    def start_method(
        self, _engine: Engine, _args: Mapping[str, Scalar], _architecture: str, /
    ) -> dict[str, Choice[str]]:
        """None: _set_envs_and_config in sglang/srt/entrypoints/engine.py of 0.5.23 sets `spawn`,
        and no flag or variable changes that."""
        return {}

    def compile_variables(
        self, _engine: Engine, _env: Mapping[str, str], /
    ) -> dict[str, Choice[str]]:
        """None: no variable of 0.5.23 is known to choose it."""
        return {}

    def adapter_slots(self, adapters: int) -> int:
        """One slot for each adapter, and an extra slot for the bare model."""
        return adapters + 1

    def priority_factor(self, argv: tuple[str, ...], /) -> int:
        """Source: schedule_low_priority_values_first in sglang/srt/server_args.py."""
        if "--enable-priority-scheduling" not in argv:
            return 0
        return 1 if "--schedule-low-priority-values-first" in argv else -1

    def has_default_priority(self, argv: tuple[str, ...], /) -> bool:
        """Source: _set_or_validate_priority in sglang/srt/managers/scheduler.py of 0.5.23."""
        return "--default-priority-value=0" in argv

    def priority_flags(self, engine: Engine, /) -> dict[str, Scalar]:
        """Source: _set_or_validate_priority in sglang/srt/managers/scheduler.py of 0.5.23, where a
        request without a priority would be the last of all."""
        flags: dict[str, Scalar] = {
            "enable-priority-scheduling": True,
            "schedule-low-priority-values-first": True,
            "default-priority-value": 0,
        }
        return flags if flags.keys() <= engine.flags.keys() else {}

    def prompt_piece_flags(self, _engine: Engine, _tokens: int, /) -> dict[str, Scalar]:
        """SGLang 0.5.23 has no such flag."""
        return {}

    def priority_objection(self, args: Mapping[str, Scalar], /) -> str:
        """Source: the checks of schedule_policy in sglang/srt/server_args.py, 0.5.10 to 0.5.23."""
        policy = args.get("schedule-policy", "fcfs")
        if policy in ("fcfs", "lof"):
            return ""
        return f"SGLang orders nothing by priority with --schedule-policy={policy}"

    def adapter_name(self, model: str, adapter: str, /) -> str:
        """Source: _parse_model_parameter in sglang/srt/entrypoints/openai/serving_base.py."""
        return f"{served_name(model)}:{served_name(adapter)}"
