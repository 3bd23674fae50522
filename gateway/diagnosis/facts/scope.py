"""The scope of a fact, and its validity by driver and engine image. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gateway.domain import Fact

FORK = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
"""vLLM's variable with the value that makes it fork (engines/vllm/start_method.py)."""


def batch_scope(batched_tokens: int, seqs: int, *, is_eager: bool) -> dict[str, str]:
    """The scope of a fact about the memory of a computing engine in addition to its plan's
    scope."""
    return {
        "max_num_batched_tokens": str(batched_tokens),
        "max_num_seqs": str(seqs),
        "graphs": "off" if is_eager else "on",
    }


def stale_reason(
    fact: Fact, driver: str | None, images: Collection[str], pins: Mapping[str, str] | None = None
) -> str | None:
    """Why the fact is stale; None if it is valid.

    driver: the driver of this machine; None: unknown, and not compared.
    images: the images of the engines that plans may use.
    pins: the digest that a start would use, by name of its image; other names are not compared.
    """
    learned_driver = fact.software.get("driver")
    image = fact.software.get("image")
    if learned_driver is not None and driver is not None and learned_driver != driver:
        return f"learned under driver {learned_driver}, and this is {driver}"
    if image is not None and image not in images:
        return f"learned with the image {image}, which no engine here has"
    digest = fact.software.get("digest")
    current_digest = (pins or {}).get(image or "")
    if digest is not None and current_digest is not None and digest != current_digest:
        return f"learned with the image {digest}, and {image} is {current_digest}"
    return None


def valid_facts(
    facts: Iterable[Fact],
    driver: str | None,
    images: Collection[str],
    pins: Mapping[str, str] | None = None,
) -> list[Fact]:
    """The facts that are not stale."""
    return [fact for fact in facts if stale_reason(fact, driver, images, pins) is None]
