"""Bearer keys, and keeping web pages away from a gateway without keys."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from dataclasses import replace
from typing import Any, get_args

import pytest

from gateway.domain.grant import Grant
from gateway.errors import BadRequest, FitserveError, Forbidden, Unauthorized
from gateway.keys import Scope
from gateway.proxy.access.auth import (
    ANONYMOUS_KEY,
    Key,
    Keys,
    KeyTable,
    build_key,
    check_local,
)
from gateway.proxy.access.origins import Origins
from gateway.secret import Secret

ADMIN, API = "admin-secret-1", "api-secret-22"


def verdict(keys: Keys, authorization: bytes | None, need: Scope) -> int:
    try:
        keys.check(authorization, need)
    except FitserveError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("admin", "api", "sent", "inference", "administration"),
    [
        (None, None, None, 200, 200),
        (None, None, "anything", 200, 200),
        (ADMIN, None, None, 401, 401),
        (ADMIN, None, ADMIN, 200, 200),
        (ADMIN, None, "wrong", 401, 401),
        (None, API, None, 401, 403),
        (None, API, API, 200, 403),
        (None, API, "wrong", 401, 403),
        (ADMIN, API, None, 401, 401),
        (ADMIN, API, ADMIN, 200, 200),
        (ADMIN, API, API, 200, 403),
        (ADMIN, API, "wrong", 401, 401),
        (ADMIN, API, ADMIN + API, 401, 401),
    ],
)
def test_each_key_opens_its_own_scope(
    admin: str | None, api: str | None, sent: str | None, inference: int, administration: int
) -> None:
    keys = Keys(Secret(admin) if admin else None, Secret(api) if api else None)
    header = None if sent is None else f"Bearer {sent}".encode()
    assert (verdict(keys, header, "inference"), verdict(keys, header, "admin")) == (
        inference,
        administration,
    )


def test_the_admin_api_without_an_admin_key_says_that_none_is_configured() -> None:
    with pytest.raises(Forbidden, match=r"no admin key is configured.*FITSERVE_ADMIN_KEY"):
        Keys(None, Secret(API)).check(f"Bearer {API}".encode(), "admin")


def test_an_api_key_on_the_admin_api_is_told_apart_from_a_wrong_key() -> None:
    with pytest.raises(Forbidden, match="only the scope inference"):
        Keys(Secret(ADMIN), Secret(API)).check(f"Bearer {API}".encode(), "admin")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_scheme_is_case_insensitive(scheme: str) -> None:
    assert verdict(Keys(Secret(ADMIN), None), f"{scheme} {ADMIN}".encode(), "admin") == 200


def test_keys_beyond_ascii_work_and_undecodable_ones_too() -> None:
    assert (
        verdict(Keys(Secret("schlüssel-🔑"), None), "Bearer schlüssel-🔑".encode(), "admin") == 200
    )
    assert verdict(Keys(Secret("caf\udce9-secret"), None), b"Bearer caf\xe9-secret", "admin") == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer  ",
        b"Basic " + ADMIN.encode(),
        ADMIN.encode(),
        b"Bearer " + ADMIN.encode() + b"x",
        b"Bearer " + ADMIN.encode()[:-1],
        b"Bearer " + ADMIN.encode() + b"\0",
        b"Bearer \0" + ADMIN.encode(),
        b"Bearer\0" + ADMIN.encode(),
        b"Bearer " + ADMIN.upper().encode(),
        b"Bearer " + ADMIN.encode() + b", Bearer " + ADMIN.encode(),
        "Bearer \u0430dmin-secret-1".encode(),
        b"Bearer \xff\xfe\xed\xa0\x80",
        b"Bearer " + b"a" * 1_000_000,
        b"a" * 1_000_000,
    ],
    ids=lambda value: repr(value[:32]),
)
@pytest.mark.parametrize("need", get_args(Scope))
def test_a_hostile_value_is_a_wrong_key(value: bytes, need: Scope) -> None:
    with pytest.raises(Unauthorized) as error:
        Keys(Secret(ADMIN), Secret(API)).check(value, need)
    assert len(str(error.value)) < 300
    assert ADMIN not in str(error.value)


def test_an_empty_key_opens_nothing() -> None:
    for header in (b"Bearer", b"Bearer ", b"Bearer \t"):
        assert verdict(Keys(Secret(""), Secret("")), header, "inference") == 401


def test_the_keys_themselves_are_not_kept() -> None:
    keys = Keys(Secret(ADMIN), Secret(API))
    for secret in (ADMIN, API):
        assert secret.encode() not in pickle.dumps(dict(keys.table.keys))
        assert hashlib.sha256(secret.encode()).digest() in keys.table.keys


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"LOCALHOST:8080",
        b"127.0.0.1",
        b"127.0.0.1:8080",
        b"127.0.0.2:1",
        b"[::1]",
        b"[::1]:8080",
    ],
)
def test_a_loopback_host_is_local(host: bytes) -> None:
    check_local(host, None)
    check_local(host, b"http://" + host)
    check_local(host, b"https://" + host)


@pytest.mark.parametrize(
    "host",
    [
        None,
        b"",
        b"evil.example",
        b"evil.example:8080",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
        b"evil.example/localhost",
        b"localhost@evil.example",
        b"localhost\n",
        b"localhost:8080:8080",
        b"localhost:",
        b"xlocalhost",
        b"0.0.0.0",
        b"10.0.0.1:8080",
        b"[::2]",
        b"::1",
        b"\xff",
        b"l" * 1_000_000,
    ],
    ids=lambda value: repr(value and value[:32]),
)
def test_a_host_that_dns_could_rebind_is_refused(host: bytes | None) -> None:
    with pytest.raises(Forbidden, match="localhost"):
        check_local(host, None)


@pytest.mark.parametrize(
    "origin",
    [
        b"",
        b"null",
        b"https://evil.example",
        b"http://localhost.evil.example",
        b"http://127.0.0.1.evil.example:8080",
        b"http://evil.example#http://localhost",
        b"localhost",
        b"file://",
        b"chrome-extension://localhost",
        b"http://localhost/",
        b"http://localhost, http://evil.example",
    ],
)
def test_a_page_of_another_origin_is_refused(origin: bytes) -> None:
    with pytest.raises(Forbidden, match="origin"):
        check_local(b"127.0.0.1:8080", origin)


def test_admit_without_keys_looks_at_host_and_origin() -> None:
    keys = Keys(None, None)
    keys.admit([(b"host", b"127.0.0.1:8080"), (b"accept", b"*/*")], "admin")
    with pytest.raises(Forbidden):
        keys.admit([(b"host", b"evil.example")], "inference")
    with pytest.raises(Forbidden):
        keys.admit([(b"host", b"127.0.0.1"), (b"origin", b"https://evil.example")], "admin")


def test_only_pages_of_the_gateway_itself_may_administer_without_keys() -> None:
    """Another program of this machine may show pages of anybody."""
    keys, host = Keys(None, None), (b"host", b"127.0.0.1:8080")
    needs: tuple[Scope, ...] = ("read", "admin")
    for need in needs:
        keys.admit([host, (b"origin", b"http://127.0.0.1:8080")], need)
        for origin in (b"http://127.0.0.1:3000", b"http://localhost:8080", b"http://127.0.0.1"):
            with pytest.raises(Forbidden, match="origin"):
                keys.admit([host, (b"origin", origin)], need)
    keys.admit([host, (b"origin", b"http://127.0.0.1:3000")], "inference")


def test_admit_with_keys_looks_at_the_key_alone() -> None:
    keys = Keys(Secret(ADMIN), None)
    keys.admit(
        [
            (b"host", b"gpu.example"),
            (b"origin", b"https://app.example"),
            (b"authorization", b"Bearer admin-secret-1"),
        ],
        "admin",
    )
    with pytest.raises(Unauthorized):
        keys.admit([(b"host", b"127.0.0.1")], "inference")


@pytest.mark.parametrize("name", [b"authorization", b"host", b"origin"])
def test_a_header_that_decides_may_not_come_twice(name: bytes) -> None:
    values = {
        b"authorization": b"Bearer admin-secret-1",
        b"host": b"localhost",
        b"origin": b"http://localhost",
    }
    for keys in (Keys(Secret(ADMIN), None), Keys(None, None)):
        with pytest.raises(BadRequest, match="two"):
            keys.admit([*values.items(), (name, values[name])], "admin")


def test_a_key_is_looked_up_and_compared_by_its_digest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the time does not tell how much of a wrong key was right: the digest of a key that is
    right but for one character has nothing in common with the digest of the key.
    benchmarks/notebook/reliability.md has the measured times.
    """
    comparisons: list[tuple[bytes, bytes]] = []
    looked_up: list[bytes] = []

    class Recorded(dict[bytes, Key]):
        def get(self, digest: bytes, default: Any = None) -> Any:
            looked_up.append(digest)
            return super().get(digest, default)

    def compare(digest: bytes, other_digest: bytes) -> bool:
        comparisons.append((digest, other_digest))
        return digest == other_digest

    monkeypatch.setattr(hmac, "compare_digest", compare)
    key = "a-key-that-no-person-would-make-up"
    keys = Keys(Secret(key), Secret(API))
    keys.table = KeyTable(Recorded(keys.table.keys))
    tokens = [key[:length] + "~" * (len(key) - length) for length in range(len(key) + 1)]
    verdicts = [verdict(keys, f"Bearer {token}".encode(), "admin") for token in tokens]
    assert (set(verdicts[:-1]), verdicts[-1]) == ({401, 429}, 200)
    digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
    assert looked_up == digests
    # Once for each token, also for a wrong one, and always over the same number of bytes.
    assert comparisons == [
        *((digest, bytes(32)) for digest in digests[:-1]),
        (digests[-1], digests[-1]),
    ]


