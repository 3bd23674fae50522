"""Machines of a cluster on this one: each has a network namespace, a data folder and a supervisor.

    hub, 10.213.N.254 --+
    one, 10.213.N.1   --+-- bridge in the namespace of the hub
    two, 10.213.N.2   --+

The root namespace has no part in it: its addresses stay, so no browser of another test sees a
change of the network. A gateway of a test enters the hub. Each run has another N: `ray start`
refuses the address of a head while any process of the machine names it, whatever its namespace.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.hosts.cluster.membership import node_socket
from gateway.hosts.cluster.strays import kill_orphaned_ray
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, Patience, hang_s

HEAD_PORT = 6379
_REDIS_PORT = 6390
_SUBNETS = 255
_NEW_NETWORK = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class ClusterNode:
    """A machine. Its programs are killed by `kill`, and run again after `start`."""

    def __init__(self, cluster: ClusterNodes, name: str, address: str) -> None:
        self.cluster = cluster
        self.name = name
        self.address = address
        self.namespace = f"{cluster.prefix}-{name}"
        self.data = cluster.folder / name
        self.data.mkdir(mode=0o700)
        self.log = cluster.folder / f"{name}.log"
        self.settings: dict[str, str] = {}
        """Environment variables of this machine's supervisor alone."""
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.install("fake-1")

    def install(self, engine: str) -> None:
        """Make the environment of a scripted engine, unless it is there."""
        install(self.data, engine)

    def environment(self, **settings: str) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if name[:9] != "FITSERVE_"}
        environment = {
            "FITSERVE_DATA_DIR": str(self.data),
            "FITSERVE_MODELS_DIR": str(self.data / "models"),
            "PYTHONPATH": str(ROOT),
        }
        return {**keep, **environment, **self.cluster.settings, **settings}

    def command(self, *arguments: str) -> list[str]:
        """A program of `gateway`, inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, sys.executable, "-m", *arguments]

    def fitserve(
        self, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("gateway.__main__", *arguments),
            env=self.environment(**(settings or {})),
            capture_output=True,
            text=True,
            timeout=hang_s(),
            check=False,
        )

    def start(self) -> None:
        """Start the supervisor, as users do, and return at once."""
        is_head = self is self.cluster.head
        part = ("init",) if is_head else ("join", f"{self.cluster.head.address}:{HEAD_PORT}")
        arguments = (
            "--name",
            self.name,
            "--address",
            self.address,
            "--lease-s",
            self.cluster.lease_s,
        )
        with self.log.open("ab") as log:
            self.supervisor = subprocess.Popen(
                self.command("gateway.__main__", "cluster", *part, *arguments),
                env=self.environment(**self.settings),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.supervisor is not None:
            self.supervisor.send_signal(number)
            self.supervisor.wait(hang_s())
            self.supervisor = None

    def pids(self, *words: str) -> list[int]:
        """Living programs of this machine with all of the words in their command lines."""
        answer = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [pid for pid in map(int, answer.stdout.split()) if has_words(pid, words)]

    def kill(self, *words: str) -> list[int]:
        pids = self.pids(*words)
        assert pids, f"no program of {self.name} has {words}"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids


def obstacle(*, needs_ray: bool = True) -> str:
    """The reason why this machine cannot have the machines of a cluster; empty: it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "only root can make network namespaces, with the command ip"
    if needs_ray and importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return ""


def install(data: Path, engine: str) -> None:
    """Make the environment of a scripted engine in a data folder, unless it is there."""
    environment = data / "engines" / engine
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (environment / "bin/python").symlink_to(sys.executable)
    (environment / ".complete").touch()


def has_words(pid: int, words: tuple[str, ...]) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return bool(command) and all(word in command for word in words)


