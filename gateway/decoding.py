"""The errors of msgspec for bytes that another process wrote."""

from __future__ import annotations

import msgspec

# Bytes in no form of the format, a text that is not UTF-8, and values that are nested too deeply.
# Every reader of a client's or an engine's bytes handles all three.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
