"""The door of an engine whose endpoints for development are open: every request has to bring the
engine's key, whatever its path. Pure text.

vLLM's /sleep and /wake_up exist with VLLM_SERVER_DEV_MODE=1 alone, which opens /collective_rpc and
others beside them, and vLLM asks for its key below /v1 only. So the engine's program begins with
this one, which is the outermost of vLLM's layers (`--middleware`) and needs no file: a process, a
container and an agent's container start alike. The key comes in the environment, as ever; without
one the engine does not start.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Plan

# What plans have only where the endpoints are open.
_OPEN = ("--enable-sleep-mode", "--no-log-error-stack")
DEV_MODE = ("VLLM_SERVER_DEV_MODE", "1")
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
            await send({{"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}})
            await send({{"type": "http.response.body"}})
        else:
            await send({{"type": "websocket.close", "code": 1008}})
sys.modules["fitserve_door"] = sys.modules["__main__"]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""


def needed(env: Mapping[str, str]) -> bool:
    """Whether an engine with this environment opens what only the gateway may reach."""
    name, _ = DEV_MODE
    return name in env


def behind(command: tuple[str, ...], key_env: str | None) -> tuple[str, ...]:
    """The command of an engine, `PYTHON -m MODULE`, behind the door. Raises ValueError for any
    other, and for an engine without a key."""
    python, option, module = command
    if (
        option != "-m"
        or not key_env
        or not module.replace(".", "").replace("_", "").isalnum()
        or not key_env.isidentifier()
    ):
        raise ValueError(f"{command} has no place for a door")
    return python, "-c", _PROGRAM.format(key=key_env, module=module), f"--middleware={_MIDDLEWARE}"


def closed(plan: Plan) -> Plan:
    """The plan for whoever starts its engine without a gateway: nobody would put that to sleep, so
    it opens nothing and needs no key."""
    if not needed(plan.env):
        return plan
    argv = tuple(item for item in plan.argv if item not in _OPEN)
    return plan.evolve(
        argv=argv, env={name: value for name, value in plan.env.items() if name != DEV_MODE[0]}
    )
