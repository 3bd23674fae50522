"""Authentication in front of an engine whose endpoints others could reach: every path needs the
engine's key. Pure.

vLLM has /sleep and /wake_up only with VLLM_SERVER_DEV_MODE=1. The same mode opens /collective_rpc
and others, and vLLM checks its key only below /v1. In a cluster, other machines reach the port of
an engine, with /invocations, /tokenize and /metrics. So this program starts the engine, and becomes
the outermost layer of its server (`--middleware`). The program needs no file, so processes,
containers and agents start alike. The key comes in the environment; without a key the engine does
not start.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Plan

# Only plans with open development endpoints have this variable.
_OPEN_FLAGS = ("--enable-sleep-mode", "--no-log-error-stack")
DEV_MODE = ("VLLM_SERVER_DEV_MODE", "1")
FLAG = "middleware"
"""The flag of an engine that takes the layer."""
_MIDDLEWARE = "fitserve_door.Door"
_PROGRAM = """
import hmac, os, runpy, sys
LINE = b"Bearer " + os.environ["{key}"].encode()
class Door:
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if scope["type"] == "lifespan" or (len(given) == 1 and hmac.compare_digest(given[0], LINE)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-length", b"0")]
            await send({{"type": "http.response.start", "status": 401, "headers": headers}})
            await send({{"type": "http.response.body"}})
        else:
            await send({{"type": "websocket.close", "code": 1008}})
sys.modules["fitserve_door"] = sys.modules["__main__"]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""


def needs_auth(env: Mapping[str, str]) -> bool:
    """Whether an engine with this environment opens endpoints only for the gateway."""
    name, _ = DEV_MODE
    return name in env


def wrap_command(command: tuple[str, ...], key_env: str | None) -> tuple[str, ...]:
    """The command of an engine, `PYTHON -m MODULE`, with the authentication layer. Raises
    ValueError for any other, and for an engine without a key."""
    python, option, module = command
    if (
        option != "-m"
        or not key_env
        or not module.replace(".", "").replace("_", "").isalnum()
        or not key_env.isidentifier()
    ):
        raise ValueError(f"{command} has no place for a door")
    return python, "-c", _PROGRAM.format(key=key_env, module=module), f"--{FLAG}={_MIDDLEWARE}"


def drop_dev_endpoints(plan: Plan) -> Plan:
    """The plan for a start without a gateway: without sleep mode, so without development endpoints
    and key."""
    if not needs_auth(plan.env):
        return plan
    argv = tuple(argument for argument in plan.argv if argument not in _OPEN_FLAGS)
    return plan.evolve(
        argv=argv, env={name: value for name, value in plan.env.items() if name != DEV_MODE[0]}
    )
