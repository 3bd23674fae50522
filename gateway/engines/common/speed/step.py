"""Seconds of an engine's steps and requests, from bytes over bandwidth and products over peaks.
Pure.

clock = StepClock(work, machine, table)
clock.decode_s(requests, context)          between two tokens of a request among this many
clock.prompts_s(count, length, limit)      to compute prompts, in batches of at most `limit` tokens
clock.total_per_s(...), clock.first_token_s(...)  the speed for users
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gateway.domain import Speed
from gateway.engines.common.speed.machine import Graphs, Machine, SpeedTable
from gateway.engines.common.speed.work import AttentionWork, Product, RankWork


class _KernelRates(NamedTuple):
    """Bytes/s and FLOP/s that a kernel reaches, and the least seconds of one layer."""

    memory: float
    flops: float
    least_s: float


@dataclass(frozen=True, eq=False)
class StepClock:
    """Duration of a rank's work on a machine. graphs: batches that need not wait for the CPU.
    other_stages: clocks of the other stages, if stages are unlike."""

    work: RankWork
    machine: Machine
    table: SpeedTable
    graphs: Graphs = Graphs()
    other_stages: tuple[StepClock, ...] = ()
    # Cached expectations of engines/common/speed/expectation.py.
    speeds: dict[tuple[float, ...], Speed] = field(default_factory=dict, init=False, repr=False)
    _step_seconds: dict[tuple[float, ...], float] = field(
        default_factory=dict, init=False, repr=False
    )

    def decode_s(self, requests: float, context: float) -> float:
        """The seconds of a decoding step. Each of several stages has its part of the requests, and
        a token passes through all of them."""
        key = requests, context
        if key not in self._step_seconds:
            self._step_seconds[key] = self._decode_s(requests, context)
        return self._step_seconds[key]

    def prompts_s(self, count: float, length: float, limit: int) -> float:
        """Batches pass through the stages one after the other."""
        key = count, length, limit
        if key not in self._step_seconds:
            self._step_seconds[key] = self._prompts_s(count, length, limit)
        return self._step_seconds[key]

    def _prefill_s_while_decoding(
        self, count: float, length: float, limit: int, requests: float, beside_s: float
    ) -> float:
        """Seconds for prompts in steps that decode a token of this many requests too, which takes
        `beside_s` of the GPU."""
        tokens = count * length
        is_without_graphs = min(float(limit), tokens) + requests > self.graphs.prompts
        slowest_s = max(clock.launched_s for clock in (self, *self.other_stages))
        launched_s = max(1.0, tokens / limit) * slowest_s if is_without_graphs else 0.0
        return max(self._prompts_s(count, length, limit, is_launched=False) + beside_s, launched_s)

    def _decode_s(self, requests: float, context: float) -> float:
        stages = self.work.pp
        part = max(1.0, requests / stages)
        seconds = [clock.step_s(part, context) for clock in (self, *self.other_stages)]
        # One request passes through all stages; with several requests the slowest stage sets the
        # pace.
        decode_s = sum(seconds) if self.other_stages else stages * seconds[0]
        passing_s = stages * max(seconds) * self._wait_factor if requests > 1 else decode_s
        return passing_s + (stages - 1) * self.table.stage_s + self._crossing_time_s(part)

    def step_s(self, requests: float, context: float) -> float:
        """The seconds of a step in this stage, for this many requests."""
        seconds = self._products_s(requests, requests)
        if not self.graphs.steps:
            # Small steps begin when the CPU has the tokens of the one before, so that launching and
            # computing add up.
            seconds += self.launched_s
        elif requests > self.graphs.steps:
            seconds = max(seconds, self.launched_s)
        for reading in self.work.readings:
            memory = (
                self.machine.memory
                * (
                    self.table.eight_bit_cache if reading.has_8_bit_cache else self.table.attention
                ).memory
            )
            read_bytes = reading.token_bytes * reading.visible_tokens(context) + reading.state_bytes
            seconds += requests * max(
                read_bytes / memory,
                reading.flops * reading.visible_tokens(context) / self._attention_flops(reading),
            )
        # The engine's own programs prepare a step while the GPU computes the one before.
        return max(seconds, self.table.step_s + self.table.request_s * requests)

    def _prompts_s(
        self, count: float, length: float, limit: int, *, is_launched: bool = True
    ) -> float:
        """Seconds for `count` prompts of `length` tokens in batches of `limit` tokens at most."""
        tokens = count * length
        batch = min(float(limit), tokens)
        batches = tokens / batch
        logits = max(1.0, batch / length)
        clocks = (self, *self.other_stages)
        seconds = [clock.batch_s(batch, logits, is_launched=is_launched) for clock in clocks]
        computed_s = max(
            batches * stage_s + count * clock.pairs_s(length)
            for stage_s, clock in zip(seconds, clocks, strict=True)
        )
        crossed_s = self._crossing_time_s(batch)
        if crossed_s:
            # The network is a stage too.
            computed_s = max(computed_s, batches * crossed_s / self.machine.crossings)
        other_s = (
            sum(seconds) - max(seconds) if self.other_stages else (self.work.pp - 1) * seconds[0]
        )
        fill = other_s + (self.work.pp - 1) * self.table.stage_s + crossed_s
        return (
            computed_s * (self._wait_factor if batches > 1 else 1)
            + fill
            + count * self.table.admission_s
        )

    def batch_s(self, tokens: float, logits: float, *, is_launched: bool = True) -> float:
        """The seconds of a batch of prompts in this stage, without attention.

        is_launched: the CPU launches the kernels, and counts too where no graph does.
        """
        waited_s = self.launched_s if is_launched and tokens > self.graphs.prompts else 0.0
        return max(self._products_s(tokens, logits), self.table.step_s, waited_s)

    def pairs_s(self, length: float) -> float:
        """The seconds of a whole prompt's attention in this stage."""
        return sum(
            (reading.prompt_flops or reading.flops)
            * reading.pairs(length)
            / self._attention_flops(reading)
            for reading in self.work.readings
        )

    def total_per_s(
        self, requests: float, prompt_tokens: float, answer_tokens: float, limit: int
    ) -> float:
        """Tokens/s of this many concurrent requests, each of which reads a prompt of
        `prompt_tokens` and writes `answer_tokens`.

        Requests keep together: their prompts are computed in steps as full as may be, then their
        answers token by token.
        """
        seconds = answer_tokens * self.decode_s(
            requests, prompt_tokens + answer_tokens / 2
        ) + self.prompts_s(requests, prompt_tokens, limit)
        return requests * answer_tokens / (seconds + self.table.request_overhead_s)

    def mixed_tokens_per_s(
        self, requests: float, prompt_tokens: float, answer_tokens: float, limit: int
    ) -> float:
        """Tokens per second of requests of unlike lengths, each of which begins as another ends:
        prompts are computed few at a time."""
        steps = min(requests, answer_tokens)  # those that compute prompts
        decode_s = self.decode_s(requests, prompt_tokens + answer_tokens / 2)
        if self.table.has_separate_prefill:
            seconds = answer_tokens * decode_s + steps * self.prompts_s(
                requests / steps, prompt_tokens, limit
            )
        else:
            # A step that computes a prompt too reads weights once.
            beside_s = max(0.0, decode_s - self.decode_s(1, 1))
            seconds = (answer_tokens - steps) * decode_s + steps * self._prefill_s_while_decoding(
                requests / steps, prompt_tokens, limit, requests, beside_s
            )
        return requests * answer_tokens / (seconds + self.table.request_overhead_s)

    def first_token_s(self, prompt: int, limit: int) -> float:
        return self.table.request_overhead_s + self.prompts_s(1, prompt, limit)

    def _products_s(self, tokens: float, logits: float) -> float:
        """Seconds of all products except attention, in one stage.

        Reading and multiplying overlap: the longer of both counts. logits: tokens whose successor
        is wanted.
        """
        work = self.work
        table = self.table
        seconds = 0.0
        gathered_tokens = self._tokens_of_all_groups(tokens)
        for product, (memory, flops, least_s) in zip(
            work.products, self._product_rates, strict=True
        ):
            # A layer that costs all tokens the same needs no question: most layers are such, and
            # this is the innermost loop of planning.
            count = tokens
            read_bytes = product.bytes
            limit = 1.0
            if product.experts:
                count = gathered_tokens
                read_bytes = product.bytes_of_step(gathered_tokens)
                limit = product.busiest(gathered_tokens)
            seconds += max(
                (read_bytes + product.passed_bytes * count) / memory,
                product.flops * count * limit / flops,
                product.layers * least_s,
            )
        memory, flops, _ = self._head_rates
        seconds += max(work.head.bytes / memory, work.head.flops * logits / flops) / work.pp
        seconds += work.all_reduce_count * self._reduce_s(tokens) + work.layers * table.layer_s
        if work.dp > 1:
            seconds += work.expert_layers * self._exchange_s(gathered_tokens)
        return seconds

    def _crossing_time_s(self, tokens: float) -> float:
        """Seconds in which this many tokens pass all borders of stages that lie between nodes.

        Hidden states and residuals: make_empty_intermediate_tensors in
        vllm/model_executor/models/llama.py.
        """
        wire = self.machine.between_nodes
        if wire is None or not self.machine.crossings:
            return 0.0
        message_s = wire.latency_s + 2 * tokens * self.work.hidden_bytes / wire.bytes_s
        return self.machine.crossings * message_s

    def _tokens_of_all_groups(self, tokens: float) -> float:
        """Tokens that meet in the layers with experts, where each group of ranks has this many. A
        lone request has no company."""
        return tokens * self.work.dp if tokens > 1 else tokens

    def _exchange_s(self, tokens: float) -> float:
        """Seconds in which all ranks get all tokens, and the sums of their experts come back: an
        all-gather and a reduce-scatter, which are the halves of an all-reduce."""
        wire = self.machine.between_nodes or self.machine.wire
        ranks = self.work.tp * self.work.dp
        return 0.0 if wire is None else wire.all_reduce_s(ranks, tokens * self.work.hidden_bytes)

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of one all-reduce."""
        wire = self.machine.wire
        tp = self.work.tp
        if tp == 1 or wire is None:
            return 0.0
        return wire.all_reduce_s(tp, tokens * self.work.hidden_bytes)

    def _rates(self, product: Product) -> _KernelRates:
        """The rates that the kernel of these layers reaches."""
        part = self.table.part(product.kernel, has_experts=product.experts > 0)
        flops = self.machine.flops
        peak = flops.get(product.number_format) or flops.get("bfloat16") or flops["float16"]
        return _KernelRates(self.machine.memory * part.memory, peak * part.flops, part.least_s)

    @property
    def _wait_factor(self) -> float:
        """The factor by which stages at work keep each other waiting, as their work is never
        equally long."""
        return 1 + self.table.stage_wait * (self.work.pp > 1)

    @cached_property
    def _product_rates(self) -> list[_KernelRates]:
        return [self._rates(product) for product in self.work.products]

    @cached_property
    def _head_rates(self) -> _KernelRates:
        return self._rates(self.work.head)

    def _attention_flops(self, reading: AttentionWork) -> float:
        part = (
            self.table.eight_bit_cache if reading.has_8_bit_cache else self.table.attention
        ).flops
        return (
            self.machine.flops["bfloat16"]
            * part
            * (self.table.narrow_head_share if reading.is_narrow else 1.0)
        )

    @cached_property
    def launched_s(self) -> float:
        """The seconds of the CPU, which launches kernel by kernel where there are no graphs. A
        layer of experts takes more kernels than others."""
        work = self.work
        table = self.table
        expert_s = max(
            (
                table.part(product.kernel, has_experts=True).launch_s
                for product in work.products
                if product.experts
            ),
            default=0.0,
        )
        plain_s = (work.layers - work.expert_layers) * table.eager_layer_s
        return (plain_s + work.expert_layers * expert_s) * self.machine.launch
