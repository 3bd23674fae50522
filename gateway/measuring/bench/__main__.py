"""The load as a program of its own, so that the gateway can measure an engine without a turn of its
event loop: a job on stdin, the report
on stdout, both JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from gateway.errors import NotReady
from gateway.measuring.bench.measure import Load
from gateway.measuring.bench.streamed_answer import Target


def main() -> None:
    job = json.load(sys.stdin)
    load = Load(Target(job["url"], job["model"], job["key"], job["vocabulary"]), job["context"])
    try:
        report = asyncio.run(load.measure(job["levels"], job["seconds"]))
    except NotReady as error:
        sys.exit(str(error))
    sys.stdout.write(report.model_dump_json())


if __name__ == "__main__":
    main()
