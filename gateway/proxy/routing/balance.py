"""Choice of a replica for a call, by arithmetic over outstanding tokens.

Each call weighs the tokens that it may cost (`estimate_tokens`). Candidates are replicas with at
most BOUND times the mean of outstanding tokens. The beginning of the prompt hashes to one of them,
so the KV cache there probably holds that beginning. The least loaded replica is never above the
mean, so one always qualifies, and a popular prompt loads no engine beyond the bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec import Raw

from gateway.proxy.api.request_fields import RequestFields

BOUND = 1.25
# Cost of an answer without a limit, and the most tokens that one call counts. Limits are often set
# generously, and an image in base64 is not text.
USUAL_TOKENS = 512
MAX_TOKENS = 32_768
BYTES_PER_TOKEN = 4
# A shorter beginning fills few blocks of a KV cache, which do not justify an uneven load.
MIN_BYTES = 256
# Bytes of messages that are searched for the first answer, and bytes of a plain text that count as
# its beginning.
MESSAGES_BYTES = 64 * 1024
TEXT_BYTES = 1024
_END_BYTES = 512
_HASH_FACTOR = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1


def estimate_tokens(fields: RequestFields, size: int) -> int:
    """The tokens that a JSON body of `size` bytes may cost: of the prompt, and of the answer."""
    answer = USUAL_TOKENS
    for limit in (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens):
        if limit and (digits := bytes(limit)).isdigit():
            answer = int(digits[:9])
            break
    return min(size // BYTES_PER_TOKEN + answer, MAX_TOKENS)


def prefix(fields: RequestFields) -> int | None:
    """A number for the common beginning of one conversation: the instructions, and the messages up
    to the first answer. The same in every process; None if the beginning is short."""
    key = 0
    length = 0
    for raw in (fields.system, fields.instructions, fields.messages, fields.prompt, fields.input):
        if raw:
            lead = _lead(raw)
            length += len(lead)
            if len(lead) > 2 * _END_BYTES:
                # Both ends identify a long text. Hashing its middle too would cost more than it
                # helps.
                lead = lead[:_END_BYTES] + lead[-_END_BYTES:]
            key = zlib.crc32(lead, key)
    return key ^ length if length >= MIN_BYTES else None


def _lead(raw: Raw) -> bytes:
    lead = bytes(raw) if len(raw) <= MESSAGES_BYTES else bytes(memoryview(raw)[:MESSAGES_BYTES])
    if not lead.startswith(b"["):
        return lead[:TEXT_BYTES]
    # Within a string the quotes would be escaped.
    answer_at = lead.find(b'"assistant"')
    if answer_at >= 0:
        return lead[: lead.rfind(b"{", 0, answer_at)].rstrip(b" \n\r\t,")
    return lead.rstrip(b" \n\r\t]")


def least_loaded_position(loads: Sequence[int], turns: Sequence[int]) -> int:
    """The position of the least loaded replica; among equals, of the one picked longest ago."""
    return min(range(len(loads)), key=lambda position: (loads[position], turns[position]))


def pick_by_prefix(loads: Sequence[int], seeds: Sequence[int], tokens: int, key: int) -> int:
    """The position of the replica for a call of `tokens` whose prompt begins with `key`.

    loads: outstanding tokens.
    seeds: a constant number per replica.

    Rendezvous hashing: a new or removed replica moves only its own prompts.
    """
    bound = BOUND * (sum(loads) + tokens) / len(loads)
    best_position = best_rank = -1
    for position, load in enumerate(loads):
        if load <= bound:
            mixed = key ^ seeds[position]
            rank = mixed * mixed * _HASH_FACTOR & _64_BITS
            if rank > best_rank:
                best_position = position
                best_rank = rank
    return best_position
