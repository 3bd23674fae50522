"""A scripted engine as a real program: `python fake_engine.py --port N --model NAME [--exit-code 3
...]`.

Standard library only. Needs `scripted_engine.py` beside it, so that a bare container gets by with
these two files. Flags of real engines that it does not know are ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from tests.support.scripted_engine import DEAF, EngineScript, FakeEngine
else:  # a program, whose folder Python searches
    from scripted_engine import DEAF, EngineScript, FakeEngine

WORKER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready',"
    " flush=True); time.sleep(600)"
)


class Lines(argparse.Action):
    """Flags that add to the lines printed at the start, in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option: str | None = None,
    ) -> None:
        value = str(values)
        if option == "--print":
            lines = [value]
        elif option == "--long-line":
            lines = ["x" * int(value)]
        elif option == "--flood":
            lines = [f"line {number}" for number in range(int(value))]
        else:
            lines = Path(value).read_text(errors="surrogateescape").splitlines()
        namespace.lines = (*namespace.lines, *((0.0, line) for line in lines))


def parse(argv: Sequence[str]) -> tuple[EngineScript, str, int]:
    """The script, and the address and port to listen on."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.set_defaults(lines=())
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--served-model-name", help="wins over --model, as in vLLM")
    parser.add_argument("--print", action=Lines, help="a line to print at the start; repeatable")
    parser.add_argument("--long-line", action=Lines, help="a line of so many x")
    parser.add_argument("--flood", action=Lines, help="so many numbered lines")
    parser.add_argument("--log-file-lines", action=Lines, help="print the lines of this file")
    parser.add_argument("--last-words", help="printed without newline before it exits by itself")
    parser.add_argument("--start-delay", type=float, default=0, help="seconds until it listens")
    parser.add_argument("--no-serve", action="store_true", help="never listen")
    parser.add_argument("--exit-code", type=int, help="exit by itself with this code")
    parser.add_argument(
        "--exit-after", type=float, default=0, help="seconds it runs before it exits by itself"
    )
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument(
        "--spawn-child",
        action="store_true",
        help="a worker in a process group of its own, deaf to SIGTERM",
    )
    parser.add_argument("--tokens-per-second", type=float, default=0)
    parser.add_argument("--gibberish", action="store_true", help="one token, repeated")
    parser.add_argument("--empty", action="store_true", help="no token at all")
    parser.add_argument(
        "--hang-after", type=int, help="answer so many inference requests, then none"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        type=json.loads,
        default=[],
        help="adapters, as vLLM takes them",
    )
    parser.add_argument("--embed-dim", type=int, default=8)
    parser.add_argument(
        "--hold", type=Path, help="no answer goes beyond its first token while this file is there"
    )
    parser.add_argument(
        "--hold-chat", type=Path, help="no chat is answered while this file is there"
    )
    parser.add_argument(
        "--record",
        type=Path,
        help="append raw requests, and `closed TIME` when a client leaves early",
    )
    # More arguments as a JSON list, for callers that may only give flags of known types.
    arguments = [
        json.loads(item.removeprefix("--script=")) if item.startswith("--script=") else [item]
        for item in argv
    ]
    args = parser.parse_known_args([item for items in arguments for item in items])[0]
    script = EngineScript(
        model=args.served_model_name or args.model,
        lines=args.lines,
        last_words=args.last_words,
        start_delay_s=args.start_delay,
        key=os.environ.get("VLLM_API_KEY"),
        serve=not args.no_serve,
        exit_code=args.exit_code,
        exit_after_s=args.exit_after,
        ignore_term=args.ignore_term,
        workers=int(args.spawn_child),
        tokens_per_second=args.tokens_per_second,
        adapters=tuple(
            module["name"]
            for module in args.lora_modules
            if Path(module["path"], "adapter_model.safetensors").is_file()
        ),
        gibberish=args.gibberish,
        empty=args.empty,
        hang_after=args.hang_after,
        max_model_len=args.max_model_len,
        embed_dim=args.embed_dim,
        hold=args.hold,
        hold_chat=args.hold_chat,
        record=args.record,
    )
    return script, args.host, args.port


def say(text: str) -> None:
    sys.stdout.buffer.write(text.encode(errors="surrogateescape") + b"\n")
    sys.stdout.buffer.flush()


async def run(script: EngineScript, host: str, port: int) -> int:
    """Play the script until it ends or SIGTERM comes; the exit code."""
    event = asyncio.Event()
    if script.ignore_term:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, say, DEAF)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    playing = asyncio.ensure_future(play(script, host, port))
    stopping = asyncio.ensure_future(event.wait())
    await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if playing.done():
        return playing.result()
    playing.cancel()
    await asyncio.wait({playing})
    return 0


async def play(script: EngineScript, host: str, port: int) -> int:
    for _ in range(script.workers):
        worker = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, process_group=0
        )
        assert worker.stdout is not None
        worker.stdout.readline()
    for delay_s, line in script.lines:
        if delay_s:
            await asyncio.sleep(delay_s)
        say(line)
    if script.exit_code is not None and not script.exit_after_s:
        return last_words(script, script.exit_code)
    await asyncio.sleep(script.start_delay_s)
    if not script.serve:
        return await end(script)
    async with FakeEngine(script, say, host, port):
        return await end(script)


async def end(script: EngineScript) -> int:
    if script.exit_code is None:
        await asyncio.Event().wait()
    await asyncio.sleep(script.exit_after_s)
    return last_words(script, script.exit_code or 0)


def last_words(script: EngineScript, code: int) -> int:
    sys.stdout.write(script.last_words or "")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(run(*parse(sys.argv[1:]))))
