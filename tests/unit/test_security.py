"""Keys, scopes and guesses without a socket; tests/local/test_security.py asks a whole gateway."""

from __future__ import annotations

import hmac
from unittest.mock import patch

import pytest

from gateway.domain.grant import Grant
from gateway.errors import FitserveError
from gateway.keys import SCOPES as KNOWN_SCOPES
from gateway.keys import hash_key, new_key
from gateway.proxy.access.auth import ANONYMOUS_KEY, Keys, build_key
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.scopes import SCOPES
from gateway.proxy.api.endpoints import ENDPOINTS, is_of_batches
from gateway.secret import Secret
from gateway.server.app import create_app
from gateway.settings import Settings
from tests.support.paths import ROOT

ADMIN = "an-admin-key-of-this-test"


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route that the application has. A HEAD is the GET of its path."""
    door = create_app(Settings())
    return sorted(
        (method, route.path)
        for route in door.scopes.routes
        for method in route.methods or ()
        if method != "HEAD"
    )


# Paths outside the table of endpoints, and paths that are not routes: they are refused like one.
BESIDE = (
    ("GET", "/v1/models/{id}", "inference"),
    ("GET", "/v1/responses/{id}", "inference"),
    ("POST", "/v1/responses/{id}/cancel", "inference"),
    ("GET", "/v1/anything else", "inference"),
    ("GET", "/anything else", "read"),
)
COLUMNS = ("no key", "inference", "read", "admin")


def allowed_answer(need: str, have: str) -> str:
    """The answer to a caller of that column: yes (the route answers), or the status of the
    refusal."""
    if need == "open" or have in (need, "admin"):
        return "yes"
    return "401" if have == "no key" else "403"


def access_table() -> list[tuple[str, ...]]:
    """(method and path, answers of each column) of every route that the application has, and of
    inference."""
    rows = [(method, path, SCOPES[method, path]) for method, path in routes() if method != "HEAD"]
    inference = [(endpoint.method, endpoint.path, "inference") for endpoint in ENDPOINTS]
    return [
        (
            f"{method} {path.replace(':path}', '}')}",
            *(allowed_answer(need, have) for have in COLUMNS),
        )
        for method, path, need in (*rows, *inference, *BESIDE)
    ]


def told_in_documents() -> list[tuple[str, ...]]:
    """The same, as docs/keys.md has it."""
    table = (
        (ROOT / "docs/keys.md")
        .read_text()
        .partition(f"| call | {' | '.join(COLUMNS)} |\n")[2]
        .partition("\n\n")[0]
    )
    return [
        tuple(cell.strip(" `") for cell in line.strip("|").split("|"))
        for line in table.splitlines()[1:]
    ]


HOSTILE = [
    b"' OR '1'='1",
    b"'; DROP TABLE keys; --",
    b"x" * 1_000_000,
    b"\0" * 40,
    ADMIN.encode() + b"\0",
    "ключ".encode(),
    b"\xff\xfe\xed\xa0\x80",
    b"%s%n%x",
    hash_key(ADMIN.encode()),
    hash_key(ADMIN.encode()).hex().encode(),
    bytes(32),
]


@pytest.mark.parametrize("token", HOSTILE, ids=lambda token: repr(token)[:30])
def test_s2_hostile_keys_are_wrong_keys(token: bytes) -> None:
    keys = Keys(Secret(ADMIN), None, [build_key(Grant(name="a"), hash_key(new_key()))])
    with pytest.raises(FitserveError) as error:
        keys.check(b"Bearer " + token, "inference")
    assert error.value.status == 401
    assert len(str(error.value)) < 200


def test_s2_a_key_is_hashed_before_it_is_compared_and_compared_in_constant_time() -> None:
    key = new_key()
    keys = Keys(Secret(ADMIN), None, [build_key(Grant(name="a"), hash_key(key))])
    with patch(
        "gateway.proxy.access.auth.hmac.compare_digest", wraps=hmac.compare_digest
    ) as compare:
        for token in (ADMIN, key.reveal(), "wrong"):
            try:
                keys.check(f"Bearer {token}".encode(), "inference")
            except FitserveError:
                assert token == "wrong"
    comparisons = [call.args for call in compare.call_args_list]
    assert [first_value for first_value, _ in comparisons] == [
        hash_key(ADMIN.encode()),
        hash_key(key),
        hash_key(b"wrong"),
    ]
    assert all(len(right) == 32 for _, right in comparisons)


def test_s2_a_key_that_is_nearly_right_is_looked_at_no_longer_than_another() -> None:
    """The keys that are compared, and their number, are the same."""
    keys = Keys(Secret(ADMIN), None, [build_key(Grant(name="a"), hash_key(new_key()))])

    def work(token: bytes) -> list[tuple[int, bytes]]:
        with patch(
            "gateway.proxy.access.auth.hmac.compare_digest", wraps=hmac.compare_digest
        ) as compare:
            with pytest.raises(FitserveError):
                keys.check(b"Bearer " + token, "admin")
            return [(len(call.args[0]), call.args[1]) for call in compare.call_args_list]

    near = work(ADMIN.encode()[:-1] + b"z")
    assert near == work(b"z" * len(ADMIN))
    assert near


LOGIN = {f"/auth/{name}" for name in ("ways", "login", "callback", "token", "logout")}


def test_s3_every_route_has_its_one_row_and_every_row_its_route() -> None:
    assert set(routes()) == set(SCOPES)
    page = {"/", "/page/{version}/{name:path}"}
    assert {path for (_, path), scope in SCOPES.items() if scope == "open"} == {
        "/health",
        "/healthz",
        "/readyz",
        *page,
        *LOGIN,
    }


def test_s3_the_documents_list_every_route_with_the_answer_to_each_scope() -> None:
    table = access_table()
    rows = "\n".join(f"| `{call}` | {' | '.join(cells)} |" for call, *cells in table)
    assert told_in_documents() == table, f"the table of docs/keys.md is to be:\n{rows}"


def test_s13_changes_are_never_a_get_and_need_admin() -> None:
    for (method, path), scope in SCOPES.items():
        assert method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        # A key changes its own files and batches, and nothing else.
        if is_of_batches(path):
            assert scope == "inference", path
        else:
            assert scope != "inference", path
            # A login changes no state but its own, and has checks of its own.
            assert method == "GET" or scope == "admin" or path in LOGIN, path


def test_s14_wrong_keys_are_counted_per_address_and_forgotten() -> None:
    now, waits = 0.0, list[int | None]()
    logins = FailedLogins(lambda: now)

    def wrong(address: str) -> int:
        try:
            logins.count_wrong_key(address)
        except FitserveError as error:
            waits.append(error.retry_after_s)
            return error.status
        return 401

    assert [wrong("10.0.0.1") for _ in range(12)] == [401] * 10 + [429] * 2
    assert wrong("10.0.0.2") == 401
    # One customer has a whole /64.
    assert [wrong(f"2001:db8::{number:x}") for number in range(11)] == [401] * 10 + [429]
    assert wrong("2001:db8:0:1::1") == 401
    # A socket for both families shows IPv4 so.
    assert wrong("::ffff:10.0.0.1") == 429
    assert wrong("::ffff:10.0.0.9") == 401
    now = 61.0
    assert wrong("10.0.0.1") == 401
    assert waits == [60] * 4


def test_s14_a_guess_that_is_right_does_not_count_from_where_it_was_guessed() -> None:
    keys = Keys(Secret("password"), None)
    good = b"Bearer password"
    assert keys.check(good, "admin", "10.0.0.1").name == "admin"
    for address in ("10.0.0.1", "10.0.0.2"):
        for number in range(20):
            with pytest.raises(FitserveError):
                keys.check(b"Bearer guess-%d" % number, "admin", address)
    # A client that was known there before goes on; a new one may have guessed it.
    assert keys.check(good, "admin", "10.0.0.1").name == "admin"
    with pytest.raises(FitserveError) as error:
        keys.check(good, "admin", "10.0.0.2")
    assert error.value.status == 429
    assert keys.check(good, "admin", "10.0.0.3").name == "admin"


def test_a_local_caller_of_a_gateway_without_keys_may_do_everything() -> None:
    assert (
        Keys(None, None).authenticate({b"host": b"127.0.0.1"}, "admin", "127.0.0.1")
        is ANONYMOUS_KEY
    )
    assert ANONYMOUS_KEY.scopes == KNOWN_SCOPES
