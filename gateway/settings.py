"""Settings: environment (`FITSERVE_*`) > file named by FITSERVE_CONFIG (YAML) > defaults."""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from gateway import variables
from gateway.domain.base import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from gateway.domain.facts import EVENT_KINDS
from gateway.domain.units import ENDLESS_DURATION
from gateway.domain.value import Duration, unknown_field_words
from gateway.errors import BadFlag, SettingsError, hide_typed_password, near_name, plain_problem
from gateway.keys import Scope
from gateway.secret import Secret, shown_address

# Variables that are not settings: the settings file, and the command line's gateway.
_NO_SETTINGS = {"FITSERVE_CONFIG", "FITSERVE_URL", "FITSERVE_KEY"}
# Keys for external engines; a model names the key that it uses.
_ENDPOINT_KEY = "FITSERVE_ENDPOINT_KEY"
# The header `Origin` of browsers (RFC 6454, section 6.2). Apps have other schemes.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#@]+", re.IGNORECASE)
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
# Headers with another meaning to the gateway or to HTTP.
_OWN_HEADERS = frozenset(
    [
        "authorization",
        "host",
        "origin",
        "cookie",
        "x-api-key",
        "content-type",
        "content-length",
        "transfer-encoding",
        "via",
        "x-request-id",
        "sec-fetch-site",
        "user-agent",
    ]
)
# An address of a collector. No user, so that no log shows a password.
COLLECTOR_URL = re.compile(
    r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/[\w./-]{0,200})?",
    re.ASCII,
)
_MEDIA_HOST = re.compile(r"[A-Za-z0-9._*][A-Za-z0-9._*-]*|[0-9A-Fa-f:.]+")