@pytest.mark.parametrize("need", ["read", "admin"])
@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"unknown", b""])
def test_a_request_that_a_foreign_page_causes_is_refused_without_origin(
    need: Any, site: bytes
) -> None:
    """Images, links, frames and scripts send no Origin. Another port here is the same site."""
    local = (b"host", b"127.0.0.1:8080")
    keyless = Keys(None, None, origins=Origins(frozenset({"https://app.example"})))
    with pytest.raises(Forbidden, match="a page of another origin causes"):
        keyless.admit([local, (b"sec-fetch-site", site)], need)
    with pytest.raises(BadRequest, match="two sec-fetch-site headers"):
        keyless.admit([local, *[(b"sec-fetch-site", b"none")] * 2], need)
    for own_headers in ([], [(b"sec-fetch-site", b"none")], [(b"sec-fetch-site", b"same-origin")]):
        assert keyless.admit([local, *own_headers], need) is ANONYMOUS_KEY
    welcome = [(b"origin", b"https://app.example"), (b"sec-fetch-site", site)]
    assert keyless.admit([local, *welcome], need) is ANONYMOUS_KEY
    # A key is not a right that a browser adds by itself.
    keys = Keys(Secret("k" * 40), None)
    bearer = (b"authorization", b"Bearer " + b"k" * 40)
    assert keys.admit([local, bearer, (b"sec-fetch-site", site)], need).name == "admin"


