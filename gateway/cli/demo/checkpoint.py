"""A tiny, valid Llama checkpoint that answers with a known sentence.

The checkpoint is a complete Hugging Face model folder: configuration, weights and tokenizer. The
standard library is enough to write it, and every machine writes the same bytes.

Every layer computes attention and MLP on pseudo-random weights, so a server does all the real work
and fills a real KV cache. Both output projections are zero and add nothing to the residual stream,
so the output head sees the embedding of the last token.

This embedding is the Walsh code of the token that must follow, and the rows of the head are the
same codes. The following token scores ``TOP_LOGIT``, the end token a little over 0, white space a
little less, and every other token exactly 0. With a grammar, the answer therefore ends as soon as
the grammar allows, instead of continuing with white space.

Any prompt is answered with ``SENTENCE``, repeated until the length limit. With ``stop=True`` the
sentence occurs once, and the end-of-sequence token closes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gateway.cli.demo.tokenizer import (
    BOS,
    EOS,
    SENTENCE,
    SPACES,
    TURN,
    tokenizer,
    tokenizer_config,
    vocabulary,
)

__all__ = ["SENTENCE", "ModelShape", "make_model"]

TOP_LOGIT = 20.0
CODE_LENGTH = 64  # of the Walsh codes; the hidden size is a multiple of it


class ModelShape(NamedTuple):
    """The sizes that decide the memory of a model. intermediate: of the MLP; 0: twice `hidden`.

    The heads need not add up to ``hidden``: a model with small weights can have the KV cache of a
    large one. Attention kernels take only some head sizes. vLLM for CPUs takes 32, 64, 80, 96, 112,
    128, 160, 192, 224, 256 and 512. With any other size the first request fails, not the start.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 0
    max_len: int = 2048

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in a bfloat16 KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def inner(self) -> int:
        """The size of the MLP."""
        return self.intermediate or 2 * self.hidden

    def check(self) -> None:
        """Check that the sizes give a valid model. Raises ValueError."""
        if min(self.layers, self.heads, self.kv_heads, self.max_len) < 1:
            raise ValueError("layers, heads, kv_heads and max_len must be at least 1")
        if self.hidden < CODE_LENGTH or self.hidden % CODE_LENGTH:
            raise ValueError(f"hidden must be a multiple of {CODE_LENGTH}, not {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")


TINY = ModelShape()


def make_model(
    path: Path,
    shape: ModelShape = TINY,
    *,
    stop: bool = False,
    thinks: bool = False,
) -> ModelShape:
    """Write the checkpoint into the folder ``path``, which is created if needed.

    stop: answer with the sentence once.
    thinks: answer with ``TURN`` once, a thought and a call of the tool ``get_weather``.

    Raises ValueError for an invalid shape.
    """
    shape.check()
    vocab, words = vocabulary(TURN if thinks else SENTENCE)
    if len(words) > CODE_LENGTH - 2:
        raise ValueError("the sentence has more words than there are codes")
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _config(shape, vocab))
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": vocab[BOS], "eos_token_id": vocab[EOS], "pad_token_id": vocab[EOS]},
    )
    _write_json(path / "tokenizer.json", tokenizer(vocab))
    _write_json(path / "tokenizer_config.json", tokenizer_config(shape.max_len, vocab))
    _write_safetensors(path / "model.safetensors", _tensors(shape, vocab, words, stop or thinks))
    return shape


# --- model -------------------------------------------------------------------


