"""Views of models at rest as JSON, kept until the model changes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.fleet.model_rest import fingerprint, is_at_rest


class ViewCache:
    """The views of the list of models, by name. A view that depends on the time is not kept."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[tuple[Any, ...], str]] = {}

    def text(self, model: ManagedModel) -> str | None:
        """The view as it was rendered; None: it has to be rendered."""
        values, text = self._texts.get(model.wish.name, ((), None))
        return text if values == fingerprint(model) and is_at_rest(model) else None

    def store(self, model: ManagedModel, text: str) -> None:
        if is_at_rest(model):
            self._texts[model.wish.name] = fingerprint(model), text

    def retain(self, names: Collection[str]) -> None:
        """Forget the views of all other models."""
        if len(self._texts) > len(names):
            self._texts = {name: entry for name, entry in self._texts.items() if name in names}
