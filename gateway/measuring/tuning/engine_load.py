"""Measurement of an idle engine by a process outside the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable

from pydantic import ValidationError

from gateway.domain import Attempt, BenchReport, Instance
from gateway.logging import Logger
from gateway.secret import secret_text
from gateway.worker_process import kill, spawn

log = Logger("fitserve.tuning")

_POLL_S = 0.5
_NICE = 5


async def measure(
    attempt: Attempt,
    instance: Instance,
    watch: Callable[[], bool],
    seconds: float,
    at_once: int | None = None,
    *,
    has_text: bool = False,
) -> BenchReport | None:
    """The report of a load process. None if a client sent a request or the engine failed.

    watch: looks whether a client sent a request; an error that it raises ends the measurement.
    at_once: the most concurrent requests; None: the number that the plan is made for.
    has_text: prompts are sentences.
    """
    plan = attempt.plan
    planned_concurrency = at_once or (
        plan.speed.concurrency if plan.speed else min(32, plan.at_once)
    )
    job: dict[str, object] = {
        "url": instance.url,
        "key": instance.key,
        "model": attempt.served_name,
        "vocabulary": plan.model.vocab,
    }
    job |= {
        "context": plan.max_model_len.value,
        "levels": sorted({1, planned_concurrency}),
        "seconds": seconds,
    }
    job |= {"text": has_text}
    child = await spawn("gateway.measuring.bench", {}, errors=True)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
    communication = asyncio.ensure_future(
        child.communicate(json.dumps(job, default=secret_text).encode())
    )
    try:
        while not (await asyncio.wait({communication}, timeout=_POLL_S))[0]:
            if watch():
                log.info("measurement stopped for a request", model=attempt.model)
                return None
        report, errors = communication.result()
        if watch() or child.returncode:
            log.info(
                "measurement failed",
                model=attempt.model,
                reason=errors.decode(errors="replace")[-300:] or "a request arrived",
            )
            return None
        bench = BenchReport.model_validate_json(report)
        return bench.evolve(fingerprint=attempt.fingerprint)
    except ValidationError:
        return None
    finally:
        communication.cancel()
        await asyncio.gather(communication, return_exceptions=True)
        await kill(child)
