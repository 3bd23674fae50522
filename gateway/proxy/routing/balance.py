"""Which replica a call goes to: arithmetic over the outstanding tokens, nothing else.

Each call weighs as many tokens as it may cost (`weigh`). Of the replicas whose outstanding tokens
are at most BOUND times the mean, the one is taken to which the beginning of the prompt hashes: what
was asked there before is in that engine's KV cache. Since the least loaded one is never above the
mean, there is always one, and a prompt that everybody sends fills no engine more than that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec import Raw

from gateway.proxy.api.protocol import RequestFields

BOUND = 1.25
# What an answer costs that nobody set a limit for; and the most that one call counts, for limits
# are often set to be safe and an image in base64 is no text.
USUAL_TOKENS = 512
MOST_TOKENS = 32_768
BYTES_PER_TOKEN = 4
# A shorter beginning fills few blocks of a KV cache, which are not worth an uneven load.
LEAST_BYTES = 256
# How far the messages are searched for the first answer, and how much of a plain text counts as its
# beginning.
MESSAGES_BYTES = 64 * 1024
TEXT_BYTES = 1024
_END_BYTES = 512
_ODD = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1


def weigh(asked: RequestFields, size: int) -> int:
    """Tokens that a JSON body of `size` bytes may cost: of the prompt, and of the answer that it
    asks for."""
    answer = USUAL_TOKENS
    for limit in (asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens):
        if limit and (digits := bytes(limit)).isdigit():
            answer = int(digits[:9])
            break
    return min(size // BYTES_PER_TOKEN + answer, MOST_TOKENS)


def prefix(asked: RequestFields) -> int | None:
    """A number for what the turns of one conversation begin with: the instructions, and the
    messages up to the first answer. The same
    in every process. None where that is too short to matter."""
    key = 0
    length = 0
    for raw in (asked.system, asked.instructions, asked.messages, asked.prompt, asked.input):
        if raw:
            lead = _lead(raw)
            length += len(lead)
            if len(lead) > 2 * _END_BYTES:
                # Both ends tell a long text from other texts; to hash its middle too would cost
                # more than it helps.
                lead = lead[:_END_BYTES] + lead[-_END_BYTES:]
            key = zlib.crc32(lead, key)
    return key ^ length if length >= LEAST_BYTES else None


def _lead(raw: Raw) -> bytes:
    lead = bytes(raw) if len(raw) <= MESSAGES_BYTES else bytes(memoryview(raw)[:MESSAGES_BYTES])
    if not lead.startswith(b"["):
        return lead[:TEXT_BYTES]
    # In a string the quotes would be escaped.
    answered = lead.find(b'"assistant"')
    if answered >= 0:
        return lead[: lead.rfind(b"{", 0, answered)].rstrip(b" \n\r\t,")
    return lead.rstrip(b" \n\r\t]")


def least(loads: Sequence[int], turns: Sequence[int]) -> int:
    """The position of the least loaded replica; among equals, of the replica that was picked
    longest ago."""
    return min(range(len(loads)), key=lambda position: (loads[position], turns[position]))


def affine(loads: Sequence[int], seeds: Sequence[int], tokens: int, key: int) -> int:
    """The position of the replica for a call of so many tokens whose prompt begins with `key`.

    `loads`: outstanding tokens; `seeds`: a number per replica that stays. Rendezvous hashing: a
    replica that comes or goes moves only the prompts that are, or were, its own.
    """
    bound = BOUND * (sum(loads) + tokens) / len(loads)
    best = most = -1
    for position, load in enumerate(loads):
        if load <= bound:
            mixed = key ^ seeds[position]
            rank = mixed * mixed * _ODD & _64_BITS
            if rank > most:
                best, most = position, rank
    return best