@pytest.mark.parametrize(
    ("classes", "count"),
    [
        ((), 1),
        (("normal",), 1),
        (("normal", "interactive"), 2),
        (("batch", "batch", 0, "normal"), 2),
    ],
)
def test_classes_of_keys_are_counted_once(classes: tuple[Any, ...], count: int) -> None:
    keys = Keys(
        None,
        None,
        [
            build_key(Grant(name=f"k{number}", priority_class=class_), bytes([number]) * 32)
            for number, class_ in enumerate(classes)
        ],
    )
    assert keys.priority_classes == count


def test_a_key_that_asks_no_engine_has_no_class() -> None:
    grants = (
        Grant(name="reader", scopes=("read",), priority_class="batch"),
        Grant(name="chat", priority_class="interactive"),
    )
    keys = Keys(None, None, [build_key(grant, grant.name.encode().ljust(32)) for grant in grants])
    assert keys.priority_classes == 1


def test_a_token_asks_models_as_its_key_and_nothing_else() -> None:
    keys = Keys(Secret(ADMIN), None)
    (admin_key,) = keys.table.keys.values()
    token = keys.issue_token(admin_key)
    authorization = b"Bearer " + token.reveal_bytes()
    caller = keys.check(authorization, "inference")
    assert (caller.name, caller.account) == ("admin", admin_key.digest)
    assert verdict(keys, authorization, "admin") == verdict(keys, authorization, "read") == 403
    assert verdict(keys, f"Bearer {ADMIN}".encode(), "admin") == 200


