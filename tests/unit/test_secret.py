"""A secret is shown by no format, and revealed at known places alone."""

from __future__ import annotations

import ast
import base64
import copy
import json
import logging
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.cli.client import call, gateway_url
from gateway.cli.doctor import readings
from gateway.cli.doctor.checks import hub
from gateway.domain.value import Value, first_problem
from gateway.errors import (
    FitserveError,
    SettingsError,
    hide_password,
    hide_typed_password,
)
from gateway.logging import LineFormatter, _Json
from gateway.models.catalog.hub import Hub
from gateway.secret import (
    MASK,
    REVEAL_CONTEXT,
    Secret,
    bearer_line,
    secret_text,
)
from gateway.settings import Settings, load_settings
from gateway.wishes.model_request import ModelRequest
from tests.support.paths import ROOT
from tests.support.syntax import nodes_of, package_files

# Calls by module, each with the reason that it needs the text.
REVEALS = {
    "gateway/cli/client.py": 1,  # the header of a command's requests
    "gateway/cli/doctor/readings.py": 2,  # address and header of a question to the Hub
    "gateway/controller/events/webhook.py": 3,  # scheme and host, the name of a cursor, the request
    "gateway/server/identity/login_routes.py": 2,  # a cookie, and the key of a page
    "gateway/server/identity/login_tokens.py": 1,  # its digest
    "gateway/server/transcripts/transcript_cipher.py": 1,  # a key of the library that encrypts
    "gateway/server/transcripts/transcripts.py": 1,  # the pipe of a child
    "gateway/server/identity/oidc_provider.py": 7,  # the questions to the provider
    "gateway/secret.py": 5,  # equality, and the encoders below
    "gateway/hosts/docker/container.py": 2,  # variable and label of a container
    "gateway/hosts/process/host.py": 2,  # variable or file of an engine
    "gateway/keys.py": 1,  # digests
    "gateway/models/catalog/hub.py": 2,  # address and token, as the library's arguments
    "gateway/proxy/access/auth.py": 1,  # the length of a key of the settings
    "gateway/server/admin/key_routes.py": 1,  # the only answer with a key
    # checks of webhooks, headers and keys, the headers of a collector, the bytes for signatures
    "gateway/settings.py": 6,
    "gateway/proxy/tls.py": 1,  # the file that OpenSSL reads
}
# Encoders that write the text, for the gateway's own processes and files.
ENCODERS = {
    "gateway/hosts/agent/agent_server.py": 1,  # to the gateway, over a socket of mode 0600
    "gateway/hosts/process/instance_records.py": 1,  # a file of mode 0600
    "gateway/measuring/tuning/engine_load.py": 1,  # the pipe of a child
    "gateway/models/catalog/download.py": 1,  # the pipe of a child
    "gateway/planner/service/messages.py": 1,  # the pipe of a child
    "gateway/proxy/workers/channel.py": 1,  # the socket pair of a worker
    "gateway/controller/watch/engine_client.py": 1,  # the head of a request
    "gateway/measuring/bench/streamed_answer.py": 1,  # the head of a request
    "gateway/proxy/routing/model_route.py": 1,  # the head of a request
    "gateway/server/batches/line_client.py": 1,  # the head of a request to this gateway
}


class Holder(Value):
    key: Secret
    more: tuple[Secret, ...] = ()


# Beyond ASCII, line breaks, one character, letters of regular expressions and of formats.
TEXTS = st.text(min_size=12, max_size=200)


def _record(**fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.INFO, "", 0, "event", (), None)
    record.fields, record.created = fields, 0.0
    return record


def _failure(secret: Secret) -> str:
    error = ValueError(secret)
    return "".join(traceback.format_exception(error)) + repr(error)


WAYS: dict[str, Callable[[Secret], str]] = {
    "str": str,
    "repr": repr,
    "format": lambda secret: f"{secret} {secret!r} {secret:>300}",
    "percent": lambda secret: "%s %r" % (secret, secret),  # noqa: UP031
    "inside": lambda secret: f"{[secret]} { {'key': secret} }",
    "value": lambda secret: f"{Holder(key=secret, more=(secret,))!r}",
    "json": lambda secret: Holder(key=secret).model_dump_json(),
    "dump": lambda secret: str(Holder(key=secret).model_dump()),
    "log": lambda secret: _Json().format(_record(key=secret)),
    "terminal": lambda secret: LineFormatter().format(_record(key=secret)),
    "traceback": _failure,
}


@given(TEXTS)
@example("a\nb(.*)[^x]+ $HOME %s {0} \\ \"'\x00")
def test_no_way_of_writing_shows_a_secret(text: str) -> None:
    for name, write in WAYS.items():
        text_of_secret = write(Secret(text))
        assert MASK in text_of_secret, name
        assert text not in text_of_secret, name
        assert json.dumps(text)[1:-1] not in text_of_secret, name


