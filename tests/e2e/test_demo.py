"""The first two minutes: `fitserve demo` from the wheel, with a scripted engine; and the words
about engines when a gateway ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, starts
from tests.support.paths import ROOT
from tests.support.patience import hang_s
from tests.support.running import model_folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel has it, without this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=hang_s(),
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_demo_from_the_wheel_answers_and_leaves_nothing(tmp_path: Path, wheel: Path) -> None:
    prepared = scripted_gateway(tmp_path)
    # The demo installs the newest engine with a recipe, and this one is there.
    (profile,) = (tmp_path / "profiles").rglob("*.yaml")
    recipe = {"install": {"python": "3.11"}}
    profile.write_text(json.dumps(json.loads(profile.read_text()) | recipe))
    home = tmp_path / "elsewhere"
    home.mkdir()
    path = tmp_path / "said"
    environment = {**prepared.environment, "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "gateway", "demo"]
    with (
        path.open("wb") as file,
        subprocess.Popen(
            command, cwd=home, env=environment, stdout=file, stderr=subprocess.STDOUT
        ) as demo,
    ):
        try:
            wait_for(
                "how to ask",
                lambda: demo.poll() is not None or "Ctrl-C stops demo" in path.read_text(),
            )
            assert demo.poll() is None, path.read_text()
            curl = next(
                line.strip()
                for line in path.read_text().splitlines()
                if line.strip().startswith("curl ")
            )
            answer = subprocess.run(
                curl, shell=True, capture_output=True, text=True, timeout=hang_s(), check=True
            )
            assert '"finish_reason"' in answer.stdout
            assert path.read_text().count("demo: ready") == 1
            assert f"{ENGINE} is installed in" in path.read_text()
            assert re.search(r"\nPage: http://127\.0\.0\.1:\d+/\n", path.read_text())
            # A second one says that this one runs, and does nothing to its model.
            second = subprocess.run(
                command,
                cwd=home,
                env=environment,
                capture_output=True,
                text=True,
                timeout=hang_s(),
                check=False,
            )
            assert second.returncode == 3
            assert "Its models stay unchanged" in second.stderr
            assert prepared.show("demo")["state"] == "ready"
            assert (
                httpx.get(f"{prepared.url}/version", trust_env=False, timeout=hang_s()).status_code
                == 200
            )
            demo.send_signal(signal.SIGINT)
            assert demo.wait(hang_s()) == 130
        finally:
            demo.kill()
            prepared.client.close()
    assert not engines(prepared)
    assert "uvicorn" not in path.read_text()


@contextlib.contextmanager
def run_to_end(folder: Path, **settings: str) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The last line of a gateway with an engine that was told to stop, and the engines that are
    left."""
    with contextlib.closing(scripted_gateway(folder, **settings)) as gateway:
        gateway.start()
        source = str(model_folder(folder / "model"))
        gateway.client.post(
            "/admin/models", json={"name": "m", "source": source, "engines": [ENGINE]}
        )
        gateway.until("m", "ready")
        assert gateway.kill(signal.SIGTERM) == 0
        yield gateway.log.read_text().splitlines()[-1], engines(gateway)
        gateway.start()
        assert gateway.until("m", "ready")["attempts"][-1]["failure"] is None
        assert starts(gateway) == (2 if settings else 1)


def test_the_last_line_of_a_gateway_has_the_command_that_ends_its_engines(tmp_path: Path) -> None:
    with run_to_end(tmp_path) as (line, rest):
        assert len(rest) == 1
        command = re.search(
            r"engines that keep running: 1; the next gateway adopts them;"
            r" to end them: kill ([\d ]+)",
            line,
        )
        assert command is not None, line
        assert {int(pid) for pid in command[1].split()} == {
            pid for pids in rest.values() for pid in pids
        }
        assert all(Path(f"/proc/{pid}").exists() for pid in command[1].split())


def test_engines_end_with_the_gateway_on_request_and_start_with_the_next(
    tmp_path: Path,
) -> None:
    with run_to_end(tmp_path, FITSERVE_STOP_ENGINES="1") as (_, rest):
        assert not rest
        assert not list((tmp_path / "data/live").glob("*"))
