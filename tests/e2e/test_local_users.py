"""Traces of a whole run for another user of the machine: files, and engines that listen on
loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.cli.demo.checkpoint import make_model
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, scripted_gateway, starts
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.patience import hang_s
from tests.support.running import model_folder

# Takes the lock with which a reader of SQLite's shared memory stops every writer.
_LOCKS = """
import fcntl, os, sys
os.setgid(65534)
os.setuid(65534)
try:
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 8, 120)
except OSError as error:
    print(type(error).__name__)
else:
    print("locked")
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    """A gateway with two workers, and the files that the data folder of an older one may have: open
    to all."""
    new_scripted_gateway = scripted_gateway(
        tmp_path,
        FITSERVE_WORKERS="2",
        FITSERVE_ADMIN_KEY="an-admin-key-of-this-test",
        FITSERVE_ACCESS_LOG="1",
    )
    (new_scripted_gateway.data / "logs").mkdir()
    (new_scripted_gateway.data / "logs" / "old.log").write_text("words of a client")
    new_scripted_gateway.data.chmod(0o755)
    new_scripted_gateway.environment["FITSERVE_KEY"] = "an-admin-key-of-this-test"
    new_scripted_gateway.client.headers["authorization"] = "Bearer an-admin-key-of-this-test"
    return new_scripted_gateway


def entries(data: Path) -> dict[str, str]:
    """Every file and folder by its path in the data folder, with its mode; without the targets of
    links."""
    modes = {}
    for folder, folders, files in os.walk(data):
        for name in (*folders, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                modes[str(path.relative_to(data))] = oct(stat.S_IMODE(path.stat().st_mode))
    return modes


FILES_OF_RUN = (
    "fitserve.db",
    "fitserve.db-wal",
    "fitserve.db-shm",
    "gateway.lock",
    "installation",
    "keys.json",
    "profiles.msgpack",
    "hub",
    "home",
    "run/m-r0-a1",
    "run/control.sock",
    "instances/m-r0-a1.json",
    "live/m-r0-a1.json",
    "logs/m-r0-a1.log",
)


def serve_once(gateway: Gateway) -> None:
    """Make a key and two plans, and let the model m of the Hub answer."""
    gateway.start()
    assert gateway.cli("keys", "add", "somebody").returncode == 0
    plan = ("plan", "org/name", "--engine", ENGINE)
    assert gateway.cli(*plan).returncode == 0
    assert gateway.cli(*plan, "--hardware", "cpu").returncode == 0
    wish = {"name": "m", "source": "org/name", "engines": [ENGINE]}
    gateway.client.post("/admin/models", json=wish)
    gateway.until("m", "ready")
    answer = gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
    )
    assert answer.status_code == 200, answer.text


def test_a_whole_run_leaves_nothing_that_another_user_can_open(
    gateway: Gateway, tmp_path: Path
) -> None:
    make_model(tmp_path / "demo")
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo").iterdir()} | {
        "nested/config.json": b"{}"
    }
    umask = os.umask(0o022)
    try:
        with FakeHub({"org/name": FakeRepo(files)}) as hub, contextlib.closing(gateway):
            gateway.environment |= {"FITSERVE_HF_ENDPOINT": hub.url(), "NO_PROXY": "127.0.0.1"}
            gateway.environment["FITSERVE_MODELS_DIR"] = str(gateway.data / "models")
            serve_once(gateway)
            modes = entries(gateway.data)
            lock_result = subprocess.run(
                [sys.executable, "-S", "-c", _LOCKS, str(gateway.data / "fitserve.db-shm")],
                capture_output=True, text=True, check=True
            ) if os.geteuid() == 0 else None  # fmt: skip
            gateway.kill(signal.SIGTERM)
            gateway.start()
            assert entries(gateway.data).keys() >= {"fitserve.db", "keys.json"}
            gateway.until("m", "ready")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(gateway.data.stat().st_mode) == 0o700
    weights = f"models/models--org--name/snapshots/{COMMIT}"
    modes[f"{weights}/config.json"] = oct(
        stat.S_IMODE((gateway.data / weights / "config.json").stat().st_mode)
    )
    # That all of these are there shows that the run has done its work.
    for name in (*FILES_OF_RUN, weights):
        assert name in modes, sorted(modes)
    open_paths = {path for path, mode in modes.items() if int(mode, 8) & 0o077}
    # The library of the Hub gives its lock files this mode by itself; they are empty.
    locks = {
        path
        for path in open_paths
        if path.startswith("hub/.locks/") and not (gateway.data / path).stat().st_size
    }
    assert not {
        path for path in open_paths - locks if path.split("/")[0] not in ("engines", "models")
    }, modes
    # Engines in containers are another user, so the weights, and the folders on the way to them,
    # are readable behind the closed folder.
    for path, mode in (
        ("models/models--org--name", "0o755"),
        (weights, "0o755"),
        (f"{weights}/config.json", "0o644"),
    ):
        assert modes[path] == mode, path
    assert "other users could open the data folder" in gateway.log.read_text()
    if lock_result is not None:
        assert lock_result.stdout.strip() == "PermissionError"


def test_nobody_but_the_gateway_gets_an_answer_of_an_engine(tmp_path: Path) -> None:
    """The engine is on loopback, where every user of the machine is; so it answers only to the key
    that the gateway made for this start."""
    with contextlib.closing(
        scripted_gateway(tmp_path, FITSERVE_WORKERS="2", FITSERVE_LOG_LEVEL="debug")
    ) as gateway:
        gateway.start()
        gateway.client.post(
            "/admin/models",
            json={
                "name": "m",
                "source": str(model_folder(tmp_path / "model")),
                "engines": [ENGINE],
            },
        )
        gateway.until("m", "ready")
        (record,) = (gateway.data / "instances").glob("*.json")
        document = json.loads(record.read_text())
        key, body = document["key"], {"model": "m", "prompt": "hi", "max_tokens": 3}
        engine = f"http://127.0.0.1:{document['port']}/v1/completions"
        header_sets: tuple[dict[str, str], ...] = (
            {},
            {"authorization": "Bearer x"},
            {"authorization": f"Bearer {key}"},
        )
        for headers in header_sets:
            answer = httpx.post(
                engine, json=body, headers=headers, trust_env=False, timeout=hang_s()
            )
            assert answer.status_code == (200 if key in str(headers) else 401)

        def is_served() -> bool:
            """Also with a key of the client's own, which the engine does not get."""
            answer = gateway.client.post(
                "/v1/completions", json=body, headers={"authorization": "Bearer x"}
            )
            assert answer.status_code == 200, answer.text
            assert key not in f"{answer.text}{answer.headers}"
            return True

        is_served()
        gateway.kill()
        gateway.start()
        gateway.until("m", "ready")
        wait_for("the engine is adopted with its key", is_served)
        assert starts(gateway) == 1
        texts = [
            gateway.client.get(path).text
            for path in ("/admin/models/m", "/admin/models/m/logs", "/admin/models", "/metrics")
        ]
        assert not any(key in text for text in (*texts, gateway.log.read_text()))
        commands = [
            path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
        ]
        assert not any(key.encode() in command for command in commands)
        leaking_files = [
            path
            for path in gateway.data.rglob("*")
            if path.is_file() and path != record and key.encode() in path.read_bytes()
        ]
        assert not leaking_files