def test_a_token_follows_its_key_and_ends_with_that_key() -> None:
    key = Key("app", b"d" * 32, frozenset({"inference"}), models=frozenset({"a"}))
    keys = Keys(Secret(ADMIN), None, [key])
    token, later_token = (keys.issue_token(key) for _ in range(2))
    keys.swap([replace(key, models=frozenset({"b"}), priority=7)])
    for text in (token.reveal_bytes(), later_token.reveal_bytes()):
        authorization = b"Bearer " + text
        caller = keys.check(authorization, "inference")
        assert (caller.models, caller.priority) == (frozenset({"b"}), 7)
        assert keys.allows(caller, "inference")
    keys.swap([replace(key, ends_at=1.0)])
    assert verdict(keys, authorization, "inference") == 401
    keys.swap([])
    assert verdict(keys, authorization, "inference") == 401
    assert not keys.allows(caller, "inference")


def test_tokens_are_forgotten_with_their_key_but_not_while_keys_are_unreadable() -> None:
    key = Key("app", b"d" * 32, frozenset({"inference"}))
    keys = Keys(Secret(ADMIN), None, [key])
    authorization = b"Bearer " + keys.issue_token(key).reveal_bytes()
    keys.swap([], is_closed=True)
    assert verdict(keys, authorization, "inference") == 401
    keys.swap([key])
    assert verdict(keys, authorization, "inference") == 200
    keys.swap([])
    keys.swap([key])
    assert verdict(keys, authorization, "inference") == 401


def test_a_gateway_without_keys_stays_open() -> None:
    keys = Keys(None, None)
    keys.issue_token(ANONYMOUS_KEY)
    assert keys.is_open


def test_a_person_with_many_pages_ends_no_key_of_another() -> None:
    scopes: frozenset[Scope] = frozenset(("read",))
    keys = Keys(None, None, person_scopes=scopes)
    tokens = [keys.open_session("user:sue", scopes, 1e12)]
    tokens += [keys.open_session("user:ann", scopes, 1e12) for _ in range(34)]
    verdicts = [verdict(keys, b"Bearer " + token.reveal_bytes(), "read") for token in tokens]
    assert verdicts == [200] + 2 * [401] + 32 * [200]


def test_the_keys_of_pages_outlive_a_change_of_other_keys_and_end_with_their_person() -> None:
    scopes: frozenset[Scope] = frozenset(("read",))
    keys = Keys(None, None, person_scopes=scopes)
    tokens = [keys.open_session(name, scopes, 1e12) for name in ("user:sue", "user:ann")]
    keys.swap(())
    sent = [b"Bearer " + token.reveal_bytes() for token in tokens]
    assert [verdict(keys, authorization, "read") for authorization in sent] == [200, 200]
    keys.close_sessions("user:ann")
    assert [verdict(keys, authorization, "read") for authorization in sent] == [200, 401]
