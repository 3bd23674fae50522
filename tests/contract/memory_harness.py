"""The in-memory host in the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.domain import EngineRef, LaunchSpec
from tests.contract.process_harness import free_port
from tests.support.fake_engine import parse
from tests.support.memory_host import MemoryHost, World
from tests.support.scripted_engine import EngineScript


class MemoryHarness:
    log_stays = True

    def __init__(self) -> None:
        self.world = World(installed={"fake==1"})
        self.host = MemoryHost(self._script, self.world)

    def _script(self, spec: LaunchSpec) -> EngineScript:
        return parse(spec.argv)[0]

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        return LaunchSpec(
            name=name,
            model="m",
            attempt=1,
            fingerprint=fingerprint,
            engine=EngineRef(kind="fake", version="1"),
            argv=("--model", "m", *script),
            env={},
            gpus=(),
            shm_bytes=0,
            port=port or free_port(),
        )

    def restart(self) -> MemoryHost:
        self.host = MemoryHost(self._script, self.world)
        return self.host

    def foreign(self, name: str) -> Callable[[], bool]:
        self.world.foreign.add(name)
        return lambda: name in self.world.foreign and name not in self.world.engines

    def kill_engine(self, name: str) -> None:
        self.world.engines[name].kill()

    def members(self, name: str) -> int:
        engine = self.world.engines.get(name)
        return engine.members if engine is not None else 0

    async def cleanup(self) -> None:
        await self.world.close()
