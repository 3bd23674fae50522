"""Seconds of one step of an engine, and of requests, from first principles: bytes over bandwidth, products over peaks. Pure.

Clock(work, machine, table).step_s(batch) -> seconds of one stage
decode_s, total_per_s, first_token_s -> what a user sees
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gateway.core.speed.machine import Machine, SpeedTable
from gateway.core.speed.work import Product, Work


@dataclass(frozen=True)
class Batch:
    """What one step computes: a token for each of `requests`, whose contexts are `context` tokens long, and `prompt` tokens of prompts
    that have `before` tokens computed already."""

    requests: float
    context: float
    prompt: float = 0
    before: float = 0
    eager: bool = False

    @property
    def tokens(self) -> float:
        return self.requests + self.prompt


@dataclass(frozen=True, eq=False)
class Clock:
    """How long the work of a rank takes on a machine."""

    work: Work
    machine: Machine
    table: SpeedTable

    def step_s(self, batch: Batch) -> float:
        """Seconds of one rank of one stage. Reading and multiplying overlap, so that the longer of both counts."""
        seconds = self._products_s(batch.tokens, batch.requests + (1 if batch.prompt else 0), eager=batch.eager)
        memory, flops = self._attention_rates
        for reading in self.work.readings:
            read = batch.requests * (reading.token_bytes * reading.seen(batch.context) + reading.state_bytes)
            pairs = batch.prompt * reading.seen(batch.before + batch.prompt / 2)
            seconds += read / memory + reading.flops * pairs / flops
        return seconds + self.table.step_s + self.table.request_s * batch.requests

    def decode_s(self, requests: float, context: float, *, eager: bool) -> float:
        """Seconds between two tokens of a request, with `requests` at once. Of several stages each has its part of the requests."""
        stages = self.work.pp
        stage = self.step_s(Batch(max(1.0, requests / stages), context, eager=eager))
        return stages * stage + (stages - 1) * self.table.stage_s

    def total_per_s(self, requests: float, read: float, written: float, *, eager: bool, most: int) -> float:
        """Tokens/s of so many requests at once, each of which reads a prompt of `read` tokens and writes `written`.

        In each step every request writes a token, and as many prompts are begun as requests end. most: tokens of one step.
        """
        stages = self.work.pp
        part = max(1.0, requests / stages)
        prompt = part * read / written
        room = max(1.0, most - part)
        # Where a step has no room for so many tokens of prompts, requests wait for theirs.
        stretched = max(1.0, prompt / room)
        batch = Batch(part / stretched, read + written / 2, min(prompt, room), read / 4, eager)
        stage = self.step_s(batch) * stretched
        return requests / (max(1.0, min(stages, requests)) * stage + (stages - 1) * self.table.stage_s)

    def first_token_s(self, prompt: int, *, eager: bool, most: int) -> float:
        """Seconds to the first token of a prompt, which is computed in batches of at most `most` tokens, one after the other."""
        whole, rest = divmod(prompt, most)
        batches = [most] * min(whole, 1) + [rest] * (rest > 0)
        times = [self._products_s(size, 1, eager=eager) + self.table.step_s for size in batches]
        seconds = sum(times) + (whole - 1) * times[0] if whole else sum(times)
        seconds += sum(reading.flops * reading.pairs(prompt) for reading in self.work.readings) / self._attention_rates[1]
        # Stages work on batches behind each other; the last batch passes through all of them.
        return self.table.first_s + seconds + (self.work.pp - 1) * (times[-1] + self.table.stage_s)

    def _products_s(self, tokens: float, logits: float, *, eager: bool) -> float:
        """Of all but attention. logits: tokens whose successor is wanted."""
        work = self.work
        seconds = sum(
            max((one.read(tokens) + one.passed * tokens) / memory, one.flops * tokens / flops)
            for one, (memory, flops) in zip(work.products, self._product_rates, strict=True)
        )
        memory, flops = self._rates(work.head)
        seconds += max(work.head.bytes / memory, work.head.flops * logits / flops) / work.pp
        seconds += work.reduces * self._reduce_s(tokens) + work.layers * self.table.layer_s
        # Without graphs the CPU launches kernel by kernel: the GPU waits for it, or it for the GPU.
        return max(seconds, work.layers * self.table.eager_layer_s if eager else 0.0)

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of one all-reduce."""
        wire, tp = self.machine.wire, self.work.tp
        if tp == 1 or wire is None:
            return 0.0
        return wire.latency_s + 2 * (tp - 1) / tp * tokens * self.work.hidden_bytes / wire.bytes_s

    def _rates(self, one: Product) -> tuple[float, float]:
        """Bytes/s and FLOP/s that the kernel of these layers reaches."""
        part, flops = self.table.part(one.kernel, experts=one.experts > 0), self.machine.flops
        peak = flops.get(one.multiplied) or flops.get("bfloat16") or flops["float16"]
        return self.machine.memory * part.memory, peak * part.flops

    @cached_property
    def _product_rates(self) -> list[tuple[float, float]]:
        return [self._rates(one) for one in self.work.products]

    @cached_property
    def _attention_rates(self) -> tuple[float, float]:
        part = self.table.attention
        return self.machine.memory * part.memory, self.machine.flops["bfloat16"] * part.flops