def _config(shape: ModelShape, vocab: dict[str, int]) -> dict[str, Any]:
    """The `config.json` of the demo's model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
        "pad_token_id": vocab[EOS],
        "torch_dtype": "bfloat16",
    }


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    data: bytes  # bfloat16, little-endian


def _tensors(
    shape: ModelShape, vocab: dict[str, int], words: list[int], stop: bool
) -> Iterator[_Tensor]:
    """The tensors of a model whose answer to every prompt is `words`, in this order."""
    hidden = shape.hidden
    inner_size = shape.inner
    query_size = shape.heads * shape.head_dim
    kv_size = shape.kv_heads * shape.head_dim

    follower = dict.fromkeys(vocab.values(), words[0])
    follower.update(pairwise(words))
    outputs = list(words)
    if stop:
        follower[words[-1]] = vocab[EOS]
        outputs.append(vocab[EOS])
    # Code 0, all ones, is left out: the mean of any row would leak into it.
    code = {token: number for number, token in enumerate(outputs, start=1)}

    yield _Tensor(
        "model.embed_tokens.weight",
        (len(vocab), hidden),
        b"".join(_code_row(code[follower[token]], hidden, 1.0) for token in range(len(vocab))),
    )
    rows = {vocab[symbol]: _sum_row([*code.values()], hidden, -1.0 / hidden) for symbol in SPACES}
    rows[vocab[EOS]] = _sum_row([*code.values()], hidden, 1.0 / hidden)
    rows |= {token: _code_row(number, hidden, TOP_LOGIT / hidden) for token, number in code.items()}
    yield _Tensor(
        "lm_head.weight",
        (len(vocab), hidden),
        b"".join(rows.get(token, bytes(2 * hidden)) for token in range(len(vocab))),
    )
    yield _ones_tensor("model.norm.weight", hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield _ones_tensor(f"{prefix}.input_layernorm.weight", hidden)
        yield _ones_tensor(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield _noise_tensor(f"{prefix}.self_attn.q_proj.weight", query_size, hidden)
        yield _noise_tensor(f"{prefix}.self_attn.k_proj.weight", kv_size, hidden)
        yield _noise_tensor(f"{prefix}.self_attn.v_proj.weight", kv_size, hidden)
        yield _zeros_tensor(f"{prefix}.self_attn.o_proj.weight", hidden, query_size)
        yield _noise_tensor(f"{prefix}.mlp.gate_proj.weight", inner_size, hidden)
        yield _noise_tensor(f"{prefix}.mlp.up_proj.weight", inner_size, hidden)
        yield _zeros_tensor(f"{prefix}.mlp.down_proj.weight", hidden, inner_size)


def _bfloat16(value: float) -> bytes:
    """The two bytes of ``value``, cut to bfloat16: the upper half of a float32."""
    return struct.pack("<f", value)[2:]


def _code_row(number: int, hidden: int, scale: float) -> bytes:
    """Walsh code ``number``, repeated to ``hidden`` values of plus or minus ``scale``."""
    signs = (_bfloat16(scale), _bfloat16(-scale))
    row = b"".join(signs[(number & column).bit_count() & 1] for column in range(CODE_LENGTH))
    return row * (hidden // CODE_LENGTH)


def _sum_row(numbers: list[int], hidden: int, scale: float) -> bytes:
    """The sum of these Walsh codes times ``scale``: each code scores ``scale * hidden`` with it."""
    signs = (
        [1 - 2 * ((number & column).bit_count() & 1) for number in numbers]
        for column in range(CODE_LENGTH)
    )
    return b"".join(_bfloat16(scale * sum(column)) for column in signs) * (hidden // CODE_LENGTH)


def _ones_tensor(name: str, size: int) -> _Tensor:
    return _Tensor(name, (size,), _bfloat16(1.0) * size)


def _zeros_tensor(name: str, rows: int, columns: int) -> _Tensor:
    return _Tensor(name, (rows, columns), bytes(2 * rows * columns))


# The upper byte of a bfloat16 is its sign and most of its exponent. 0x3C and 0xBC with any lower
# byte are the values from 1/128 to 1/32 of either sign.
_SMALL_EXPONENT = bytes(0x3C | (byte & 0x80) for byte in range(0x100))


def _noise_tensor(name: str, rows: int, columns: int) -> _Tensor:
    """Small pseudo-random values that depend only on the tensor's name."""
    count = rows * columns
    stream = hashlib.shake_128(name.encode()).digest(2 * count)
    data = bytearray(2 * count)
    data[0::2] = stream[:count]
    data[1::2] = stream[count:].translate(_SMALL_EXPONENT)
    return _Tensor(name, (rows, columns), bytes(data))


# --- files -------------------------------------------------------------------


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: Iterator[_Tensor]) -> None:
    """Write the safetensors format: header length, JSON header, then the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks: list[bytes] = []
    offset = 0
    for tensor in tensors:
        end = offset + len(tensor.data)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        blocks.append(tensor.data)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.writelines(blocks)


def _main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a tiny Llama checkpoint that speaks one sentence."
    )
    parser.add_argument("path", type=Path)
    for name, size in ModelShape()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--stop", action="store_true", help="end the answer after one sentence")
    parser.add_argument("--thinks", action="store_true", help="think, and call a tool")
    options = vars(parser.parse_args())
    shape = ModelShape(**{name: options[name] for name in ModelShape._fields})
    make_model(options["path"], shape, stop=options["stop"], thinks=options["thinks"])


if __name__ == "__main__":
    _main()
