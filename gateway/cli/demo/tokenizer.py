"""The tokenizer of the tiny model: a token for every byte and for each word of its sentence."""

from __future__ import annotations

import re
from typing import Any

SENTENCE = (
    "This tiny model knows one sentence and repeats it, word by word, for as long as it is asked"
    " to.\n"
)

BOS = "<|begin|>"
EOS = "<|end_of_text|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, END)
# The answer of the thinking model to any prompt: a thought, then a tool call in Hermes form. The
# tags of the thought are tokens that stay in the text.
THINK = ("<think>", "</think>")
THOUGHT = "They ask for the weather, and there is a tool."
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}'
TURN = f"{THINK[0]}{THOUGHT}{THINK[1]}<tool_call>\n{CALL}\n</tool_call>"

_TOOLS = (
    "{% if tools %}{{ '<|system|>Tools: ' + tools | tojson + ' Call one as <tool_call>{\"name\":"
    ' NAME, "arguments": ARGUMENTS}</tool_call>.<|end|>\' }}{% endif %}'
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    f"{_TOOLS}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# This template has a switch for thoughts, like that of Qwen3.
THINKING_TEMPLATE = (
    CHAT_TEMPLATE
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}{{"
    " '<think></think>' }}{% endif %}"
)


def _byte_alphabet() -> dict[int, str]:
    """The visible character that stands for each byte in a byte-level tokenizer."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet: dict[int, str] = {}
    spare = 0x100
    for byte in range(0x100):
        if byte in visible:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(spare)
            spare += 1
    return alphabet


# White space of JSON, by the characters that stand for its bytes.
SPACES = tuple(_byte_alphabet()[byte] for byte in b" \t\n\r")


def vocabulary(sentence: str = SENTENCE) -> tuple[dict[str, int], list[int]]:
    """The vocabulary, and the ids of the sentence's words in their order.

    Text is read byte by byte. There are no merges, so word tokens occur only in output. A token
    has one follower, so a repeated word gets a second token together with the word after it.
    """
    alphabet = _byte_alphabet()
    vocab = {symbol: byte for byte, symbol in alphabet.items()}
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    words: list[int] = []
    for piece in _pieces(sentence):
        symbol = "".join(alphabet[byte] for byte in piece.encode())
        if symbol in vocab:
            raise ValueError(f"{piece!r} would need two followers")
        vocab[symbol] = len(vocab)
        words.append(vocab[symbol])
    return vocab, words


def _pieces(sentence: str) -> list[str]:
    """The words of the sentence; a repeated word grows until its piece is new."""
    pieces: list[str] = []
    pending = ""
    for word in re.findall(r"</?think>|\s?(?:(?!</?think>)\S)+\n?", sentence):
        pending += word
        if len(pending) > 1 and pending not in pieces:
            pieces.append(pending)
            pending = ""
    if pending:
        raise ValueError("the sentence ends in words that it has already used")
    return pieces


def tokenizer(vocab: dict[str, int]) -> dict[str, Any]:
    """The `tokenizer.json` of a vocabulary without merges."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in (*SPECIAL_TOKENS, *THINK)
            if token in vocab
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def tokenizer_config(max_len: int, vocab: dict[str, int]) -> dict[str, Any]:
    tags = {
        str(vocab[token]): {"content": token, "special": False} for token in THINK if token in vocab
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": THINKING_TEMPLATE if tags else CHAT_TEMPLATE,
        **({"added_tokens_decoder": tags} if tags else {}),
    }
