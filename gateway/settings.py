"""Settings: environment (`FITSERVE_*`) > file named by FITSERVE_CONFIG (YAML) > defaults."""

from __future__ import annotations

import base64
import difflib
import ipaddress
import os
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from gateway import variables
from gateway.domain.facts import EVENT_KINDS
from gateway.domain.units import FOR_EVER, Duration
from gateway.errors import BadFlag, SettingsError

# Variables that are no setting: where the settings are, and the command line's way to a gateway.
_OTHERS = {"FITSERVE_CONFIG", "FITSERVE_URL", "FITSERVE_KEY"}
# Keys for engines that run elsewhere; which of them is used a model says.
_ENDPOINT_KEY = "FITSERVE_ENDPOINT_KEY"
# As browsers send them in the header `Origin` (RFC 6454, section 6.2); apps have schemes of their
# own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#]+", re.IGNORECASE)


class Settings(BaseModel):
    """Every setting of the gateway. Names are the environment variables without `FITSERVE_`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    host: str = Field(
        "127.0.0.1", description="address to listen on; anything but loopback needs an admin key"
    )
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0: any free one")
    tls_cert: Path | None = Field(
        None,
        description=(
            "PEM file with the certificate and its chain: clients come by TLS then; read again when"
            " it changes"
        ),
    )
    tls_key: Path | None = Field(
        None, description="PEM file with the key of tls_cert; default: the same file"
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description=(
            "processes that answer inference, one per core; above 1, one more process has the state"
        ),
    )
    data_dir: Path = Field(
        Path("~/.local/share/fitserve"), description="database, engine environments, logs"
    )
    models_dir: Path | None = Field(
        None,
        description=(
            "the cache of models, in the layout of the Hugging Face Hub; default: HF_HUB_CACHE,"
            " HF_HOME/hub, or ~/.cache/huggingface/hub"
        ),
    )
    models_source: str | None = Field(
        None,
        description=(
            "volume or host folder behind models_dir, when the gateway itself runs in a container"
        ),
    )
    models_file: Path | None = Field(
        None,
        description=(
            "YAML file of models that the gateway serves, and watches: docs/models.example.yaml"
        ),
    )
    profiles_dir: Path | None = Field(
        None, description="a folder whose profiles are added to, and win over, the shipped ones"
    )
    admin_key: SecretStr | None = Field(
        None, description="bearer key for everything; at least 8 characters"
    )
    api_key: SecretStr | None = Field(None, description="bearer key for /v1 only")
    hf_token: SecretStr | None = Field(None, description="for downloads only; engines never get it")
    hf_endpoint: str | None = Field(
        None, description="another Hugging Face Hub; default: the public one"
    )
    host_kind: Literal["auto", "docker", "agent", "process"] = Field(
        "auto",
        description=(
            "where engines run; auto: Docker where it runs, else processes; agent: Docker, which an"
            " agent alone reaches"
        ),
    )
    agent_socket: Path | None = Field(
        None,
        description=(
            "Unix socket of the agent (`fitserve agent`), on both sides; default:"
            " DATA_DIR/agent.sock"
        ),
    )
    docker_network: str = Field(
        "fitserve-engines", description="internal network of the engines' containers"
    )
    allowed_images: str | None = Field(
        None,
        description=(
            "names of images that engines may be started from, with commas between them:"
            " repositories, or names with a tag; `*` is any text; default: the repositories that"
            " profiles name"
        ),
    )
    origins: str = Field(
        "",
        description=(
            "origins of web pages that may call, with commas between, as `https://app.example`;"
            " `*`: all, which opens no admin API that has no key; never with credentials"
        ),
    )
    engine_env: dict[str, str] = Field(
        {},
        description=(
            "environment variables of all engines: NAME=VALUE with spaces between, quoted as in a"
            " shell; in FITSERVE_CONFIG a mapping"
        ),
    )
    gpus: str | None = Field(
        None,
        description=(
            "GPUs that engines may be given, by index or UUID, with commas between; default: all,"
            " or those of CUDA_VISIBLE_DEVICES"
        ),
    )
    ram_bytes: int | None = Field(
        None,
        gt=0,
        description=(
            "as if the machine had no more RAM than this: engines on a CPU take turns in it;"
            " default: its RAM, or its cgroup's limit"
        ),
    )
    start_timeout_s: float = Field(
        1800, gt=0, description="longest time without a new log line until a start counts as failed"
    )
    stop_grace_s: float = Field(
        20, ge=0, description="time an engine, or a stream at shutdown, gets to finish"
    )
    stop_engines: bool = Field(
        False,
        description=(
            "end the engines with the gateway; else they go on, and the next gateway adopts them"
        ),
    )
    drain_s: float = Field(
        300,
        ge=0,
        description=(
            "longest time that an engine which is replaced, unloaded or stopped gets to finish its"
            " requests; new requests go elsewhere, or wait"
        ),
    )
    backoff_s: float = Field(
        10,
        gt=0,
        description="first wait before the same plan is started again; doubles to backoff_max_s",
    )
    backoff_max_s: float = Field(300, gt=0, description="longest wait between two starts")
    keep_alive: Duration = Field(
        FOR_EVER,
        description=(
            "how long a model stays loaded without a request, where it does not say itself: 5m,"
            " 1h30m, 300 (seconds), 0, -1: for ever"
        ),
    )
    tick_s: float = Field(0.5, gt=0, description="longest time between two looks at the world")
    health_interval_s: float = Field(
        5, gt=0, description="time between two looks at a running engine"
    )
    silent_after_s: float = Field(
        8,
        gt=0,
        description=(
            "an engine that is silent and idle for so long gets no requests until it answers"
        ),
    )
    hang_after_s: float = Field(
        60,
        gt=0,
        description=(
            "an engine that answers no health check, or is stopped, for so long counts as hung and"
            " is replaced"
        ),
    )
    body_limit_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="largest request body; what is kept of all bodies at once is about twice this",
    )
    max_connections: int = Field(
        2048, ge=1, description="most connections of clients at once; more are told to come back"
    )
    max_connections_per_address: int = Field(
        1536,
        ge=1,
        description=(
            "most connections from one address, or from one IPv6 network (/64); a load balancer in"
            " front is one address"
        ),
    )
    keep_alive_s: float = Field(
        75, gt=0, description="longest time a connection is kept without a request"
    )
    engine_silence_s: float = Field(
        3600, gt=0, description="longest silence of an engine in a request; a prefill is silent"
    )
    queue_per_model: int | None = Field(
        None,
        ge=0,
        description=(
            "requests that may wait for a model; 0: none; default: twice what its engines take at"
            " once, 128 at least"
        ),
    )
    queue_timeout_s: float = Field(
        120,
        gt=0,
        description="longest time a request waits while all engines of its model are busy",
    )
    waiting_comment_s: float = Field(
        10,
        ge=0,
        description=(
            "a stream that waits for a model hears a comment so often, and so its head; 0: never"
        ),
    )
    auto_tune: bool = Field(
        False,
        description=(
            "try another plan in a quiet hour where it should be better than what runs, and keep"
            " the faster one"
        ),
    )
    auto_tune_quiet_s: float = Field(
        600,
        gt=0,
        description="a model without a request for so long is measured, and other plans tried",
    )
    failpoint: str = Field(
        "",
        description="for tests of recovery: the gateway kills itself there, as at `Launch.before`",
    )
    webhook: SecretStr | None = Field(
        None,
        description=(
            "URLs that events are told to (docs/events.md), with commas between; redirects are not"
            " followed"
        ),
    )
    webhook_secret: SecretStr | None = Field(
        None,
        description=(
            "signs what webhooks get: `whsec_` and the base64 of 24 to 64 bytes, as"
            " standardwebhooks.com has it"
        ),
    )
    webhook_events: str = Field(
        "gateway.*,model.added,model.changed,model.change_refused,model.removed,plan.fallback,plan.none,engine.ready,engine.failed,"
        "engine.quarantined,engine.frozen,gpu.*,key.*",
        description="kinds of events that webhooks get, with commas between; `*` is any text",
    )
    access_log: bool = Field(
        False,
        description=(
            "one line of JSON per request on standard error, the admin API's too; never its words"
            " or keys"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @field_validator("origins")
    @classmethod
    def _origins_of_pages(cls, given: str) -> str:
        for one in given.split(","):
            if one.strip() not in ("", "*") and not _ORIGIN.fullmatch(one.strip()):
                raise ValueError(
                    f"{one.strip()[:100]!r} is no origin: give SCHEME://HOST or SCHEME://HOST:PORT,"
                    " without a path"
                )
        return given

    @field_validator("engine_env", mode="before")
    @classmethod
    def _words_of_a_shell(cls, given: Any) -> Any:
        """Raises ValueError that repeats no value: it may be a secret."""
        if isinstance(given, str):
            pairs = [word.partition("=") for word in shlex.split(given)]
            if any(not equals for _, equals, _ in pairs):
                raise ValueError("it takes NAME=VALUE, with spaces between")
            given = {name: value for name, _, value in pairs}
        if isinstance(given, dict):
            given = {
                str(name): value if isinstance(value, str) else str(value)
                for name, value in given.items()
            }
            for name, value in given.items():
                try:
                    variables.check(None, name, value)
                except BadFlag as error:
                    raise ValueError(str(error).rstrip(".")) from None
        return given

    @field_validator(
        "tls_cert",
        "tls_key",
        "data_dir",
        "models_dir",
        "models_file",
        "profiles_dir",
        "agent_socket",
    )
    @classmethod
    def _paths(cls, given: Path | None) -> Path | None:
        try:
            if given is not None and "\0" in str(given.expanduser()):
                raise ValueError("no path has a NUL in it")
        except RuntimeError:
            raise ValueError(f"{given} names the home of a user who is not here") from None
        return given

    @property
    def data(self) -> Path:
        return self.data_dir.expanduser().absolute()

    @field_validator("webhook")
    @classmethod
    def _urls_of_webhooks(cls, given: SecretStr | None) -> SecretStr | None:
        for number, url in enumerate(
            _listed(given.get_secret_value()) if given is not None else (), 1
        ):
            parts = urlsplit(url)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or not url.isascii()
                or not url.isprintable()
            ):
                # It may hold a secret, so it is not told.
                raise ValueError(
                    f"the URL {number} is none that begins with http:// or https:// and names a"
                    " host"
                )
            if "@" in parts.netloc or parts.fragment:
                raise ValueError(
                    f"the URL {number} has a user, a password or a fragment; give one without"
                )
        return given

    @field_validator("webhook_secret")
    @classmethod
    def _secret_of_webhooks(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None and not 24 <= len(_webhook_key(given) or b"") <= 64:
            raise ValueError(
                "it is not `whsec_` and the base64 of 24 to 64 bytes; make one with `python3 -c"
                ' \'import base64, secrets; print("whsec_" +'
                " base64.b64encode(secrets.token_bytes(32)).decode())'`"
            )
        return given

    @field_validator("webhook_events")
    @classmethod
    def _kinds_of_events(cls, given: str) -> str:
        for pattern in _listed(given):
            if not any(fnmatchcase(kind, pattern) for kind in EVENT_KINDS):
                raise ValueError(
                    f"{pattern[:100]!r} is no kind of event; docs/events.md lists them"
                )
        return given

    @property
    def webhook_urls(self) -> tuple[str, ...]:
        return _listed(self.webhook.get_secret_value()) if self.webhook is not None else ()

    @property
    def webhook_key(self) -> bytes | None:
        return _webhook_key(self.webhook_secret) if self.webhook_secret is not None else None

    @property
    def webhook_kinds(self) -> tuple[str, ...]:
        return _listed(self.webhook_events)

    @property
    def web_origins(self) -> tuple[str, ...]:
        return tuple(sorted({one.strip().lower() for one in self.origins.split(",")} - {""}))

    @property
    def models(self) -> Path:
        return (self.models_dir or _hub_cache()).expanduser().absolute()

    @property
    def agent(self) -> Path:
        return (self.agent_socket or self.data / "agent.sock").expanduser().absolute()

    @property
    def shared_models(self) -> str | None:
        """What engines in containers mount at `models`; None: each mounts the folder of its own
        model."""
        return self.models_source or (str(self.models) if self.host_kind == "agent" else None)

    @property
    def own_url(self) -> str:
        """Where programs of this machine ask the gateway."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "localhost") else self.host
        return f"http{'s' if self.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _listed(given: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in given.split(",") if one.strip())


