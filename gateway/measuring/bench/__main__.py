"""The load in a process outside the gateway: a job on stdin, the report on stdout, both JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from gateway.errors import NotReady
from gateway.measuring.bench.measure import LoadTest
from gateway.measuring.bench.streamed_answer import BenchTarget
from gateway.secret import Secret


def main() -> None:
    job = json.load(sys.stdin)
    load = LoadTest(
        BenchTarget(
            job["url"], job["model"], Secret(job["key"]) if job["key"] else None, job["vocabulary"]
        ),
        job["context"],
        sends_text=job.get("text", False),
    )
    try:
        report = asyncio.run(load.measure(job["levels"], job["seconds"]))
    except NotReady as error:
        sys.exit(str(error))
    sys.stdout.write(report.model_dump_json())


if __name__ == "__main__":
    main()