class Settings(BaseModel):
    """Every setting of the gateway. Names are the environment variables without `FITSERVE_`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

    host: str = Field(
        "127.0.0.1", description="address to listen on; anything but loopback needs an admin key"
    )
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0: any free one")
    tls_cert: Path | None = Field(
        None,
        description=(
            "PEM file with the certificate and its chain, for TLS; read again when it changes"
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
            "processes that answer inference, at best one per core; above 1, another process holds"
            " the state"
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
    models_volume: str | None = Field(
        None, description="the volume behind models_dir, where models_source is empty"
    )
    models_file: Path | None = Field(
        None,
        description=(
            "YAML file of models to serve, read again when it changes: docs/models.example.yaml"
        ),
    )
    prices: Path | None = Field(
        None, description="YAML file with prices of models, for budgets of money: docs/keys.md"
    )
    model_folders: str = Field(
        "~/models,/models,/srv/models",
        description=(
            "folders with models that the page may browse, separated by commas; none: no folder"
        ),
    )
    profiles_dir: Path | None = Field(
        None, description="folder of profiles that add to the shipped ones and win over them"
    )
    knowledge_keys: Path | None = Field(
        None,
        description=(
            "folder with public keys (NAME.pem) that may sign knowledge bundles: docs/knowledge.md"
        ),
    )
    admin_key: Secret | None = Field(
        None, description="bearer key for everything; at least 8 characters"
    )
    api_key: Secret | None = Field(None, description="bearer key for /v1 only")
    hf_token: Secret | None = Field(
        None, description="token for downloads only; engines never get it"
    )
    hf_endpoint: Secret | None = Field(
        None, description="another Hugging Face Hub; default: the public one"
    )
    host_kind: Literal["auto", "docker", "agent", "process", "cluster"] = Field(
        "auto",
        description=(
            "where engines run; auto: Docker if it runs, else processes; agent: Docker through the"
            " agent; cluster: processes of all machines of `fitserve cluster`"
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
            "images that engines may be started from, separated by commas: repositories, or names"
            " with a tag; `*` is any text; default: the repositories in the profiles"
        ),
    )
    origins: str = Field(
        "",
        description=(
            "origins of web pages that may call, separated by commas: `https://app.example`; `*`:"
            " all, except for an admin API without a key; never with credentials"
        ),
    )
    roles: dict[Scope, tuple[str, ...]] = Field(
        {},
        description=(
            "scopes of people that a proxy or OIDC names: SCOPE=NAME,group:NAME,* separated by"
            " spaces, quoted as in a shell; in FITSERVE_CONFIG a mapping to lists"
        ),
    )
    person_budget: dict[str, str] = Field(
        {},
        description=(
            "budget of each of these people at the page, such as `tokens_per_day=100000`: limits of"
            " requests, tokens, gpu_seconds or money per day or month, warn_percent, is_soft;"
            " separated by spaces; in FITSERVE_CONFIG a mapping"
        ),
    )
    proxy_user_header: str = Field(
        "",
        description=(
            "header in which a trusted proxy names its user: `Remote-User`, `X-Forwarded-Email`,"
            " `Tailscale-User-Login`; only from proxy_addresses"
        ),
    )
    proxy_groups_header: str = Field(
        "",
        description=(
            "header in which the proxy names the groups of its user: `Remote-Groups`,"
            " `X-Forwarded-Groups`, `X-authentik-groups`"
        ),
    )
    proxy_groups_separator: Literal[",", "|", ";"] = Field(
        ",", description="character between the groups in that header; authentik writes `|`"
    )
    proxy_addresses: str = Field(
        "",
        description=(
            "addresses and networks of the trusted proxy, separated by commas; every program there"
            " may act for every user"
        ),
    )
    proxy_client_header: str = Field(
        "",
        description=(
            "header in which the proxy states the address of its client, for limits and logs:"
            " `X-Forwarded-For`; only from proxy_addresses; default: none"
        ),
    )
    oidc_issuer: str = Field(
        "",
        description=(
            "issuer of OpenID Connect for the page and for bearer tokens of the admin API; needs"
            " the extra packages `oidc`"
        ),
    )
    oidc_client_id: str = Field("", description="id of this gateway at the issuer")
    oidc_client_secret: Secret | None = Field(
        None, description="secret of this gateway at the issuer; none for a public client"
    )
    oidc_url: str = Field(
        "",
        description=(
            "address of this gateway for browsers, such as https://models.example.org; the issuer"
            " leads back to OIDC_URL/auth/callback"
        ),
    )
    oidc_audience: str = Field(
        "", description="audience of bearer tokens of the admin API; default: oidc_client_id"
    )
    oidc_user_claim: str = Field(
        "email", description="claim that names the user; `email` has to be verified by the issuer"
    )
    oidc_groups_claim: str = Field(
        "groups",
        description=(
            "claim that lists the user's groups; dots lead into objects:"
            " `realm_access.roles` of Keycloak"
        ),
    )
    oidc_scopes: str = Field(
        "openid email profile", description="scopes that are asked of the issuer"
    )
    oidc_session_s: float = Field(
        28800, ge=60, le=30 * 86400, description="longest time until a person signs in once more"
    )
    media_hosts: str = Field(
        "public",
        description=(
            "hosts that media URLs in requests may name, separated by commas: names, addresses,"
            " `*.example.org`; `public`: all with public addresses; `none`: none"
        ),
    )
    engine_env: dict[str, str] = Field(
        {},
        description=(
            "environment variables of all engines: NAME=VALUE separated by spaces, quoted as in a"
            " shell; in FITSERVE_CONFIG a mapping"
        ),
    )
    gpus: str | None = Field(
        None,
        description=(
            "GPUs for engines, by index or UUID, separated by commas; default: all, or those of"
            " CUDA_VISIBLE_DEVICES"
        ),
    )
    ram_bytes: int | None = Field(
        None,
        gt=0,
        description=(
            "the most RAM for engines on a CPU; default: the machine's RAM, or the limit of the"
            " cgroup"
        ),
    )
    host_bytes: int | None = Field(
        None,
        ge=0,
        description=(
            "memory that engines leave to the host where GPU and host share theirs (GB10, Jetson);"
            " default: an eighth of it, but at least the smaller of 4 GiB and a quarter of it"
        ),
    )
    prepared_engines: int = Field(
        1,
        ge=0,
        le=8,
        description=(
            "most processes that have imported an engine and fork the next start (without Docker);"
            " each takes 0.5 to 1.5 GiB; 0: none"
        ),
    )
    start_timeout_s: float = Field(
        1800, gt=0, description="a start fails after this time without a new log line"
    )
    stop_grace_s: float = Field(
        20, ge=0, description="time for an engine, or a stream at shutdown, to finish"
    )
    stop_engines: bool = Field(
        False,
        description=(
            "stop the engines with the gateway; else they keep running for the next gateway"
        ),
    )
    drain_s: float = Field(
        300,
        ge=0,
        description=(
            "longest time for an engine to finish its requests when it is replaced, unloaded or"
            " stopped; new requests go to other engines, or wait"
        ),
    )
    backoff_s: float = Field(
        10,
        gt=0,
        description="first wait before the same plan is retried; doubles up to backoff_max_s",
    )
    backoff_max_s: float = Field(300, gt=0, description="longest wait between two starts")
    keep_alive: Duration = Field(
        ENDLESS_DURATION,
        description=(
            "how long a model without its own value stays loaded without a request: 5m, 1h30m, 300"
            " (seconds), 0, -1: for ever"
        ),
    )
    tick_s: float = Field(0.5, gt=0, description="longest time between two control loops")
    health_interval_s: float = Field(
        5, gt=0, description="time between two health checks of a running engine"
    )
    silent_after_s: float = Field(
        8,
        gt=0,
        description=(
            "an engine that is silent and idle for this time gets no requests until it answers"
        ),
    )
    hang_after_s: float = Field(
        60,
        gt=0,
        description=(
            "an engine that answers no health check, or is paused, for this time counts as hung and"
            " is replaced"
        ),
    )
    body_limit_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="largest request body; all bodies together use about twice this in memory",
    )
    max_connections: int = Field(
        2048, ge=1, description="most concurrent connections of clients; more get 503"
    )
    max_connections_per_address: int = Field(
        1536,
        ge=1,
        description=(
            "most connections from one address, or from one IPv6 network (/64); a load balancer is"
            " one address"
        ),
    )
    end_revoked: bool = Field(
        False,
        description=(
            "end running inference requests of a key that is revoked, or that loses their model;"
            " else they are finished"
        ),
    )
    keep_alive_s: float = Field(
        75, gt=0, description="longest time a connection stays open without a request"
    )
    engine_idle_connections: int = Field(
        256,
        ge=0,
        description=(
            "most idle connections that are kept to each engine, for 20 s; each takes a descriptor"
            " of the gateway and of the engine"
        ),
    )
    engine_silence_s: float = Field(
        3600, gt=0, description="longest silence of an engine in a request; a prefill is silent"
    )
    queue_per_model: int | None = Field(
        None,
        ge=0,
        description=(
            "requests that may wait for a model; 0: none; default: twice the requests that its"
            " engines run concurrently, at least 128"
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
        description=("interval at which a stream that waits for a model gets a comment; 0: never"),
    )
    copies_wait_s: float = Field(
        10,
        gt=0,
        description=(
            "how long the oldest request waits for busy copies before another one is started, of"
            " models with `copies`"
        ),
    )
    copies_idle_s: float = Field(
        300,
        gt=0,
        description=(
            "how long one copy less would carry the load before it is taken back; also the rest"
            " after a copy that failed or found no room"
        ),
    )
    copies_pause_s: float = Field(
        60, ge=0, description="least time between two changes of a model's number of copies"
    )
    batch_file_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description=(
            "largest file for batches; 100,000 lines of a chat have some hundred mebibytes"
        ),
    )
    batch_key_bytes: int = Field(
        8 * 1024**3,
        ge=1024,
        description=(
            "most bytes of files and results of one key, so that no caller takes the place of all"
        ),
    )
    batch_total_bytes: int = Field(
        32 * 1024**3,
        ge=1024,
        description=(
            "most bytes of files and results of all keys, so that the disk keeps room for the rest"
        ),
    )
    batch_lines: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="most lines of a batch; a line takes a byte of memory, and 100 while checked",
    )
    batch_requests: int = Field(
        256,
        ge=1,
        le=1024,
        description="most concurrent lines of all batches; each has its answer in memory",
    )
    batch_days: int = Field(
        30, ge=1, le=3650, description="days that files and ended batches are kept"
    )
    auto_tune: bool = Field(
        False,
        description=(
            "search for a faster plan while a model is idle, as `fitserve tune` does, and take the"
            " best"
        ),
    )
    auto_tune_quiet_s: float = Field(
        600,
        gt=0,
        description="a model without a request for this time is idle for auto_tune",
    )
    failpoint: str = Field(
        "",
        description="place where a test of recovery kills the gateway, as `Launch.before`",
    )
    webhook: Secret | None = Field(
        None,
        description=(
            "URLs that get events (docs/events.md), separated by commas; redirects are not followed"
        ),
    )
    webhook_secret: Secret | None = Field(
        None,
        description=(
            "signs webhooks: `whsec_` and the base64 of 24 to 64 bytes, as in standardwebhooks.com"
        ),
    )
    webhook_events: str = Field(
        "gateway.*,model.added,model.changed,model.change_refused,model.removed,plan.fallback,"
        "plan.none,engine.ready,engine.failed,engine.quarantined,engine.frozen,gpu.*,key.*,"
        "budget.*",
        description="kinds of events that webhooks get, separated by commas; `*` is any text",
    )
    otlp_endpoint: str = Field(
        "",
        description=(
            "address of a collector of OpenTelemetry, such as http://127.0.0.1:4318; needs"
            " the extra `otel`; docs/tracing.md"
        ),
    )
    otlp_protocol: Literal["http", "grpc"] = Field(
        "http", description="protocol of otlp_endpoint; collectors mostly take gRPC at port 4317"
    )
    otlp_headers: Secret | None = Field(
        None, description="headers for the collector: NAME=VALUE separated by commas"
    )
    otlp_signals: str = Field(
        "traces",
        description="signals for the collector, separated by commas: `traces`, `metrics`",
    )
    trace_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "part of requests that is traced, where the client sends no `traceparent`, whose flag"
            " decides otherwise"
        ),
    )
    engine_otlp_endpoint: str = Field(
        "",
        description=(
            "address of a collector as engines reach it (OTLP over gRPC), such as"
            " http://collector:4317; their own traces go there, where their version has any"
        ),
    )
    transcript_key_file: Path | None = Field(
        None,
        description=(
            "file of the keys that encrypt transcripts, one a line, the first for new ones; needs"
            " the extra `transcripts`; default: none are kept; docs/transcripts.md"
        ),
    )
    transcript_models: str = Field(
        "",
        description=(
            "models whose requests and answers are kept for all keys, separated by commas; `*`:"
            " every model"
        ),
    )
    transcript_days: float = Field(
        7, ge=0.01, le=3650, description="days after which a transcript is deleted"
    )
    transcript_bytes: int = Field(
        1024**3,
        ge=64 * 1024**2,
        description="disk space of all transcripts; the oldest are deleted",
    )
    transcript_redact: str = Field(
        r"\b(?:sk|fs|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{16,}",
        description=(
            "regular expressions, one a line, whose matches are removed before a transcript is"
            " written; default: API keys of usual forms"
        ),
    )
    access_log: bool = Field(
        False,
        description=(
            "one line of JSON per request on standard error, also of the admin API; never with"
            " prompts or keys"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is logged"
    )

    @field_validator("origins")
    @classmethod
    def _check_origins(cls, text: str) -> str:
        for origin in _split_at_commas(text):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{shown_address(origin)[:100]!r} is not an origin; give SCHEME://HOST or"
                    " SCHEME://HOST:PORT without a path or a user"
                )
        return text

    @field_validator("roles", mode="before")
    @classmethod
    def _parse_roles(cls, roles: Any) -> Any:
        """The members of each scope."""
        if not isinstance(roles, str):
            return roles
        pairs = [word.partition("=") for word in shlex.split(roles)]
        if any(not separator for _, separator, _ in pairs):
            raise ValueError("give SCOPE=NAME,NAME, separated by spaces")
        members: dict[str, tuple[str, ...]] = {}
        for scope, _, names in pairs:
            members[scope] = (*members.get(scope, ()), *_split_at_commas(names))
        return members

    @field_validator("person_budget", mode="before")
    @classmethod
    def _parse_budget(cls, budget: Any) -> Any:
        if isinstance(budget, str):
            pairs = [word.partition("=") for word in budget.split()]
            if any(not separator for _, separator, _ in pairs):
                raise ValueError("give LIMIT=NUMBER, separated by spaces")
            return {name: value for name, _, value in pairs}
        if isinstance(budget, dict):
            return {name: str(value) for name, value in budget.items()}
        return budget

    @field_validator("proxy_user_header", "proxy_groups_header", "proxy_client_header")
    @classmethod
    def _check_header(cls, name: str) -> str:
        if name and (not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS):
            raise ValueError(f"{name[:100]!r} cannot be the header of an identity")
        return name

    @field_validator("oidc_issuer", "oidc_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        """Raise ValueError without the URL, which may hold a password."""
        if url and (not url.startswith(("https://", "http://")) or "@" in url):
            raise ValueError(
                "it is not an address such as https://login.example.org without a user"
            )
        return url

    @field_validator("otlp_endpoint", "engine_otlp_endpoint")
    @classmethod
    def _check_collector(cls, url: str) -> str:
        """Raise ValueError without the URL, which may hold a password."""
        if url and not COLLECTOR_URL.fullmatch(url):
            raise ValueError(
                "it is not an address such as http://127.0.0.1:4318 without a user or a query"
            )
        return url

    @field_validator("otlp_signals")
    @classmethod
    def _check_signals(cls, text: str) -> str:
        signals = _split_at_commas(text)
        if not signals or not {*signals} <= {"traces", "metrics"}:
            raise ValueError(f"{text[:100]!r} is not `traces`, `metrics` or both")
        return text

    @field_validator("otlp_headers")
    @classmethod
    def _check_collector_headers(cls, headers: Secret | None) -> Secret | None:
        """Raise ValueError without the headers, which are secrets."""
        for text in _split_at_commas(headers.reveal()) if headers is not None else ():
            name, separator, value = text.partition("=")
            if not (separator and _HEADER.fullmatch(name.strip()) and value.isprintable()):
                raise ValueError("give NAME=VALUE, separated by commas")
            if not value.isascii():
                raise ValueError("a value has characters that no header can hold")
        return headers

    @field_validator("transcript_redact")
    @classmethod
    def _check_patterns(cls, text: str) -> str:
        for line in text.splitlines():
            try:
                re.compile(line)
            except re.error as error:
                raise ValueError(f"{line[:100]!r} is not a regular expression: {error}") from None
        return text

    @field_validator("proxy_addresses")
    @classmethod
    def _check_networks(cls, text: str) -> str:
        for part in _split_at_commas(text):
            if ipaddress.ip_network(part, strict=False).prefixlen == 0:
                raise ValueError(f"{part} is every address, so each client could name any user")
        return text

    @field_validator("media_hosts")
    @classmethod
    def _check_media_hosts(cls, text: str) -> str:
        for host in _split_at_commas(text):
            if not _MEDIA_HOST.fullmatch(host):
                raise ValueError(
                    f"{shown_address(host)[:100]!r} is not a host; give a name or an address"
                    " without scheme and port"
                )
        return text

    @field_validator("engine_env", mode="before")
    @classmethod
    def _parse_env(cls, env: Any) -> Any:
        """The variables by name. Raises ValueError without the values, which may be secrets."""
        if isinstance(env, str):
            pairs = [word.partition("=") for word in shlex.split(env)]
            if any(not separator for _, separator, _ in pairs):
                raise ValueError("give NAME=VALUE, separated by spaces")
            env = {name: value for name, _, value in pairs}
        if isinstance(env, dict):
            env = {
                str(name): value if isinstance(value, str) else str(value)
                for name, value in env.items()
            }
            for name, value in env.items():
                try:
                    variables.check(None, name, value)
                except BadFlag as error:
                    raise ValueError(str(error).rstrip(".")) from None
        return env

    @field_validator(
        "tls_cert",
        "tls_key",
        "data_dir",
        "models_dir",
        "models_file",
        "prices",
        "profiles_dir",
        "knowledge_keys",
        "agent_socket",
        "transcript_key_file",
    )
    @classmethod
    def _check_path(cls, path: Path | None) -> Path | None:
        try:
            if path is not None and "\0" in str(path.expanduser()):
                raise ValueError("a path cannot contain NUL")
        except RuntimeError:
            raise ValueError(f"{path} names the home of a user that does not exist") from None
        return path

    @property
    def data(self) -> Path:
        return self.data_dir.expanduser().absolute()

    @field_validator("webhook")
    @classmethod
    def _check_webhooks(cls, urls: Secret | None) -> Secret | None:
        texts = _split_at_commas(urls.reveal()) if urls is not None else ()
        for number, url in enumerate(texts, 1):
            url_parts = urlsplit(url)
            if (
                url_parts.scheme not in ("http", "https")
                or not url_parts.hostname
                or not url.isascii()
                or not url.isprintable()
            ):
                # The message does not repeat the URL, which may hold a secret.
                raise ValueError(
                    f"URL {number} must begin with http:// or https:// and name a host"
                )
            if "@" in url_parts.netloc or url_parts.fragment:
                raise ValueError(f"URL {number} must not have a user, a password or a fragment")
        return urls

    @field_validator("webhook_secret")
    @classmethod
    def _check_webhook_secret(cls, secret: Secret | None) -> Secret | None:
        try:
            is_key = secret is None or 24 <= len(signing_key(secret)) <= 64
        except ValueError:
            is_key = False
        if not is_key:
            raise ValueError(
                "it is not `whsec_` and the base64 of 24 to 64 bytes; make one with `python3 -c"
                ' \'import base64, secrets; print("whsec_" +'
                " base64.b64encode(secrets.token_bytes(32)).decode())'`"
            )
        return secret

    @field_validator("webhook_events")
    @classmethod
    def _check_event_kinds(cls, patterns: str) -> str:
        for pattern in _split_at_commas(patterns):
            if not any(fnmatchcase(kind, pattern) for kind in EVENT_KINDS):
                raise ValueError(
                    f"{pattern[:100]!r} is not a kind of event; docs/events.md lists them"
                )
        return patterns

    @property
    def webhook_urls(self) -> tuple[Secret, ...]:
        texts = _split_at_commas(self.webhook.reveal()) if self.webhook is not None else ()
        return tuple(Secret(url) for url in texts)

    @property
    def webhook_kinds(self) -> tuple[str, ...]:
        return _split_at_commas(self.webhook_events)

    @property
    def collector_headers(self) -> dict[str, str]:
        """The headers for the collector by lower-case name, which gRPC demands."""
        texts = _split_at_commas(self.otlp_headers.reveal()) if self.otlp_headers else ()
        pairs = [text.partition("=") for text in texts]
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def transcribed_models(self) -> frozenset[str]:
        """The models whose requests are copied for all keys."""
        return frozenset(_split_at_commas(self.transcript_models))

    def exports(self, signal: Literal["traces", "metrics"]) -> bool:
        """Whether a collector gets this signal."""
        return bool(self.otlp_endpoint) and signal in _split_at_commas(self.otlp_signals)

    @property
    def request_trace_ratio(self) -> float | None:
        """The part of requests that is traced; None: traces are off."""
        return self.trace_ratio if self.exports("traces") else None

    @property
    def web_origins(self) -> tuple[str, ...]:
        return tuple(sorted({origin.lower() for origin in _split_at_commas(self.origins)}))

    @property
    def proxy_networks(self) -> tuple[str, ...]:
        return _split_at_commas(self.proxy_addresses)

    @property
    def hosts_of_media(self) -> tuple[str, ...]:
        return tuple(host for host in _split_at_commas(self.media_hosts) if host != "none")

    @property
    def engine_media_hosts(self) -> tuple[str, ...]:
        """The exact hosts that engines may fetch media from; (): no list of names can say it."""
        hosts = self.hosts_of_media
        if any(host == "public" or "*" in host for host in hosts):
            return ()
        # No host has this name (RFC 6761), and engines take an empty list for any host.
        named_hosts = tuple(f"[{host}]" if ":" in host else host for host in hosts) or (
            "none.invalid",
        )
        return tuple(host.lower() for host in named_hosts)

    @property
    def models(self) -> Path:
        return (self.models_dir or _hub_cache()).expanduser().absolute()

    @property
    def browsable_folders(self) -> tuple[Path, ...]:
        """Those of model_folders; without the home of a user that has none."""
        if self.model_folders == "none":
            return ()
        folders = []
        for text in _split_at_commas(self.model_folders):
            with suppress(RuntimeError):
                folders.append(Path(os.path.normpath(Path(text).expanduser().absolute())))
        return tuple(folders)

    @property
    def agent(self) -> Path:
        return (self.agent_socket or self.data / "agent.sock").expanduser().absolute()

    @property
    def runs_processes(self) -> bool:
        """Whether engines are processes for certain; False for `auto`."""
        return self.host_kind in ("process", "cluster")

    @property
    def shared_models(self) -> str | None:
        """The volume that engines in containers mount at `models`; None: each model's folder."""
        return (
            self.models_source
            or self.models_volume
            or (str(self.models) if self.host_kind in ("agent", "cluster") else None)
        )

    @property
    def own_url(self) -> str:
        """The URL of the gateway for programs of this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "localhost") else self.host
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _split_at_commas(text: str) -> tuple[str, ...]:
    """The parts of a text with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def signing_key(secret: Secret) -> bytes:
    """The key of a webhook secret. Raises ValueError where it is not base64."""
    return base64.b64decode(secret.reveal().removeprefix("whsec_"), validate=True)


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read and check the settings. Raises SettingsError.

    environment: the variables of the settings; None for those of this process.
    """
    environment = os.environ if environment is None else environment
    names = {f"FITSERVE_{name.upper()}" for name in Settings.model_fields} | _NO_SETTINGS
    unknown_names = sorted(
        name for name in environment if name.startswith("FITSERVE_") and name not in names
    )
    for name in (name for name in unknown_names if not f"{name}_".startswith(f"{_ENDPOINT_KEY}_")):
        suggestion = near_name(name, names)
        raise SettingsError(
            f"There is no setting {name}.",
            hint=(f"Did you mean {suggestion}? " if suggestion else "")
            + "`fitserve serve --help` lists the settings.",
        )
    try:
        settings = Settings(**_read_file(environment) | _read_environment(environment))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "FITSERVE_" + "_".join(str(part) for part in first["loc"]).upper()
        message = hide_typed_password(
            unknown_field_words(str(first["loc"][0]), Settings.model_fields)
            if first["type"] == "extra_forbidden"
            else plain_problem(first["msg"])
        )
        raise SettingsError(
            f"{name} is wrong: {message}.",
            hint="Change the variable, then start again. docs/settings.md lists the values.",
        ) from None
    if not settings.is_loopback and settings.admin_key is None:
        raise SettingsError(
            f"The gateway does not listen on {shown_address(settings.host)} without a key: anybody"
            " with access to that address could start programs here.",
            hint="Set FITSERVE_ADMIN_KEY, or listen on 127.0.0.1.",
        )
    for name in ("admin_key", "api_key"):
        key = getattr(settings, name)
        if key is not None and len(key.reveal()) < 8:
            raise SettingsError(
                f"FITSERVE_{name.upper()} has fewer than 8 characters.",
                hint="Use a long random key.",
            )
    return settings


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of the environment by field. An empty variable is not a setting."""
    values = {name: environment.get(f"FITSERVE_{name.upper()}") for name in Settings.model_fields}
    return {name: value for name, value in values.items() if value}


