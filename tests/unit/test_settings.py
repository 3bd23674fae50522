"""Settings from the environment and the settings file, and their faults."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from gateway.domain.units import ENDLESS_DURATION, duration_text, format_bytes
from gateway.errors import SettingsError
from gateway.settings import Settings, load_settings, signing_key
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "settings.md"
# Defaults of this many seconds are shown in minutes or hours too.
LONG_S = 120


def default_text(name: str) -> str:
    """The default in brackets, as a user types it, with its meaning; "": there is none."""
    default = Settings.model_fields[name].default
    if not isinstance(default, bool | int | float):
        return f" (`{default}`)" if default else ""
    if isinstance(default, bool):
        return f" (`{'yes' if default else 'no'}`)"
    meaning = ""
    if default == ENDLESS_DURATION or (name.endswith("_s") and default >= LONG_S):
        meaning = f", {duration_text(default)}"
    elif name.endswith("_bytes"):
        meaning = f", {format_bytes(int(default))}"
    number = f"{default:.12g}"
    return f" (`{number}`{meaning})"


def item(name: str) -> str:
    return (
        f"`FITSERVE_{name.upper()}`{default_text(name)}: {Settings.model_fields[name].description}"
    )


def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    section = PAGE.read_text().partition("\n## List\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if not line.startswith("### ")]
    items = [" ".join(text.split()) for text in "\n".join(lines).split("\n* ")[1:]]
    assert items == [item(name) for name in Settings.model_fields]


def test_defaults_of_the_page_are_typed_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_texts = {
        name: text.removeprefix(" (`").partition("`")[0]
        for name in Settings.model_fields
        if (text := default_text(name))
    }
    for name, text in shown_texts.items():
        monkeypatch.setenv(f"FITSERVE_{name.upper()}", text)
    settings = load_settings()
    defaults = Settings()
    assert {
        name for name in shown_texts if getattr(settings, name) != getattr(defaults, name)
    } == set()
    assert {"keep_alive", "stop_engines", "trace_ratio"} <= shown_texts.keys()


def test_empty_variables_are_unset_and_files_lose_to_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "settings.yaml").write_text("port: 9000\nlog_level: debug\n")
    monkeypatch.setenv("FITSERVE_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("FITSERVE_PORT", "9001")
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "")
    settings = load_settings()
    assert (settings.port, settings.log_level, settings.admin_key) == (9001, "debug", None)


def test_a_file_that_is_not_yaml_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "settings.yaml").write_text("port: [")
    monkeypatch.setenv("FITSERVE_CONFIG", str(tmp_path / "settings.yaml"))
    with pytest.raises(SettingsError, match="not YAML"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"- port", "holds no settings"),
        (b"8080: port", "holds no settings"),
        (b"words", "holds no settings"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"prot: 1", "FITSERVE_PROT is wrong: there is no such field .did you mean port"),
        (b"port: none", "FITSERVE_PORT is wrong"),
        (None, "cannot be read: .*. Let this user read"),
    ],
)
def test_a_broken_settings_file_is_reported(
    text: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    if text is None:
        path.touch()
        monkeypatch.setattr(
            Path, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied"))
        )
    else:
        path.write_bytes(text)
    monkeypatch.setenv("FITSERVE_CONFIG", str(path))
    with pytest.raises(SettingsError, match=words):
        load_settings()


def test_an_empty_file_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("# nothing yet\n")
    monkeypatch.setenv("FITSERVE_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("FITSERVE_ACCESS_LOG", "yes")
    monkeypatch.setenv("FITSERVE_KEEP_ALIVE", "1h30m")
    monkeypatch.setenv("FITSERVE_DATA_DIR", "/d")
    settings = load_settings()
    assert (settings.access_log, settings.keep_alive, settings.data, settings.port) == (
        True,
        5400,
        Path("/d"),
        8080,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("FITSERVE_HOST", host)
    assert load_settings().is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_every_address_but_loopback_needs_a_key(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("FITSERVE_HOST", host)
    if not host:
        assert load_settings().is_loopback
        return
    with pytest.raises(SettingsError, match="without a key"):
        load_settings()
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "a-long-enough-key")
    assert load_settings().host == host


def test_origins_of_web_pages_are_as_browsers_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "FITSERVE_ORIGINS", "https://App.example, http://localhost:3000,tauri://localhost"
    )
    assert load_settings().web_origins == (
        "http://localhost:3000",
        "https://app.example",
        "tauri://localhost",
    )
    for wrong in ("app.example", "https://app.example/path", "https://a b"):
        monkeypatch.setenv("FITSERVE_ORIGINS", wrong)
        with pytest.raises(SettingsError, match=r"FITSERVE_ORIGINS is wrong: .* is not an origin"):
            load_settings()


def test_variables_of_engines_are_words_of_a_shell_or_a_mapping(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "FITSERVE_ENGINE_ENV",
        "NCCL_DEBUG=WARN  TORCH_CUDA_ARCH_LIST='9.0a 10.0'\nVLLM_USE_DEEP_GEMM=0",
    )
    engine_env = load_settings().engine_env
    assert engine_env == {
        "NCCL_DEBUG": "WARN",
        "TORCH_CUDA_ARCH_LIST": "9.0a 10.0",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    monkeypatch.delenv("FITSERVE_ENGINE_ENV")
    (tmp_path / "settings.yaml").write_text("engine_env: {OMP_NUM_THREADS: 8}\n")
    monkeypatch.setenv("FITSERVE_CONFIG", str(tmp_path / "settings.yaml"))
    assert load_settings().engine_env == {"OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("LD_PRELOAD=/tmp/hunter2.so", "LD_PRELOAD cannot be given to engines: it loads code"),
        ("HF_TOKEN=hunter2", "HF_TOKEN cannot be given to engines: it holds a secret"),
        ("NCCL_DEBUG='hunter2", "No closing quotation"),
        ("hunter2", "give NAME=VALUE"),
        ("VLLM_PLUGINS=hunter2", "it loads code"),
        ("https_proxy=http://me:hunter2@proxy:1", "has a password"),
    ],
)
def test_a_variable_that_engines_may_not_have_stops_the_start_and_is_not_repeated(
    setting: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_ENGINE_ENV", setting)
    with pytest.raises(SettingsError, match="FITSERVE_ENGINE_ENV") as error:
        load_settings()
    assert reason in str(error.value)
    assert "hunter2" not in str(error.value)


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_webhooks_are_urls_and_their_secret_is_one_of_standard_webhooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FITSERVE_WEBHOOK", "https://a.example/T0/secret?x=1, http://127.0.0.1:9")
    monkeypatch.setenv("FITSERVE_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("FITSERVE_WEBHOOK_EVENTS", "engine.*, gpu.lost")
    settings = load_settings()
    urls = tuple(url.reveal() for url in settings.webhook_urls)
    assert urls == ("https://a.example/T0/secret?x=1", "http://127.0.0.1:9")
    assert settings.webhook_kinds == ("engine.*", "gpu.lost")
    assert settings.webhook_secret is not None
    assert len(signing_key(settings.webhook_secret)) == 24
    assert "T0" not in repr(settings)
    assert SECRET not in repr(settings)


def check_refusal_without_secrets(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The refusal of a value names its setting, and no text `hidden` of the value."""
    monkeypatch.setenv(f"FITSERVE_{name}", value)
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert f"FITSERVE_{name}" in str(error.value)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEBHOOK", "a.example/T0/hidden"),
        ("WEBHOOK", "ftp://a.example/hidden"),
        ("WEBHOOK", "https://user:hidden@a.example/"),
        ("WEBHOOK", "https://a.example/hidden#x"),
        ("WEBHOOK", "https://a.example/\r\nhidden: 1"),
        ("WEBHOOK_SECRET", "hidden"),
        ("WEBHOOK_SECRET", "whsec_aGlkZGVu"),
        ("WEBHOOK_EVENTS", "engine.readi"),
    ],
)
def test_a_wrong_setting_of_a_webhook_is_reported_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    check_refusal_without_secrets(monkeypatch, name, value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("public", ()),
        ("a.example,public", ()),
        ("*.example, b.example", ()),
        ("A.example, 10.0.0.7,2001:db8::1", ("a.example", "10.0.0.7", "[2001:db8::1]")),
        ("none", ("none.invalid",)),
    ],
)
def test_engines_get_the_hosts_of_media_where_a_list_of_names_says_it(
    monkeypatch: pytest.MonkeyPatch, text: str, hosts: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FITSERVE_MEDIA_HOSTS", text)
    assert load_settings().engine_media_hosts == hosts


def test_a_host_of_media_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITSERVE_MEDIA_HOSTS", "-a.example")
    with pytest.raises(SettingsError, match="is not a host"):
        load_settings()


def test_folders_for_browsing_are_absolute_and_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITSERVE_MODEL_FOLDERS", "/models/../srv/models,/data")
    assert load_settings().browsable_folders == (Path("/srv/models"), Path("/data"))
    monkeypatch.setenv("FITSERVE_MODEL_FOLDERS", "none")
    assert load_settings().browsable_folders == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTLP_ENDPOINT", "127.0.0.1:4318"),
        ("OTLP_ENDPOINT", "http://me:hidden@host:4318"),
        ("OTLP_ENDPOINT", "http://host:4318/?token=hidden"),
        ("ENGINE_OTLP_ENDPOINT", "http://host:4317 --hidden"),
        ("OTLP_HEADERS", "authorization hidden"),
        ("OTLP_HEADERS", "a b=hidden"),
        ("OTLP_HEADERS", "x=hidden\x01"),
        ("OTLP_SIGNALS", "logs"),
        ("OTLP_SIGNALS", ","),
        ("OTLP_PROTOCOL", "udp"),
        ("TRACE_RATIO", "1.5"),
    ],
)
def test_a_wrong_setting_of_traces_is_reported_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    check_refusal_without_secrets(monkeypatch, name, value)


def test_traces_are_off_without_a_collector_and_by_their_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_settings().request_trace_ratio is None
    monkeypatch.setenv("FITSERVE_OTLP_ENDPOINT", "https://collector.example:4318/otlp")
    monkeypatch.setenv("FITSERVE_TRACE_RATIO", "0.25")
    monkeypatch.setenv("FITSERVE_OTLP_HEADERS", "Authorization=Bearer a=b, X-Team=red")
    settings = load_settings()
    assert settings.request_trace_ratio == 0.25
    assert not settings.exports("metrics")
    assert settings.collector_headers == {"authorization": "Bearer a=b", "x-team": "red"}
    monkeypatch.setenv("FITSERVE_OTLP_SIGNALS", "metrics")
    settings = load_settings()
    assert settings.exports("metrics")
    assert settings.request_trace_ratio is None
