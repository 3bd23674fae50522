"""Forms of log lines that do not depend on the failure: exceptions, frames, wrappers. Pure."""

from __future__ import annotations

import re

from gateway.diagnosis.lines.pattern_index import IndexedPattern

EXCEPTION = re.compile(
    r"(?:\w+\.)*(?P<name>\w*(?:Error(?:_\w+)?|Exception|Exit|Interrupt|Expired|OutOfResources"
    r"|CompilerFailed|IsEnabled|(?<=[a-z])Timeout)"
    # A class in a library's module of exceptions can have any name.
    r"|(?:(?<=\.exc\.)|(?<=\.exceptions\.)|(?<=\.errors\.)|(?<=\.error\.)"
    r"|(?<=\.symbolic_shapes\.))[A-Z]\w+)"
    r"(?:: ?|\((?=['\"])|$)"
)
# An exception in the middle of a line, as people quote it: `ValueError: ...`.
QUOTED_EXCEPTION = IndexedPattern(
    r"(?:[`'\"(:*]|\s)(?:\w+\.)*(?P<name>[A-Z]\w*(?:Error|Exception)): (?P<message>.+)"
)
# Terminals break lines, so the end may be missing. In a quote the beginning may be missing.
FRAME = re.compile(
    r'(?P<indent>\s*)(?:File "|(?=[\w./-]+\.py", line \d))(?P<file>[^"]+)(?:", line \d+(?:, in'
    r" (?P<function>[\w<>.]+))?)?"
)
# Python's own messages by exception, because users often paste only the message.
_PYTHON = {
    "NameError": r"name '\w+' is not defined",
    "UnboundLocalError": (
        r"cannot access local variable|local variable '\w+' referenced before assignment"
    ),
    "AttributeError": r"(?:'[\w.]+' object|module '[\w.]+'|type object '\w+') has no attribute '",
    "TypeError": (
        r"expected string or bytes-like object|non-default argument '|'\w+' object (?:is not"
        r" (?:iterable|subscriptable|callable|an iterator)|does not support )|unsupported operand"
        r" type\(s\)"
        r"|'[<>=]+' not supported between instances of|[\w.]+\(\) (?:missing \d+ required|got an"
        r" unexpected keyword|got multiple values for|takes \d+ positional)"
    ),
    "ValueError": (
        r"(?:not enough|too many) values to unpack|invalid literal for int\(\)|could not convert"
        r" string to float"
    ),
    "IndexError": r"(?:list|tuple|string) index out of range|pop from empty list",
    "ModuleNotFoundError": r"No module named '",
    "ImportError": r"cannot import name '",
    "PermissionError": r"\[Errno 13\] ",
    "FileNotFoundError": r"\[Errno 2\] ",
    "ZeroDivisionError": r"(?:integer |float )?(?:division|modulo)(?: or modulo)? by zero",
    "RecursionError": r"maximum recursion depth exceeded",
    "KeyError": r"'[\w.]+'$",
}
PYTHON = re.compile("|".join(f"(?P<{name}>{text})" for name, text in _PYTHON.items()))
# Activities of an engine, no failures.
ACTIVITY = re.compile(
    r"\W*(?:(?:Load|Us|Download|Captur|Start|Initializ|Compil|Fetch|Wait|Runn|Creat|Sett|Read"
    r"|Resolv|Profil|Warm|Check|Pull)ing|Detected|Selected|Automatically)\b"
)
REQUEST_ID = re.compile(r"\b(?:rid|request_id|req_id)[=:] ?['\"]?(?P<id>[\w-]+)")
# A check in a kernel, as each thread prints it that failed.
KERNEL_CHECK = re.compile(
    r"block: \[[\d, ]{1,40}\], thread: \[[\d, ]{1,40}\],? Assertion `(?P<check>[^`]{1,200})` failed"
)
# The web server's line on a request that the server itself failed to answer.
FAILED_REQUEST = re.compile(r'(?:\S{1,80} )?- "POST /\S{0,200} HTTP/[\d.]+" 500\b')
# An error that the engine says it ignores.
TOLERATED_ERROR = re.compile(r"(?i)\berrors? ignored\b|\bignor(?:ed|ing) (?:\w+ ){0,2}error")
# The failure of a transfer that belongs to one request, as a serving engine reports it.
TRANSFER_FAILURE = re.compile(
    r"(?:\w+ ){0,3}[Tt]ransfer failed (?:for|of) (?:request|req)\b(?P<request>.{0,300}?)"
    r"(?:\b(?P<message>(?P<name>\w+Error)\b.*)|\Z)"
)
# A message in the middle of a line, in the quotes of code.
CODE = re.compile(r"`([^`]* [^`]*)`")
RAISE = re.compile(r"\s*raise (?:\w+\.)*(\w+)\(")
# The exception of an assert has no message. A notebook puts an arrow and a number before the line.
ASSERT = re.compile(r"\s*(?:-+> ?\d+ +)?(assert .+)")
# A known text in a line that is not an exception counts only if the line complains.
COMPLAINT = re.compile(
    r"ERROR|CRITICAL|rror\b|ailed|atal|llegal|out of memory|imeout|annot|unbalanced|too old|larger"
    r" than|Killed"
    r"|total capacity|allocated by PyTorch"
    r"|no(?:t (?:find|found|valid|supported|available)| module)"
    r"|not (?:\w+ )?support|nsupported|nvalid|nable"
    r" to|ismatch|denied|efused|issing|ncompatib|nrecognized|nexpected|do(?:es)? not|n't "
    r"|must |has no |only support|is not |restricted|(?:greater|less) than|exceed|never"
    r" |undefined|no longer|navailable|evicted|not permitted"
)
# A line without a level must be clearer: SGLang prints information so.
FAILURE_WORD = re.compile(r"rror\b|ailed|atal|xception|Killed|: Operation not permitted")
# An error by its level or its own words, not a text of a user about it.
ERROR_WORD = re.compile(
    r"ERROR|CRITICAL|\w(?:Error|Exception)\b|[Ff]ailed|Fatal|Killed|^\s*[Ee]rror:"
)
HARMLESS_TEXT = IndexedPattern(
    r"gnor|allback|falling back|retry|trying (?:port|another|next|again)|(?<!NCCL )warn(?!ing: CUDA"
    r" initialization)|deprecat|skip|disabled|Possible solution|^\d\. "
    # A task whose exception was never retrieved: its traceback follows.
    r"|^future: <\w+ finished"
    r"|defaulting|from now on|will not be applied|disabling|This might cause deadlock in"
    r" distributed execution"
    # Backends that vLLM rejected (vllm/platforms/cuda.py), and kubectl's default container.
    r"|Some attention backends are not valid|^Defaulted container "
    # SGLang's watchdog, which dumps idle processes.
    r"|^Pyspy "
    # A table of nvidia-smi, and an answer to a client.
    r"|NVIDIA-SMI \d|[\"']object[\"']: ?[\"']error"
    # vLLM's dump of its state at an error (vllm/logging_utils/dump_input.py).
    r"|^SchedulerStats\(|^Dumping |LLM engine \(v[\w.+]+\) with config:"
    # The end of a request, not of the engine.
    r"|\bfor request (?:<|\w+-)|Terminating request"
    # An Xid of an application. More serious ones have rows.
    r"|NVRM: (?:GPU at .{1,60} )?Xid "
    # Programs that wait for the engine report that it is not ready, and not why.
    r"|(?:Readiness|Liveness|Startup) probe|waiting for .{1,60} to be ready|dial tcp"
    r" (?:\[::1\]|127\.0\.0\.1|localhost):",
    re.IGNORECASE,
)
TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\)")
# The form may follow an activity or a progress bar of another process.
TRACEBACK_START = "Traceback (most recent call last):"
WRAPPER = re.compile(
    r"(?:[\w.]+: )?(?:(?:Engine core|WorkerProc) initialization failed|Engine process failed to"
    r" start|Frontend process failed during engine core|Executor failed|cancelled$"
    r"|EngineCore encountered an issue|Worker failed with error .*please check the stack trace"
    r" above for the root cause$"
    r"|Received sigquit from a child proces|SIGQUIT received\.|Scheduler or DataParallelController"
    r" \d+ terminated with|Cancelled by |Error executing method '\w+'\. This might cause deadlock)"
    r"|(?:[\w.]+\.)?(?:Async|MQ)?Engine(?:Dead|Generate)Error(?::|$)|ChildProcessError: worker"
    r" died$"
)
BENIGN_EXCEPTION = re.compile(
    r"(?:\w+\.)*(?:SystemExit|KeyboardInterrupt|CancelledError|BrokenPipeError"
    r"|ConnectionResetError|EOFError)(?::|$)"
    # multiprocessing's resource tracker, about names of processes that ended.
    r"|KeyError: '/(?:mp|psm|loky)[-_]"
    r"|(?:\w+\.)*ValueError: (?:Request is disconnected from the client side|This model's maximum"
    r" context length is \d+ tokens\. However, you requested)"
    # An answer to a client about its own request.
    r"|(?:openai\.)?(?:BadRequest|NotFound|UnprocessableEntity)Error: Error code: 4\d\d"
    # A request or answer that could not be read, which ends no engine.
    r"|(?:[\w.]+\.)?ValidationError: \d+ validation errors? for \w*(?:Request|Response)\b"
)
# A pipe to another process that ended before it answered, in the innermost frames of a traceback.
PIPE = re.compile(r"multiprocessing/connection\.py:_?recv")
# Lines outside of any message: commands with flags, variables, flags alone, code, and warnings of
# Python.
SIDE_NOTE = re.compile(
    r"(?:[\w ]{1,30}[:\uff1a])?[\s`$#>]*(?:[A-Z][A-Z_0-9]*=\S* )*(?:sudo |nohup |exec |uv run |CMD"
    r" |docker run |kubectl |export [A-Z]\w*="
    r"|\S*python[\d.]* (?:-\w+ )*-m \w|\S*(?:vllm|sglang) serve |torchrun )"
    r"|\w+ ="
    r" (?:\w+\.)*(?:LLM|SamplingParams|Auto(?:Tokenizer|Model\w*|Config)|Async\w*Engine"
    r"|\w*EngineArgs)\b"
    # A line of code, as rich draws it next to its number.
    r"|[│|]?\s*(?:❱ ?)?\d+ [│|] "
    r"|\s*--[a-z][\w-]+(?:[ =][^\s:]+)*\s*\\?$"
    r"|\S+\.py:\d+: (?:\w*Warning: (?!CUDA initialization)|.{0,40}unclean exit)"
)
# Frames of request code.
REQUEST = re.compile(
    r"starlette/|uvicorn/|fastapi/|vllm/entrypoints/(?!llm\.py)"
    r"|entrypoints/http_server\.py:(?!\w*warmup)"
)
# Frames of handlers, which no start calls.
HANDLER = re.compile(
    r"starlette/|fastapi/|uvicorn/protocols/|(?<!arg_groups)/(?:openai/protocol|serving_\w+"
    r"|\w+_tool_parser|\w+_reasoning_parser)\.py:(?!__init__\Z)|zmq/_future\.py:_chain\Z"
    r"|/chat_utils\.py:_?(?:parse_chat|postprocess)_\w+\Z"
    r"|zmq/sugar/socket\.py:recv_\w+\Z"
)
CAUSE_NOTE = re.compile(r"The above exception was the direct cause")
SHUTDOWN = re.compile(
    r"\[shutdown\] .{0,40}(?:shutdown triggered|trigger received signal)|SIGTERM"
    r" received\.|Received SIG(?:TERM|INT)\b|Shutting down$"
)
IGNORED_EXCEPTION = re.compile(
    r"Exception ignored in|Exception in thread|Task exception was never retrieved"
)
# Python's line on a process of the engine that ended with an exception.
PROCESS_END = re.compile(r"Process [A-Za-z][\w:-]*:$")
# A worker's error, as reported by the process that waited for the worker.
RELAYED_ERROR = re.compile(
    r"Worker failed with error ['\"](.+?)['\"], please check the stack trace"
)
# The marks of Python 3.11 under a line of a traceback.
UNDERLINE = re.compile(r"\s*[\^~]+[\^~ ]*$")
LAYER = re.compile(r"self\.(\w+)(?: = self\.|\()")
NOT_LAYERS = frozenset(
    {
        "model",
        "layers",
        "language_model",
        "quant_method",
        "linear_attn",
        "self_attn",
        "mlp",
        "experts",
    }
)
# py-spy's dump of a process that stands still.
THREAD_DUMP = re.compile(r'Thread (?:0x[0-9A-Fa-f]+|\d+) \((?:active|idle)(?:\+gil)?\): "')
DUMP_START = re.compile(r"Thread (?:0x[0-9A-Fa-f]+|\d+) \((?:active|idle)(?:\+gil)?\)")
DUMP_FRAME = re.compile(r"\s+(?P<function>[\w<>.]+) \((?P<file>[\w./-]+\.(?:py|pyx|pxi)):\d+\)\Z")
# The level of a program, before a message of several words.
LEVEL = re.compile(r"\W*(?:ERROR|CRITICAL|FATAL)\b(?! \w+\W*$)")
# The stack of a crash in compiled code, by Python's fault handler.
STACK = re.compile(r"(?:Current thread 0x[0-9a-f]+.{0,60}|Stack) \(most recent call first\):")
OTHER_STACK = re.compile(r"Thread 0x[0-9a-f]+.{0,60} \(most recent call first\):")
STACK_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+ in (?P<function>[\w<>.]+)$')
# UCX catches the signals of its process, and prints the stack.
CAUGHT = re.compile(r"Caught signal \d+ \(")
LIBRARY_FRAME = re.compile(r"\s*\d{1,3} +(?P<library>/\S{1,300}\.so(?:\.\d+)*)\(")
# absl's form, which Ray prints too: an address, the size of the frame, and its symbol.
NATIVE_FRAME = re.compile(
    r"(?:.{0,80}\.cc:\d+: )?\s*(?:PC: )?@ +0x[0-9a-f]+ +\S+ +(?P<symbol>(?!\(unknown\))\S+)"
)
