"""A wish as people see it: values that are secret by their name are hidden."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.changes import diff_wishes
from gateway.domain import Scalar
from gateway.secret import shown_setting
from gateway.wishes.shown_wish import drop_hidden_values, hidden_setting, shown_wish
from tests.support.makers import wish

SECRET = "sk-7f3a9c2e51"


@pytest.mark.parametrize(
    "name",
    ["api-key", "admin-api-key", "hf-token", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db-password"],
)
def test_a_value_with_a_secret_name_is_hidden(name: str) -> None:
    assert shown_setting(name, SECRET) == "(hidden)"
    assert shown_setting(name, 7) == "(hidden)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max-num-batched-tokens", 4096),
        ("num-speculative-tokens", 4),
        ("enable-auto-tool-choice", True),
        ("kv-cache-dtype", "fp8"),
        ("NCCL_P2P_DISABLE", "1"),
        ("hf-overrides", '{"rope_scaling": {"type": "yarn"}}'),
        ("skip-tokenizer-init", False),
    ],
)
def test_other_values_are_shown(name: str, value: Scalar) -> None:
    assert shown_setting(name, value) == value


def test_secrets_in_addresses_and_objects_are_hidden() -> None:
    address = shown_setting("remote", f"http://me:{SECRET}@host/x")
    assert address == "http://host/x"
    text = shown_setting("extra", f'{{"api_key": "{SECRET}", "size": "8"}}')
    assert text == '{"api_key": "(hidden)", "size": "8"}'


def test_a_wish_without_secrets_is_shown_as_it_is() -> None:
    plain_wish = wish(args={"block-size": 16}, env={"NCCL_P2P_DISABLE": "1"})
    assert shown_wish(plain_wish) is plain_wish


def test_no_difference_shows_a_secret() -> None:
    former, present = wish(args={"api-key": "old-secret-1"}), wish(args={"api-key": SECRET})
    (difference,) = diff_wishes(former, present)
    assert (difference.former, difference.present) == ("api-key=(hidden)", "api-key=(hidden)")


def test_a_hidden_value_that_comes_back_changes_nothing() -> None:
    present = wish(args={"api-key": SECRET, "block-size": 16})
    public_args = shown_wish(present).args
    assert public_args == {"api-key": "(hidden)", "block-size": 16}
    patch = drop_hidden_values(
        present, {"args": {**public_args, "block-size": 32}, "aliases": ["x"]}
    )
    assert patch == {"args": {"block-size": 32}, "aliases": ["x"]}
    assert drop_hidden_values(present, {"args": None}) == {"args": None}
    assert drop_hidden_values(present, {"args": {"api-key": "new"}}) == {"args": {"api-key": "new"}}


JSON = f'{{"api_key": "{SECRET}", "url": "http://me:{SECRET}@host/x", "size": 8}}'


@pytest.mark.parametrize(("former_part", "new_part"), [("8}", "9}"), ("host/x", "host/y")])
def test_a_value_that_is_edited_beside_its_secrets_keeps_them(
    former_part: str, new_part: str
) -> None:
    present = wish(args={"extra": JSON})
    shown_value = shown_wish(present).args["extra"]
    assert isinstance(shown_value, str)
    assert SECRET not in shown_value
    edited_value = shown_value.replace(former_part, new_part)
    patch = drop_hidden_values(present, {"args": {"extra": edited_value}})
    assert patch == {"args": {"extra": JSON.replace(former_part, new_part)}}


def test_a_new_secret_in_an_object_replaces_the_former_one() -> None:
    present = wish(env={"X": f'[{{"token": "{SECRET}"}}, {{"token": "second-one"}}]'})
    edited_value = '[{"token": "(hidden)"}, {"token": "third-one"}]'
    patch = drop_hidden_values(present, {"env": {"X": edited_value}})
    assert patch == {"env": {"X": f'[{{"token": "{SECRET}"}}, {{"token": "third-one"}}]'}}


def test_a_password_goes_to_no_other_host() -> None:
    present = wish(args={"remote": f"http://me:{SECRET}@host/x"})
    for address in ("http://host.example/x", "http://other/x", "http://hos/x"):
        patch = {"args": {"remote": address}}
        assert drop_hidden_values(present, patch) == patch


def test_a_mask_without_a_known_secret_stays() -> None:
    present = wish(env={"X": f'[{{"token": "{SECRET}"}}, {{"token": "second-one"}}]'})
    patch = {"env": {"X": '[{"token": "(hidden)"}]', "Y": '{"token": "(hidden)"}'}}
    assert drop_hidden_values(present, patch) == patch
    assert hidden_setting(wish(**patch)) == "env.X"


@pytest.mark.parametrize(
    "args",
    [{"api-key": "(hidden)"}, {"extra": '{"api_key": "(hidden)"}'}, {"extra": '{"size": 8}'}],
)
def test_a_setting_with_a_mask_for_its_secret_is_found(args: dict[str, Scalar]) -> None:
    is_masked = any("(hidden)" in str(value) for value in args.values())
    assert (hidden_setting(wish(args=args)) is not None) is is_masked
    assert hidden_setting(wish(args={"chat": "a (hidden) word"})) is None