def _webhook_key(secret: SecretStr) -> bytes | None:
    """None: it is no base64."""
    try:
        return base64.b64decode(secret.get_secret_value().removeprefix("whsec_"), validate=True)
    except ValueError:
        return None


def load_settings() -> Settings:
    """Read and check the settings. Raises SettingsError naming the variable and what it may be."""
    known = {f"FITSERVE_{name.upper()}" for name in Settings.model_fields} | _OTHERS
    unknown = sorted(
        name for name in os.environ if name.startswith("FITSERVE_") and name not in known
    )
    for name in (name for name in unknown if not f"{name}_".startswith(f"{_ENDPOINT_KEY}_")):
        meant = difflib.get_close_matches(name, known, 1)
        raise SettingsError(
            f"There is no setting {name}.",
            hint=(f"{meant[0]} may be meant; " if meant else "")
            + "`fitserve serve --help` lists the settings.",
        )
    try:
        settings = Settings(**_of_file() | _of_environment())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "FITSERVE_" + "_".join(str(part) for part in first["loc"]).upper()
        raise SettingsError(
            f"{name} is wrong: {first['msg'].removeprefix('Value error, ')}.",
            hint="Correct it and start again.",
        ) from None
    if not settings.loopback and settings.admin_key is None:
        raise SettingsError(
            f"Refusing to listen on {settings.host} without a key: anyone who reaches that address"
            " could start programs here.",
            hint="Set FITSERVE_ADMIN_KEY, or listen on 127.0.0.1.",
        )
    for name in ("admin_key", "api_key"):
        key = getattr(settings, name)
        if key is not None and len(key.get_secret_value()) < 8:
            raise SettingsError(
                f"FITSERVE_{name.upper()} has fewer than 8 characters.",
                hint="Use a long random one.",
            )
    return settings


