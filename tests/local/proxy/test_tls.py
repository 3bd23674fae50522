"""TLS for clients: versions, changed files, and the trust of the command line."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import SettingsError
from gateway.proxy.tls import Certificate, CertificatePair, server_context
from gateway.secret import Secret
from tests.e2e.conftest import wait_for
from tests.e2e.scripted import scripted_gateway
from tests.support.dataplane import Gateway, until
from tests.support.paths import ROOT
from tests.support.patience import hang_s


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for that name, and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "30",
    ]
    subprocess.run(
        [
            *command,
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=DNS:{name}",
            "-keyout",
            key,
            "-out",
            cert,
        ],
        check=True,
        capture_output=True,
        timeout=hang_s(),
    )
    return cert, key


async def shown_at(port: int, context: ssl.SSLContext) -> str:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = ssl.DER_cert_to_PEM_cert(
        writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    )
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return certificate


def trusting_all() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.anyio
async def test_a_changed_certificate_is_shown_to_new_connections_and_old_ones_go_on(
    tmp_path: Path,
) -> None:
    cert, key = make(tmp_path / "now", "first.example")
    certificate = Certificate(cert, key, look_s=0.01)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(10):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=certificate.context)
    port = server.sockets[0].getsockname()[1]
    certificate.watch()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting_all())
    assert await shown_at(port, trusting_all()) == cert.read_text()
    make(tmp_path / "now", "second.example")
    second = cert.read_text()
    async with asyncio.timeout(hang_s()):
        while await shown_at(port, trusting_all()) != second:
            await asyncio.sleep(0.01)
        # Half of a pair: the one before stays in force.
        other_certificate, _ = make(tmp_path / "other", "third.example")
        cert.write_bytes(other_certificate.read_bytes())
        while not certificate._problem:
            await asyncio.sleep(0.01)
        assert await shown_at(port, trusting_all()) == second
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
    writer.close()
    await writer.wait_closed()
    assert certificate.context.minimum_version == ssl.TLSVersion.TLSv1_2
    await certificate.close()
    server.close()
    await server.wait_closed()


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    cert, _ = make(tmp_path / "one", "a.example")
    _, key = make(tmp_path / "two", "b.example")
    with pytest.raises(SettingsError, match="cannot be used: key values mismatch"):
        Certificate(cert, key)
    with pytest.raises(SettingsError, match="cannot be used: no such file"):
        Certificate(tmp_path / "none.pem", None)


def hold_connections(port: int, address: str, count: int) -> list[socket.socket]:
    """Connections of that address which never say a word of TLS."""
    return [
        socket.create_connection(("127.0.0.1", port), hang_s(), (address, 0)) for _ in range(count)
    ]


async def health(port: int, **options: Any) -> bytes:
    """The first line of the answer; empty where there is none."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting_all(), **options
        )
    except OSError:
        return b""
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line


@pytest.mark.anyio
async def test_handshakes_that_go_on_have_a_place_as_connections_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*make(tmp_path, "a.example"))
    with Gateway(tls=certificate.context, connections=8, connections_per_address=4) as gateway:
        limiter = gateway.plane.connection_limiter
        silent = hold_connections(gateway.port, "127.0.0.2", 100)
        await until(lambda: limiter.admitted_count == 4)
        # Connections of the same address are refused; others are accepted.
        assert await health(gateway.port, local_addr=("127.0.0.2", 0)) == b""
        for _ in range(3):
            assert (await health(gateway.port)).startswith(b"HTTP/1.1 200 ")
        for connection in silent:
            connection.close()
        await until(lambda: limiter.admitted_count == 0)
        # Bytes that are not TLS, and bytes that begin as TLS and end there.
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
            [connection] = hold_connections(gateway.port, "127.0.0.1", 1)
            connection.sendall(words)
            connection.close()
        assert (await health(gateway.port)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: limiter.admitted_count == 0)
        monkeypatch.setattr("gateway.proxy.tls.HANDSHAKE_S", 0.1)
        [slow] = hold_connections(gateway.port, "127.0.0.1", 1)
        assert slow.recv(1) == b""
        slow.close()
        await until(lambda: limiter.admitted_count == 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_gateway_is_reached_by_tls_by_its_own_commands_and_its_health_check_too(
    tmp_path: Path, processes: str
) -> None:
    cert, key = make(tmp_path / "tls", "gateway.example")
    settings = {
        "FITSERVE_TLS_CERT": str(cert),
        "FITSERVE_TLS_KEY": str(key),
        "FITSERVE_WORKERS": processes,
    }
    gateway = scripted_gateway(tmp_path, **settings)

    def healthy() -> bool:
        command = [sys.executable, "-m", "gateway.health"]
        return (
            subprocess.run(
                command, cwd=ROOT, env=gateway.environment, timeout=hang_s(), check=False
            ).returncode
            == 0
        )

    gateway.launch()
    try:
        wait_for("health", lambda: gateway.dead() or healthy())
        assert gateway.cli("ps").returncode == 0, gateway.log.read_text()
        foreign = gateway.environment | {"FITSERVE_URL": f"https://127.0.0.1:{gateway.port}"}
        result = subprocess.run(
            [sys.executable, "-m", "gateway.__main__", "ps"],
            cwd=ROOT,
            env=foreign,
            capture_output=True,
            text=True,
            timeout=hang_s(),
            check=False,
        )
        assert result.returncode == 3  # nobody vouches for it under that name
        assert asyncio.run(shown_at(gateway.port, trusting_all())) == cert.read_text()
    finally:
        gateway.kill(signal.SIGTERM)
        gateway.client.close()


@pytest.mark.anyio
async def test_workers_get_the_pair_that_fits_and_read_no_file(tmp_path: Path) -> None:
    cert, key = make(tmp_path / "now", "first.example")
    certificate = Certificate(cert, key, look_s=0.01)
    certificate_pairs: list[CertificatePair] = []
    certificate.watch(certificate_pairs.append)
    other_certificate, other_key = make(tmp_path / "other", "second.example")
    cert.write_bytes(other_certificate.read_bytes())
    async with asyncio.timeout(hang_s()):
        while not certificate._problem:
            await asyncio.sleep(0.01)
        # A worker that starts now gets the former pair.
        assert not certificate_pairs
        former = server_context(certificate.pair)
        assert certificate.pair.key == Secret(key.read_bytes())
        key.write_bytes(other_key.read_bytes())
        while not certificate_pairs:
            await asyncio.sleep(0.01)
    assert (
        certificate_pairs
        == [CertificatePair(other_certificate.read_bytes(), Secret(other_key.read_bytes()))]
        == [certificate.pair]
    )
    certificate_pairs[0].load_into(former)
    await certificate.close()
