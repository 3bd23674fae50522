"""Measures an engine from beside the gateway, as long as nobody else asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable

from pydantic import ValidationError

from gateway.domain import Attempt, BenchReport, Instance
from gateway.logging import Logger
from gateway.worker_process import end, started

log = Logger("fitserve.tuning")

_POLL_S = 0.5
_NICE = 5


async def measure(
    attempt: Attempt, instance: Instance, busy: Callable[[], bool], seconds: float
) -> BenchReport | None:
    """None where somebody else asked meanwhile, or the engine did not answer. The load is a process
    of its own."""
    plan = attempt.plan
    planned = plan.speed.concurrency if plan.speed else min(32, plan.max_num_seqs.value)
    job: dict[str, object] = {
        "url": instance.url,
        "key": instance.key,
        "model": attempt.served_name,
        "vocabulary": plan.model.vocab,
    }
    job |= {"context": plan.max_model_len.value, "levels": sorted({1, planned}), "seconds": seconds}
    child = await started("gateway.measuring.bench", {}, errors=True)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
    answering = asyncio.ensure_future(child.communicate(json.dumps(job).encode()))
    try:
        while not (await asyncio.wait({answering}, timeout=_POLL_S))[0]:
            if busy():
                log.info("a measurement is given up for a request", model=attempt.model)
                return None
        said, wrong = answering.result()
        if busy() or child.returncode:
            log.info(
                "nothing was measured",
                model=attempt.model,
                reason=wrong.decode(errors="replace")[-300:] or "a request came",
            )
            return None
        return BenchReport.model_validate_json(said).evolve(fingerprint=attempt.fingerprint)
    except ValidationError:
        return None
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await end(child)
