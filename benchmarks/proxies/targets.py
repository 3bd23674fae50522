"""The compared proxies: installation, configuration and start in front of the fake engine.

nginx comes from the system's packages (Debian: nginx-light). Each Python package gets an
environment under .cache/proxies from hashed requirements next to this file, made on the first run.
Each is set up as its documentation advises for this job: no access log, metrics on where it has
some, no limit on streams.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import processes

from gateway.settings import Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".cache" / "proxies"
KEY = "fs-bench-0123456789abcdefghijklmnopqrstuvwxyz"  # as long as those that the gateway makes

NGINX = """
worker_processes 1; worker_rlimit_nofile {files}; daemon off; pid {folder}/nginx.pid;
error_log {folder}/nginx.err crit;
events {{ worker_connections {connections}; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000; client_max_body_size 100m;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_read_timeout 600s;
      proxy_buffering off; proxy_request_buffering off;
    }}
    location /health {{ return 200; }}
  }}
}}
"""

LITELLM = """
model_list:
- model_name: m
  litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{engine}/v1", api_key: x}}
litellm_settings: {{telemetry: false, request_timeout: 600, num_retries: 0}}
general_settings: {{disable_spend_logs: true}}
"""


class Missing(Exception):
    """A target that cannot run here; the text says why."""


@dataclass
class Started:
    """A target that answers. `about` tells its version and what was on."""

    url: str
    process: subprocess.Popen[bytes]
    about: str


@dataclass(frozen=True)
class Where:
    """Ports and a folder of its own for one start of a target."""

    engine: int
    port: int
    folder: Path

    def launch(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
        }
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**keep, **environment},
                cwd=self.folder,
                start_new_session=True,
            )

    def start_process(
        self,
        process: subprocess.Popen[bytes],
        ready: str,
        about: str,
        key: str = "",
        seconds: float = 120,
    ) -> Started:
        """Once a GET of `ready` gives 200. Raises Missing with the end of its log."""
        if not processes.wait_until(self.port, ready, process, seconds, key):
            processes.stop(process)
            raise Missing(
                f"did not answer {ready}:"
                f" ...{(self.folder / 'log').read_text(errors='replace')[-400:].strip()}"
            )
        return Started(f"http://127.0.0.1:{self.port}/v1", process, about)


def environment(name: str) -> Path:
    """The folder of the environment of a Python package; made unless it is there. Raises
    Missing."""
    folder, lock = ENVIRONMENTS / name, HERE / f"requirements-{name}.txt"
    stamp, wanted = folder / ".locked", lock.read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing {name} into {folder.relative_to(ROOT)}", file=sys.stderr)
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if uv is None:
            raise Missing("uv, which makes its environment, is not here")
        python = str(folder / "bin" / "python")
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
            [
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                python,
                "--require-hashes",
                "-r",
                str(lock),
            ],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Missing(f"could not be installed: {done.stderr.strip()[-400:]}")
        stamp.write_text(wanted)
    return folder


def version(name: str) -> str:
    line = next(
        line
        for line in (HERE / f"requirements-{name}.txt").read_text().splitlines()
        if line.startswith(f"{name}==")
    )
    return line.partition("==")[2].split()[0]


def fitserve(where: Where, workers: int = 1, tree: Path = ROOT) -> Started:
    """`tree`: the checkout whose package is started, this one or another to compare with."""
    limits = {"max_connections", "max_connections_per_address"} & Settings.model_fields.keys()
    process = where.launch(
        [sys.executable, "-m", "gateway", "serve"],
        **{f"FITSERVE_{name.upper()}": "100000" for name in limits},
        PYTHONPATH=str(tree),
        FITSERVE_PORT=str(where.port),
        FITSERVE_DATA_DIR=str(where.folder / "data"),
        FITSERVE_HOST_KIND="process",
        FITSERVE_WORKERS=str(workers),
        FITSERVE_STOP_GRACE_S="1",
        FITSERVE_ADMIN_KEY=KEY + "-admin",
        FITSERVE_API_KEY=KEY,
    )
    started = where.start_process(process, "/healthz", "")
    model = {"name": "m", "endpoints": [f"http://127.0.0.1:{where.engine}/v1"]}
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=10)
    headers = {"authorization": f"Bearer {KEY}-admin", "content-type": "application/json"}
    connection.request("POST", "/admin/models", json.dumps(model), headers)
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    if answer.status >= 300 or not processes.wait_until(
        where.port, "/v1/models/m", process, 20, KEY, b'"state":"ready"'
    ):
        processes.stop(process)
        raise Missing(f"did not take the fake engine as a model: {answer.status} {text[:300]}")
    metrics = "on" if processes.get(where.port, "/metrics", KEY + "-admin") == 200 else "not there"
    started.about = f"{metadata.version('fitserve')}, keys on, metrics {metrics}" + (
        f", {workers} workers" if workers > 1 else ""
    )
    return started


def nginx(where: Where) -> Started:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise Missing("nginx is not installed (Debian: apt-get install nginx-light)")
    files = processes.raise_file_limit()
    text = NGINX.format(
        folder=where.folder,
        port=where.port,
        engine=where.engine,
        files=files,
        connections=files - 100,
    )
    (where.folder / "nginx.conf").write_text(text)
    process = where.launch(
        [program, "-c", str(where.folder / "nginx.conf"), "-e", str(where.folder / "nginx.err")]
    )
    shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    return where.start_process(
        process, "/health", f"{shown.rpartition('/')[2].split()[0]}, one worker"
    )


def rust_router(name: str, command: list[str]) -> Callable[[Where], Started]:
    def start(where: Where) -> Started:
        folder = environment(name)
        metrics = str(processes.free_port())
        process = where.launch(
            [
                *(
                    str(folder / "bin" / command[0]),
                    *command[1:],
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(where.port),
                ),
                *(
                    "--worker-urls",
                    f"http://127.0.0.1:{where.engine}",
                    "--policy",
                    "round_robin",
                    "--log-level",
                    "error",
                ),
                *(
                    "--prometheus-host",
                    "127.0.0.1",
                    "--prometheus-port",
                    metrics,
                    "--max-concurrent-requests",
                    "100000",
                ),
            ]
        )
        # /health says 200 before a worker is taken in; an answered question does not.
        started = where.start_process(process, "/health", f"{version(name)}, metrics on")
        deadline = time.monotonic() + 60
        while not _answers(where.port):
            if time.monotonic() > deadline:
                processes.stop(process)
                raise Missing("never passed a request on")
            time.sleep(0.2)
        return started

    return start


def litellm(where: Where) -> Started:
    folder = environment("litellm")
    (where.folder / "config.yaml").write_text(LITELLM.format(engine=where.engine))
    process = where.launch(
        [
            str(folder / "bin" / "litellm"),
            "--config",
            "config.yaml",
            "--host",
            "127.0.0.1",
            "--port",
            str(where.port),
        ],
        LITELLM_LOG="ERROR",
        LITELLM_MODE="PRODUCTION",
        LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
        PYTHONPATH="",
        NO_DOCS="True",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    return where.start_process(
        process, "/health/liveliness", f"{version('litellm')}, one worker, no keys", seconds=180
    )


def _answers(port: int) -> bool:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


STARTERS: dict[str, Callable[[Where], Started]] = {
    "nginx": nginx,
    "fitserve": fitserve,
    "fitserve-2": functools.partial(fitserve, workers=2),
    "sglang-router": rust_router("sglang-router", ["python", "-m", "sglang_router.launch_router"]),
    "vllm-router": rust_router("vllm-router", ["vllm-router"]),
    "litellm": litellm,
}
"""Reference first; the fake engine itself comes in as `direct`."""