@pytest.mark.parametrize("text", ["", "a", ".", "\n", "a" * 10_000])
def test_the_length_of_a_secret_is_not_shown(text: str) -> None:
    assert {write(Secret(text)) for write in WAYS.values()} == {
        write(Secret("other")) for write in WAYS.values()
    }


@pytest.mark.parametrize(
    "encode",
    [
        json.dumps,
        pickle.dumps,
        msgspec.json.encode,
        msgspec.msgpack.encode,
        lambda secret: "".join(["a", secret]),
        lambda secret: secret + "a",
        bytes,
    ],
)
def test_no_encoder_takes_a_secret(encode: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError) as error:
        encode(Secret("hunter2-hunter2"))
    assert "hunter2" not in str(error.value)


@given(st.one_of(st.integers(10**12), st.lists(TEXTS, min_size=1)))
def test_an_error_of_validation_does_not_repeat_the_value(given_value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        Holder(key=given_value)
    assert str(given_value).strip("[]'\"")[:12] not in str(error.value)


@given(st.binary(max_size=64))
def test_bytes_are_revealed_as_they_were(content: bytes) -> None:
    secret = Secret(content)
    assert secret.reveal_bytes() == content
    assert secret == Secret(secret.reveal()) == copy.deepcopy(secret)
    assert hash(secret) == hash(Secret(content))
    assert secret != Secret(content + b"x")
    assert secret != content
    assert bearer_line(secret) == b"authorization: Bearer " + content + b"\r\n"


def test_processes_and_files_of_the_gateway_get_the_text() -> None:
    holder = Holder(key=Secret("of the gateway"))
    assert Holder.model_validate_json(holder.model_dump_json(context=REVEAL_CONTEXT)) == holder
    assert json.dumps([holder.key], default=secret_text) == '["of the gateway"]'
    assert bearer_line(None) == b""
    with pytest.raises(TypeError):
        json.dumps([object()], default=secret_text)


def _encode(lead: str, text: str) -> str:
    return base64.b64encode(f"{lead}{text}".encode()).decode()


FORMS: dict[str, Callable[[str], str]] = {
    "whole": str,
    "cut": lambda text: text[:80],
    "end": lambda text: text[-20:],
    "repr": repr,
    "json": json.dumps,
    "json in UTF-8": lambda text: json.dumps(text, ensure_ascii=False),
    "lower": str.lower,
    "url": lambda text: quote(text, safe=""),
    "path": quote,
    "hex": lambda text: text.encode().hex(),
    "base64": lambda text: _encode("", text),
    "base64 behind u": lambda text: _encode("u:", text),
    "base64 behind user": lambda text: _encode("user:", text),
    "base64 in a URL": lambda text: base64.urlsafe_b64encode(f"me:{text}".encode()).decode(),
}


@given(st.text(min_size=30, max_size=120), st.sampled_from(sorted(FORMS)))
def test_no_part_of_a_secret_is_left_in_a_text(text: str, form: str) -> None:
    secret_form = FORMS[form](text)
    text_without_secret = Secret(text).hidden_in(f"begin <{secret_form}> end", "LABEL")
    # Quotes and the bytes in front of a secret may stay.
    body = secret_form.strip("'\"")[8:-8] if "base64" in form else secret_form.strip("'\"")
    parts = [body[start : start + 8] for start in range(len(body) - 7)]
    assert not [part for part in parts if part in text_without_secret]
    assert "LABEL" in text_without_secret


@pytest.mark.parametrize("text", ["a", "7", ".", "xy", "a.b", "\n", "(", "$1", "é"])
@pytest.mark.parametrize("form", [str, repr, lambda text: f"/{text}/", lambda text: f"={text}"])
def test_words_with_a_short_secret_are_withheld(text: str, form: Callable[[str], str]) -> None:
    message = f"the value {form(text)} is not allowed"
    text_without_secret = Secret(text).hidden_in(message, "LABEL")
    assert text_without_secret == "words with LABEL, which are not shown"
    assert Secret(text).hidden_in("nothing stands here", "LABEL") == "nothing stands here"


def test_every_reveal_has_its_reason() -> None:
    reveals: Counter[str] = Counter()
    encoders: Counter[str] = Counter()
    for path in package_files():
        name = str(path.relative_to(ROOT))
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in ("reveal", "reveal_bytes"):
                reveals[name] += 1
            elif (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and node.id in ("REVEAL_CONTEXT", "secret_text", "bearer_line")
                and name != "gateway/secret.py"
            ):
                encoders[name] += 1
    assert reveals == REVEALS
    assert encoders == ENCODERS


# --- addresses with a password ---

PASSWORD = "hunter2-of-this-test"
ADDRESSES = (f"http://me:{PASSWORD}@host.example:80/v1", f"me:{PASSWORD}@host.example")
# Settings that keep such a text as it is, with the reason.
_NO_ADDRESSES = {
    "host": "the gateway listens there, so it names no user",
    "docker_network": "a name of Docker",
    "models_source": "a volume or a folder",
    "models_volume": "a name of Docker",
    "model_folders": "paths",
    "allowed_images": "patterns of names of images, which have no user",
    "gpus": "indices and UUIDs",
    "failpoint": "a name of the code",
    "oidc_client_id": "a public name of the gateway",
    "oidc_audience": "a public name of the gateway",
    "oidc_user_claim": "a name of a claim",
    "oidc_groups_claim": "a name of a claim",
    "oidc_scopes": "names of scopes",
    **dict.fromkeys(
        (
            "tls_cert",
            "tls_key",
            "data_dir",
            "models_dir",
            "models_file",
            "prices",
            "profiles_dir",
            "knowledge_keys",
            "transcript_key_file",
        ),
        "a path",
    ),
    "agent_socket": "a path",
    "transcript_models": "names of models",
    "transcript_redact": "regular expressions",
}
# Fields of a model that do so. None is an address: each is refused later, by words without it.
_NO_ADDRESS_FIELDS = {
    "source": "a folder or a repository",
    "drafter": "a folder or a repository",
    "loras": "folders or repositories",
    "engines": "engines with versions",
    "gpus": "indices and UUIDs",
    "args": "flags, of which the table opens none for an address",
    "env": "variables, of which no value may have a user",
}


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
@pytest.mark.parametrize("address", ADDRESSES)
def test_no_setting_shows_the_password_of_an_address(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [key for key in os.environ if key.startswith("FITSERVE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(f"FITSERVE_{name.upper()}", address)
    try:
        settings = load_settings()
    except SettingsError as error:
        output, is_plain = str(error), False
    else:
        output = f"{settings!r} {settings.model_dump_json()} {getattr(settings, name)}"
        is_plain = name in _NO_ADDRESSES
    assert (PASSWORD in output) == is_plain


@pytest.mark.parametrize("name", sorted(ModelRequest.model_fields))
@pytest.mark.parametrize("address", ADDRESSES)
def test_no_field_of_a_model_shows_the_password_of_an_address(name: str, address: str) -> None:
    for value in (address, [address], {"a": address}, {address: "a"}):
        for fields in ({"name": "m", "source": "/models/x"}, {"name": "m"}):
            try:
                wish = ModelRequest.model_validate({**fields, name: value}).wish()
            except ValidationError as error:
                output, may_show = first_problem(error), False
            except FitserveError as error:
                output, may_show = str(error), False
            else:
                output, may_show = wish.model_dump_json(), name in _NO_ADDRESS_FIELDS
            assert PASSWORD not in output or may_show


@pytest.mark.parametrize(
    "text",
    [
        f"the proxy http://me:{PASSWORD}@host.example:80/v1 does not answer",
        f"socks5h://{PASSWORD}@host.example failed",
        f"'https://me:{PASSWORD}@with-an-at@host.example/?a=b@c'",
    ],
)
def test_errors_and_logs_show_no_password_of_an_address(text: str) -> None:
    error = FitserveError(text, hint=text)
    record = _record(reason=text)
    record.exc_info = (ValueError, ValueError(text), None)
    lines = [str(error), error.envelope()["error"]["message"], repr(error)]
    for line in (*lines, LineFormatter().format(record), _Json().format(record)):
        assert PASSWORD not in line
        assert "host.example" in line


@pytest.mark.parametrize(
    "text",
    [
        "engine m@http://127.0.0.1:9200 answers",
        "http://127.0.0.1:9200/v1/models?a=b@c is refused",
        "ghcr.io/org/image:tag@sha256:0123 is pulled",
        "mail me@host.example",
    ],
)
def test_texts_without_a_password_stay(text: str) -> None:
    assert hide_password(text) == text
    assert hide_typed_password(text) == text


@pytest.mark.parametrize("address", [*ADDRESSES, f"http://me:{PASSWORD}@host.example:x/"])
def test_a_command_shows_no_password_of_the_address_of_its_gateway(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_URL", address)
    with pytest.raises(FitserveError) as error:
        call("GET", "/healthz", timeout_s=0.001)
    assert PASSWORD not in str(error.value)
    with pytest.raises(FitserveError) as error:
        gateway_url(f"{address}/more", None)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize("address", ["http://me:{}@127.0.0.1:9", "http://me:{}@127.0.0.1:x"])
def test_neither_doctor_nor_errors_of_the_hub_show_the_password_of_its_address(
    address: str, tmp_path: Path
) -> None:
    endpoint = Secret(address.format(PASSWORD))
    checks = hub(readings.hub(endpoint, None))
    assert PASSWORD not in f"{checks}"
    assert "127.0.0.1" in f"{checks}"
    with pytest.raises(FitserveError) as error:
        Hub(endpoint, None, tmp_path).resolve("org/name", None)
    assert PASSWORD not in str(error.value)