def _read_file(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the file that FITSERVE_CONFIG names. Raises SettingsError."""
    path = environment.get("FITSERVE_CONFIG")
    if not path:
        return {}
    import yaml  # late, because most gateways have no such file

    if not Path(path).is_file():
        raise SettingsError(
            f"FITSERVE_CONFIG names {path}, which is not a file.",
            hint="Set the variable to a settings file, or unset it.",
        )
    try:
        document = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(
            f"The file named by FITSERVE_CONFIG cannot be read: {error.strerror}.",
            hint=f"Let this user read {path}.",
        ) from None
    # ValueError: an impossible date. RecursionError: endless brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"The file named by FITSERVE_CONFIG is not YAML{_yaml_position(error)}.",
            hint="Write lines such as `port: 8080`, then start again.",
        ) from None
    if document is not None and not (
        isinstance(document, dict) and all(isinstance(name, str) for name in document)
    ):
        raise SettingsError(
            "The file named by FITSERVE_CONFIG holds no settings.",
            hint="Write lines such as `port: 8080`.",
        )
    return document or {}


def _yaml_position(error: Exception) -> str:
    """The problem with line and column. PyYAML repeats the line, which may hold a secret."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position_words = (
        f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    )
    problem = getattr(error, "problem", None) if mark is not None else None
    return f"{position_words}: {problem}" if problem else position_words


def list_variables() -> list[tuple[str, str]]:
    """Every variable with its description and default."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", {}) else f" [{field.default}]"
        rows.append((f"FITSERVE_{name.upper()}", f"{field.description}{default}"))
    return rows


def _hub_cache() -> Path:
    """The cache that all programs of this user share.

    Source: huggingface_hub/constants.py, whose import is too slow for a command.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(
        os.path.expandvars(
            os.environ.get("HF_HUB_CACHE")
            or os.environ.get("HUGGINGFACE_HUB_CACHE")
            or f"{home}/hub"
        )
    )