class ClusterNodes:
    """Two machines, `one` with the head."""

    def __init__(self, lease_s: float = 300, *, has_redis: bool = False, **settings: str) -> None:
        """has_redis: the head keeps its tables in a Redis server.
        settings: environment variables of all programs.
        """
        self._has_redis = has_redis
        self._redis: subprocess.Popen[bytes] | None = None
        self.prefix = f"fs{os.getpid()}"
        self.subnet = f"10.213.{os.getpid() % _SUBNETS}"
        self.lease_s = str(lease_s)
        self.settings = settings
        # Ray's sockets need a short path.
        self.folder = Path(tempfile.mkdtemp(prefix="fs", dir="/tmp"))
        self.head = ClusterNode(self, "one", f"{self.subnet}.1")
        self.second = ClusterNode(self, "two", f"{self.subnet}.2")
        self.nodes: tuple[ClusterNode, ...] = (self.head, self.second)

    def start(self) -> None:
        self._make_network()
        if self._has_redis:
            self.start_redis()
        self.head.start()
        token = self.head.data / "cluster" / "token"
        self.until("the head has a token", lambda: token.exists() and token.stat().st_size >= 32)
        self._join(self.second)

    def start_redis(self) -> None:
        """Start the Redis server of the head, on the disk of the last one."""
        folder = self.folder / "redis"
        folder.mkdir(exist_ok=True)
        address = self.head.address
        self.head.settings["RAY_REDIS_ADDRESS"] = f"{address}:{_REDIS_PORT}"
        options = ["--port", str(_REDIS_PORT), "--bind", address, "--dir", str(folder)]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--protected-mode", "no"]
        self._redis = subprocess.Popen(
            ["ip", "netns", "exec", self.head.namespace, "redis-server", *options],
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )

    def stop_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None

    @contextmanager
    def another(self, name: str) -> Iterator[ClusterNode]:
        """One machine more, which joins. Its programs and engines end with the block."""
        node = ClusterNode(self, name, f"{self.subnet}.{len(self.nodes) + 1}")
        self.nodes = (*self.nodes, node)
        try:
            self._connect(node)
            self._join(node)
            yield node
        finally:
            node.stop()
            self._clear(node)
            shutil.rmtree(node.data, ignore_errors=True)
            self.nodes = tuple(new_node for new_node in self.nodes if new_node is not node)

    def _join(self, node: ClusterNode) -> None:
        copy = node.data / "cluster" / "token"
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(self.head.data / "cluster" / "token", copy)
        node.start()

    def _clear(self, node: ClusterNode) -> None:
        """End the processes of a machine without supervisor, and remove its network."""
        kill_orphaned_ray(node_socket(node.data))
        for pid in node.pids():
            os.kill(pid, signal.SIGKILL)
        _ip("netns", "del", node.namespace)

    @contextmanager
    def network(self) -> Iterator[None]:
        """Put this thread, and the threads that it makes, into the hub."""
        with network_namespace(Path("/run/netns", self._hub)):
            yield

    def until(self, words: str, condition: Callable[[], bool]) -> None:
        patience = Patience()
        while not condition():
            logs = "".join(node.log.read_text() for node in self.nodes if node.log.exists())
            assert not patience.is_over(), f"not within {HANG_S:g} s: {words}\n{logs}"
            time.sleep(0.1)

    @property
    def _hub(self) -> str:
        return f"{self.prefix}-hub"

    def _make_network(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", "hub0", "type", "bridge")
        _ip("-n", self._hub, "addr", "add", f"{self.subnet}.254/24", "dev", "hub0")
        _ip("-n", self._hub, "link", "set", "hub0", "up")
        for node in self.nodes:
            self._connect(node)

    def _connect(self, node: ClusterNode) -> None:
        _ip("netns", "add", node.namespace)
        _ip("-n", node.namespace, "link", "set", "lo", "up")
        peer = ("peer", "name", "eth0", "netns", node.namespace)
        _ip("-n", self._hub, "link", "add", node.name, "type", "veth", *peer)
        _ip("-n", self._hub, "link", "set", node.name, "master", "hub0", "up")
        _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _ip("-n", node.namespace, "link", "set", "eth0", "up")

    def part(self, node: ClusterNode, *, parted: bool) -> None:
        """Take the machine's cable out, or put it in again."""
        _ip("-n", self._hub, "link", "set", node.name, "down" if parted else "up")

    def living_programs(self) -> list[int]:
        """Programs that live in the namespaces."""
        return [pid for node in self.nodes for pid in node.pids()]

    def close(self) -> list[int]:
        """End everything. Returns the programs that outlived their supervisors."""
        for node in reversed(self.nodes):
            node.stop()
        self.stop_redis()
        living_programs = self.living_programs()
        for node in self.nodes:
            self._clear(node)
        _ip("netns", "del", self._hub)
        shutil.rmtree(self.folder, ignore_errors=True)
        return living_programs


@contextmanager
def cluster_nodes(
    lease_s: float = 300, *, has_redis: bool = False, **settings: str
) -> Iterator[ClusterNodes]:
    """Machines that have been started. The parameters are those of ClusterNodes."""
    nodes = ClusterNodes(lease_s, has_redis=has_redis, **settings)
    try:
        nodes.start()
        yield nodes
    finally:
        leftovers = nodes.close()
    assert leftovers == [], "programs of the cluster outlived it"


@contextmanager
def network_namespace(namespace: Path) -> Iterator[None]:
    """Put this thread, and the threads that it makes, into a network namespace."""
    with Path("/proc/thread-self/ns/net").open("rb") as former, namespace.open("rb") as file:
        _enter(file.fileno())
        try:
            yield
        finally:
            _enter(former.fileno())


def _enter(namespace: int) -> None:
    """Raises OSError."""
    if _LIBC.setns(namespace, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
