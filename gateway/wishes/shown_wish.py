"""A wish as the admin API shows it: without values that names of flags and variables call secret.

Engines refuse such flags and variables. But an endpoint ignores them, and an older version may have
taken them. Callers with the scope `read` see every wish, former ones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.domain.value import Scalar
from gateway.domain.wish import Wish
from gateway.secret import is_hidden, restore_secrets, shown_setting

# The fields of a wish with values of the user's own names.
SETTINGS_FIELDS = ("args", "env")


def shown_wish(wish: Wish) -> Wish:
    """The wish without secret values; the same object where it has none."""
    changes = {
        field: shown_values
        for field in SETTINGS_FIELDS
        if (shown_values := _shown_settings(getattr(wish, field))) != getattr(wish, field)
    }
    return wish.evolve(**changes) if changes else wish


def drop_hidden_values(wish: Wish, patch: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch without the values that a caller got as hidden and sends back. A value of which
    the caller changed another part keeps its secrets.

    wish: the present one.
    """
    kept_patch = dict(patch)
    for field in SETTINGS_FIELDS:
        former_values: Mapping[str, Scalar] = getattr(wish, field)
        if isinstance(settings := patch.get(field), dict):
            kept_patch[field] = {
                name: _restore(value, former_values.get(name))
                for name, value in settings.items()
                if name not in former_values
                or value == former_values[name]
                or value != shown_setting(name, former_values[name])
            }
    return kept_patch


def _restore(value: Any, former_value: Scalar | None) -> Any:
    if isinstance(value, str) and isinstance(former_value, str):
        return restore_secrets(value, former_value)
    return value


def hidden_setting(wish: Wish) -> str | None:
    """The flag or variable with a mask in the place of a secret, such as `args.api-key`; None:
    there is none."""
    return next(
        (
            f"{field}.{name}"
            for field in SETTINGS_FIELDS
            for name, value in getattr(wish, field).items()
            if is_hidden(name, value)
        ),
        None,
    )


def _shown_settings(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: shown_setting(name, value) for name, value in settings.items()}
