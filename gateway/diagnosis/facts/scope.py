"""Where a fact holds, and whether what it was learned on is still there: the driver and the
engine's image. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gateway.domain import Fact


def batch_scope(batched_tokens: int, seqs: int, *, eager: bool) -> dict[str, str]:
    """What a fact about the memory of an engine that computes is about, beside its plan's scope."""
    return {
        "max_num_batched_tokens": str(batched_tokens),
        "max_num_seqs": str(seqs),
        "graphs": "off" if eager else "on",
    }


def gone(
    fact: Fact, driver: str | None, images: Collection[str], pins: Mapping[str, str] | None = None
) -> str | None:
    """Why the fact is stale, or None. driver: of this machine, None: not known, then nothing is
        judged by it. images: of the
    engines that can be planned. pins: by name of an image the digest of what would be started; of
        other names nothing is judged by it.
    """
    learned, image = fact.under.get("driver"), fact.under.get("image")
    if learned is not None and driver is not None and learned != driver:
        return f"learned under driver {learned}, and this is {driver}"
    if image is not None and image not in images:
        return f"learned with the image {image}, which no engine here has"
    digest, now = fact.under.get("digest"), (pins or {}).get(image or "")
    if digest is not None and now is not None and digest != now:
        return f"learned with the image {digest}, and {image} is {now}"
    return None


def standing(
    facts: Iterable[Fact],
    driver: str | None,
    images: Collection[str],
    pins: Mapping[str, str] | None = None,
) -> list[Fact]:
    """The facts that are not stale."""
    return [fact for fact in facts if gone(fact, driver, images, pins) is None]
