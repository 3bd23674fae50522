"""A second of sound, and the form that sends it to an engine for transcription."""

from __future__ import annotations

import io
import math
import struct
import wave

RATE = 16_000
BOUNDARY = b"fitserve-sound"
_PITCH_HZ = 440
_LOUDNESS = 8_000


def tone() -> bytes:
    """A tone of a second as a WAV file: mono, 16 bits, 16 kHz."""
    waves = (int(_LOUDNESS * math.sin(2 * math.pi * _PITCH_HZ * at / RATE)) for at in range(RATE))
    file = io.BytesIO()
    with wave.open(file, "wb") as sound_file:
        sound_file.setnchannels(1)
        sound_file.setsampwidth(2)
        sound_file.setframerate(RATE)
        sound_file.writeframes(b"".join(struct.pack("<h", sample) for sample in waves))
    return file.getvalue()


def form(model: str, samples: bytes, tokens: int) -> bytes:
    """The multipart body of a request to /v1/audio/transcriptions for at most this many tokens.

    Without a limit a model may repeat itself over a tone until its context is full. The field is
    vLLM's (entrypoints/openai/speech_to_text/protocol.py of 0.18.0); SGLang has none.
    """
    parts = (
        (b'name="model"', model.encode()),
        (b'name="response_format"', b"json"),
        (b'name="max_completion_tokens"', b"%d" % tokens),
        (b'name="file"; filename="tone.wav"\r\ncontent-type: audio/wav', samples),
    )
    lines = [
        b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (BOUNDARY, head, content)
        for head, content in parts
    ]
    return b"".join(lines) + b"--%b--\r\n" % BOUNDARY