def _of_environment() -> dict[str, Any]:
    """By the names of fields. An empty variable is none."""
    given = {name: os.environ.get(f"FITSERVE_{name.upper()}") for name in Settings.model_fields}
    return {name: value for name, value in given.items() if value}


def _of_file() -> dict[str, Any]:
    """What the file says that FITSERVE_CONFIG names. Raises SettingsError."""
    path = os.environ.get("FITSERVE_CONFIG")
    if not path:
        return {}
    import yaml  # few have such a file

    if not Path(path).is_file():
        raise SettingsError(
            f"FITSERVE_CONFIG names {path}, which is not a file.",
            hint="Correct the path or unset it.",
        )
    try:
        said = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(
            f"The file named by FITSERVE_CONFIG cannot be read: {error.strerror}.",
            hint=f"Let this user read {path}.",
        ) from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # a date that is none; brackets without end
        raise SettingsError(
            f"The file named by FITSERVE_CONFIG is not YAML: {error}",
            hint="Correct it and start again.",
        ) from None
    if said is not None and not (
        isinstance(said, dict) and all(isinstance(name, str) for name in said)
    ):
        raise SettingsError(
            "The file named by FITSERVE_CONFIG holds no settings.",
            hint="Write lines such as `port: 8080` into it.",
        )
    return said or {}


def listed() -> list[tuple[str, str]]:
    """Every variable, and what it is for with its default."""
    found = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", {}) else f" [{field.default}]"
        found.append((f"FITSERVE_{name.upper()}", f"{field.description}{default}"))
    return found


def _hub_cache() -> Path:
    """The cache that all programs of this user share. Source: huggingface_hub/constants.py, which
    takes longer to import than a command may."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(
        os.path.expandvars(
            os.environ.get("HF_HUB_CACHE")
            or os.environ.get("HUGGINGFACE_HUB_CACHE")
            or f"{home}/hub"
        )
    )
