"""A fast filter of a log's bytes: most of a long log is never decoded. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.diagnosis.lines.repetition import RepetitionFilter

_BLOCK_BYTES = 64 * 1024
_HEAD_LINES = 60
_TAIL_LINES = 6

# A line without any of these proves no failure. The filter searches bytes, a block at a time.
FATAL_WORDS = (
    b"atal",
    b"hit an exc",
    b"xit code",
    b"NVRM",
    b"NVSwitch",
    b"XidCrit",
    b"amdgpu",
    b"raylet",
    b"ption in thread",
    b"atchdog",
    b"hut",
    b"SIG",
    b"ssertion failed",
    b"] Assertion `",
    b": Assertion `",
    b"DeepEP ",
    b"CUresult err",
    b"raceback (",
    b"DeadError",
    b"already dead",
    b"terminating server",
    b"task failed",
    b"sigquit",
    b"warmup err",
    b"died",
    b"is dead",
    b"to bind on",
    b"handler failed",
    b"Segfault enc",
    b"aught signal",
    b"terminate ca",
    b"yspy dump",
    b"broadcast block",
    b"ransfer failed",
    b"TransferError",
)
# Answers with status 500: the web server's phrase, as no anchor has a digit.
STATUS_WORDS = (b"Internal Server Error",)
_TRACE_WORDS = (b"rror", b"xception", b"raceback", b'File "', b"terminat", b"OutOfResources")
_BARE_WORDS = (
    b"ERROR",
    b"CRITICAL",
    b"ailed",
    b"NCCL",
    b"is lost",
    b"Killed",
    b"OOM",
    b"Seg",
    b"core dumped",
)
ALARM_WORDS = (*(word for word in FATAL_WORDS if b"xc" not in word), *_TRACE_WORDS, *_BARE_WORDS)
# Lines with one of these show the progress of a start, or a choice of the engine.
_PHASE_WORDS = (
    b"oad",
    b"KV ",
    b"emory pool",
    b"aptur",
    b"ompil",
    b"bytecode",
    b"startup",
    b"fired up",
    b"Profiling",
    b"init engine",
    b"world_size=",
    b"nccl==",
    b"nit torch dist",
    b"tensors:",
    b"eepGEMM",
    b"utotun",
    b"infer.jit",
)
# Each copy of these lines counts: their figures show whether the engine answered.
SERVING_WORDS = (b"Received req", b"POST /", b"throughput", b" batch")
_SETTING_WORDS = (b"Selected ", b"Using ", b"Initializing a", b"non-default args", b"server_args=")
# Lines with one of these describe the machine, or the model (profiles/failures/circumstances.yaml).
_MACHINE_WORDS = (
    b"esolved arch",
    b"WSL",
    b"microsoft-standard",
    b"dxgk",
    b"NVIDIA GB",
    b"DGX Spark",
    b"NVIDIA Thor",
    b"etson",
    b"NvMap",
    b"nified memory",
    b"sm_",
    b"uMem",
    b"expandable_seg",
    b"VLLM_ROCM",
    b"ncoder cache",
)
PROGRESS_WORDS = (*_PHASE_WORDS, *SERVING_WORDS, *_SETTING_WORDS, *_MACHINE_WORDS)
# The levels alone say that a line complains, and not the subject.
_LEVELS = (b"ERROR", b"CRITICAL")
_KEYWORDS = tuple(
    word
    for word in (*FATAL_WORDS, *_TRACE_WORDS, *_BARE_WORDS, *PROGRESS_WORDS)
    if word not in _LEVELS
)
# The lost ends of line in a log that is one line, because a page, form or program dropped them or
# wrote them out. An exception alone begins no line, as sentences quote exceptions.
_LINE_END = re.compile(
    rb"\\r?\\n"
    rb"|(?<=\S) (?=(?:\(\w{1,40} (?:\w+=\d+ ?)+\) )*(?:ERROR|WARNING|INFO) \d\d-\d\d"
    rb" \d\d:|\[\d{4}-\d\d-\d\d \d\d:)"
    rb'| (?=Traceback \(most|File "[^"]{1,300}", line \d)'
)
_EXCEPTION_START = re.compile(rb" (?=(?:\w{1,40}\.){0,8}\w{1,40}(?:Error|Exception): )")


class LineFilter:
    """Splits the bytes of a log into lines, and calls `handle` with each line that may matter.

    number: the number of lines so far, with those that were skipped.
    anchors: a line without any of these is skipped.
    attend: the number of next lines that are never skipped, as they belong to the last one.
        `handle` may change the last two.
    can_match: whether a line has a part of any known text.
    """

    def __init__(
        self,
        handle: Callable[[bytes], None],
        can_match: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self.number = 0
        # A paste of a few lines is read whole, as it can have a known text without any anchor.
        self.attend = _HEAD_LINES
        self.anchors: tuple[bytes, ...] = ALARM_WORDS + PROGRESS_WORDS
        self._handle = handle
        self._unfinished_line = b""
        self._skips_line = False
        self._end = b""
        self._handed_count = 0
        self._can_match = can_match
        self._repetition = RepetitionFilter(self._has_keyword)
        self._telling = _KEYWORDS
        """The words of the block that may matter."""
        self._anchor = b""
        """The last anchor that was found: it stands in most lines of a flood."""

    def feed(self, piece: bytes) -> None:
        """Read bytes of the log, cut anywhere."""
        for start in range(0, len(piece), _BLOCK_BYTES):
            block = self._unfinished_line + piece[start : start + _BLOCK_BYTES]
            end = block.rfind(b"\n") + 1
            if end == len(block) and self.number == 0 and block.count(b"\n") == 1:
                end = 0  # the next line shows whether it is the only one
            self._unfinished_line = block[end:]
            if end:
                self._filter_block(block[:end])
            if len(self._unfinished_line) > _BLOCK_BYTES:
                # A line without end: its beginning is handled, the rest is dropped.
                self._unfinished_line, beginning = b"", self._unfinished_line
                is_whole = beginning.endswith(b"\n")
                self._filter_block(
                    beginning if is_whole else beginning + b"\n", is_cut=not is_whole
                )

    def close(self) -> None:
        """End the log, maybe in the middle of a line."""
        if self._unfinished_line:
            self._unfinished_line = self._unfinished_line.removesuffix(b"\n")
            if self.number == 0 and _LINE_END.search(self._unfinished_line):
                self._unfinished_line = _EXCEPTION_START.sub(
                    b"\n", _LINE_END.sub(b"\n", self._unfinished_line)
                )
                # Its parts are one line of the log.
                for part in self._unfinished_line.split(b"\n"):
                    self.number = 0
                    self._filter_block(part + b"\n")
            else:
                self._filter_block(self._unfinished_line + b"\n")
            self._unfinished_line = b""
        self._last_lines()

    def _last_lines(self) -> None:
        """Handle the last lines without the filter, as a hanging engine says there why it waits."""
        lines = self._end[:-1].rsplit(b"\n", _TAIL_LINES)[-_TAIL_LINES:] if self._end else []
        total = self.number
        for self.number, raw in enumerate(lines, total - len(lines) + 1):
            if self.number > self._handed_count:
                self._handle(raw)
        self._end = b""
        self.number = total

    def read(self, raw: bytes) -> None:
        """Read one whole line."""
        self._filter_block(raw + b"\n")

    def _filter_block(self, block: bytes, *, is_cut: bool = False) -> None:
        """Keep the lines of a block that may matter, with their numbers."""
        if self._skips_line:
            self._skips_line, block = is_cut, block[block.find(b"\n") + 1 :]
            if not block:
                return
        ends = block.count(b"\n")
        self._end = (
            block
            if ends > _TAIL_LINES
            else b"\n".join((self._end + block).rsplit(b"\n", _TAIL_LINES + 1)[-_TAIL_LINES - 1 :])
        )
        if not self.attend and not is_cut and not _anchor_in(_distinct(block), self.anchors):
            self.number += ends
            return
        if self._repetition.is_flood:
            self._telling = tuple(word for word in _KEYWORDS if word in block)
        for number, raw in enumerate(block[:-1].split(b"\n"), self.number + 1):
            self.number = number
            if self.attend or self._holds(raw):
                block_lines = (
                    ((number, raw),)
                    if _anchor_in(raw, SERVING_WORDS)
                    else self._repetition.lines_to_read(
                        number, raw, is_continuation=self.attend > 0
                    )
                )
                for self.number, line in block_lines:
                    self.attend = max(0, self.attend - 1)
                    self._handed_count = self.number
                    self._handle(line)
        self._skips_line = is_cut

    def _has_keyword(self, raw: bytes) -> bool:
        return bool(_anchor_in(raw, self._telling)) or self._can_match(raw)

    def _holds(self, raw: bytes) -> bool:
        if not (self._anchor and self._anchor in raw and self._anchor in self.anchors):
            self._anchor = _anchor_in(raw, self.anchors)
        return bool(self._anchor)


def _distinct(block: bytes) -> bytes:
    """The distinct lines of a block without digits, as an engine can repeat a line for hours.

    No anchor has a digit.
    """
    return b"\n".join(set(block.translate(None, b"0123456789").split(b"\n")))


def _anchor_in(text: bytes, anchors: tuple[bytes, ...]) -> bytes:
    """The first anchor in a text; empty if there is none."""
    for anchor in anchors:
        if anchor in text:
            return anchor
    return b""
