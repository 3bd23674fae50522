"""Lines and progress out of Docker's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from gateway.domain import EngineRef
from gateway.domain.units import TransferProgress
from gateway.errors import HostError
from gateway.hosts.docker.client import is_available, socket_path
from gateway.hosts.docker.container import container_name, gpu_request, image_of
from gateway.hosts.docker.stream import LogLines, PullProgress
from gateway.hosts.host import MAX_LINE


def frame(second: int, text: bytes, source: int = 1) -> bytes:
    body = b"2026-01-02T03:04:%02d.000000005Z %b" % (second, text)
    return bytes([source, 0, 0, 0]) + len(body).to_bytes(4, "big") + body


def test_lines_come_whole_however_the_bytes_are_cut() -> None:
    log = (
        frame(1, b"one\n") + frame(2, b"\n") + frame(3, b"tw") + frame(4, b"o\n") + frame(5, b"end")
    )
    for size in range(1, len(log) + 1):
        lines = LogLines()
        lines.resume()
        lines_of_stream = [
            line for at in range(0, len(log), size) for line in lines.feed(log[at : at + size])
        ]
        assert lines_of_stream == [b"one", b"", b"two"]
        assert list(lines.rest()) == [b"end"]
        assert list(lines.rest()) == []


def test_stdout_and_stderr_do_not_mix_within_a_line() -> None:
    lines = LogLines()
    log = frame(1, b"out ", 1) + frame(2, b"err ", 2) + frame(3, b"1\n", 1) + frame(4, b"2\n", 2)
    assert list(lines.feed(log)) == [b"out 1", b"err 2"]


def test_a_line_of_many_entries_is_cut_at_the_limit() -> None:
    lines = LogLines()
    log = (
        b"".join(frame(second, b"x" * 16384) for second in range(5))
        + frame(6, b"x\n")
        + frame(7, b"next\n")
    )
    assert list(lines.feed(log)) == [b"x" * MAX_LINE, b"next"]


def test_no_line_is_lost_or_given_twice_after_a_break() -> None:
    log = [frame(1, b"one\n"), frame(2, b"tw"), frame(3, b"o\n"), frame(4, b"three\n")]
    for at in range(len(b"".join(log))):
        lines = LogLines()
        assert lines.resume() == "0"
        lines_before = list(lines.feed(b"".join(log)[:at]))
        since = float(lines.resume())
        assert since in (0, 1767323041.000000005, 1767323042.000000005, 1767323043.000000005)
        # Docker answers with entries that are not older than `since`, the last known entry among
        # it.
        later_entries = [
            entry for second, entry in enumerate(log, 1) if 1767323040 + second >= int(since)
        ]
        assert lines_before + list(lines.feed(b"".join(later_entries))) == [
            b"one",
            b"two",
            b"three",
        ]


def test_the_time_to_resume_from_is_exact() -> None:
    lines = LogLines()
    list(lines.feed(frame(7, b"x\n")))
    assert lines.resume() == "1767323047.000000005"


def test_entries_out_of_order_within_one_answer_are_all_given() -> None:
    lines = LogLines()
    assert list(lines.feed(frame(2, b"b\n") + frame(1, b"a\n"))) == [b"b", b"a"]


def test_pull_progress_counts_the_bytes_of_all_layers() -> None:
    def events(*items: Mapping[str, object]) -> bytes:
        return b"".join(json.dumps(item).encode() + b"\r\n" for item in items)

    def download_event(layer: str, current: float, total: float) -> dict[str, object]:
        detail = {"current": int(current * 1024**3), "total": int(total * 1024**3)}
        return {"status": "Downloading", "id": layer, "progressDetail": detail}

    progress = PullProgress("some/image:1")
    assert str(progress) == "pulling some/image:1"
    progress.feed(
        events(
            {"status": "Pulling from some/image", "id": "1"},
            *({"status": "Pulling fs layer", "id": x} for x in "abc"),
        )
    )
    assert str(progress) == "pulling some/image:1"
    progress.feed(events({"status": "Already exists", "id": "a"}, download_event("b", 1.5, 6)))
    assert str(progress) == "pulling some/image:1: 1.5 of more than 6.0 GiB"
    first_event = events(download_event("c", 1.6, 2.2))[:20]
    second = events(download_event("c", 1.6, 2.2))[20:]
    progress.feed(first_event)
    progress.feed(second)
    assert str(progress) == "pulling some/image:1: 3.1 of 8.2 GiB"
    words = progress.describe()
    assert isinstance(words, TransferProgress)
    assert round(100 * words.bytes_done / words.total) == 38
    progress.feed(events({"status": "Download complete", "id": "b"}))
    assert str(progress) == "pulling some/image:1: 7.6 of 8.2 GiB"
    progress.feed(events({"status": "Verifying Checksum", "id": "c"}))
    assert str(progress) == "unpacking some/image:1: 8.2 GiB"
    assert progress.error is None
    progress.feed(events({"errorDetail": {"message": "no space left"}, "error": "no space left"}))
    assert progress.error == "no space left"


@pytest.mark.parametrize("name", ["demo", "demo-0", "A_b.c"])
def test_a_legal_name_is_kept(name: str) -> None:
    assert container_name(name, "0123456789ab") == f"fitserve-0123456789ab-{name}"


def test_names_that_docker_refuses_stay_apart() -> None:
    names = [container_name(name, "0123456789ab") for name in ("a/b", "a-b", "a b", "a:b", "ä")]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and "/" not in name and " " not in name for name in names)


UUIDS = ("GPU-1", "GPU-2")
CDI = [{"Source": "cdi", "ID": f"nvidia.com/gpu={name}"} for name in ("GPU-1", "GPU-2", "all")]


@pytest.mark.parametrize(
    "info",
    [
        {"Runtimes": {"runc": {}}},
        {"Runtimes": {"runc": {}, "nvidia": {}}, "DiscoveredDevices": CDI},
    ],
)
def test_gpus_are_asked_for_by_uuid(info: dict[str, object]) -> None:
    request = gpu_request(info, UUIDS)
    assert (request.driver, request.device_ids, request.capabilities) == (
        "",
        ["GPU-1", "GPU-2"],
        [["gpu"]],
    )


def test_gpus_are_cdi_devices_where_docker_has_only_those() -> None:
    request = gpu_request({"Runtimes": {"runc": {}}, "DiscoveredDevices": CDI}, UUIDS)
    assert (request.driver, request.device_ids) == (
        "cdi",
        ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"],
    )
    assert (
        gpu_request({"Runtimes": {"runc": {}}, "DiscoveredDevices": CDI}, ("GPU-3",)).driver == ""
    )


def test_an_engine_without_an_image_is_refused() -> None:
    with pytest.raises(HostError, match="vllm==1 has no container image"):
        image_of(EngineRef(kind="vllm", version="1"))


def test_the_socket_is_named_by_the_argument_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert socket_path() == "/var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1/docker.sock")
    assert socket_path() == "/run/user/1/docker.sock"
    assert socket_path("unix:///x") == "/x"


def test_docker_on_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2376")
    with pytest.raises(HostError, match=r"tcp://10\.0\.0\.1:2376 cannot be used"):
        socket_path()
    assert not is_available()
