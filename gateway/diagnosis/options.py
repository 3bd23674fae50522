"""The options of an engine's start, as its log shows them, and the steps that they rule out. Pure.

vLLM prints the options that were given (`non-default args: {...}`), SGLang the value of each
(`server_args=ServerArgs(...)`).
"""

from __future__ import annotations

import re
from itertools import pairwise

_NON_DEFAULT_ARGS = re.compile(r"non-default args: (?P<all>\{.*)")
# A text, as of a chat template, may have brackets and quotes of its own.
_PAIR = re.compile(
    r"(?P<bracket>[{}])|'(?P<name>[a-z]\w*)': "
    r"(?P<value>\[\]|\{\}|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,\[\]{}]*)"
)
# vLLM until 0.8 prints the value of each option, too.
_VALUES = re.compile(r"(?:server_args=ServerArgs|args: Namespace)\((?P<all>.*)")
# A list may hold pairs of its own, as ['name=path'] of adapters.
_VALUE = re.compile(
    r"(?P<bracket>(?!))|(?<!['\"])\b(?P<name>[a-z]\w*)="
    r"(?P<value>\[\]|\{\}|'[^']*'|[^,()\[\]{}]*)"
)
# The value of an option in JSON, and the settings in it.
_JSON = re.compile(r"\"\w+\": ?\"(?P<value>[^\"]+)\"")
_UNSET_VALUES = frozenset(
    {"None", "False", "'auto'", "[]", "{}", "'none'", "''", "1", "0", "'null'"}
)
_NAME = r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
_FLAG = re.compile(_NAME)
_SWITCH = re.compile(r"\A(?:enable|disable|use)-")
_OMISSION = re.compile(r"\b(?:[Oo]mit|[Ww]ithout)\b")
_OMISSION_FLAGS = re.compile(
    rf"\b(?:[Oo]mit|[Ww]ithout) (?P<flags>{_NAME}(?:(?:,| and|, and) {_NAME})*)"
)
# Features of both engines that a start can do without, those that fail most often first.
_FEATURES = (
    "speculative-config",
    "speculative-algorithm",
    "kv-transfer-config",
    "kv-offloading-size",
    "enable-hierarchical-cache",
    "enable-dbo",
    "enable-two-batch-overlap",
    "enable-eplb",
    "enable-lora",
    "kv-cache-dtype",
    "calculate-kv-scales",
    "compilation-config",
    "enable-torch-compile",
    "attention-backend",
    "moe-backend",
    "moe-runner-backend",
    "mamba-cache-mode",
    "mamba-ssm-cache-dtype",
    "enable-dp-attention",
    "data-parallel-size",
    "dp-size",
    "enable-expert-parallel",
    "decode-context-parallel-size",
    "async-scheduling",
    "enable-mixed-chunk",
    "enable-sleep-mode",
    "enable-memory-saver",
    "cpu-offload-gb",
    "load-format",
    "mm-encoder-tp-mode",
    "quantization",
    "pipeline-parallel-size",
    "pp-size",
    "enable-prefix-caching",
    "hf-overrides",
)
# Options that say which model, where, and how large: no text is only about them.
_PLACES = frozenset(
    {
        "model",
        "model-path",
        "model-tag",
        "tokenizer",
        "tokenizer-path",
        "served-model-name",
        "disaggregation-mode",
        "host",
        "port",
        "download-dir",
        "device",
        "dtype",
    }
)
# Options of the model itself or of the server's role: no start of it can leave them out.
MODEL_OPTIONS = frozenset(
    {"quantization", "load-format", "tokenizer-mode", "config-format", "disaggregation-mode"}
)
# Words of names that belong to no field.
_COMMON_WORDS = frozenset(
    [
        "enable",
        "disable",
        "model",
        "config",
        "parallel",
        "tensor",
        "server",
        "format",
        "backend",
        "cache",
        "dtype",
        "batch",
        "chunked",
        "length",
        "tokens",
        "level",
        "random",
        "method",
        "default",
        "memory",
        "static",
        "ratio",
        "policy",
        "schedule",
        "expert",
        "kernel",
        "multi",
    ]
)
_NUMBER = re.compile(r"[\d.]*")
_MIN_WORD_CHARACTERS = 5
_MIN_NAME_WORDS = 3
_MAX_FLAGS = 3
# The end of a step that lists settings to try, and the flags for its words.
_LIST_SENTENCE = re.compile(r"(?P<rest>.*\bone by one: )(?P<items>[^.]+)(?P<end>\..*)?\Z")
_ITEM = re.compile(r"(?:[^,(]|\([^)]*\))+")
_FLAGS_OF_WORD = {
    "drafter": ("speculative-config", "speculative-algorithm"),
    "connector": ("kv-transfer-config", "kv-offloading-size"),
    "pipeline parallelism": ("pipeline-parallel-size", "pp-size"),
}
# Options that turn a part on, and the ends of those that name its model. Drafts from the text need
# none.
_PART_SWITCHES = frozenset({"algorithm", "method", "mode"})
_MODEL_ENDS = ("-model-path", "-model", "-path")
_MODEL_FREE = re.compile(r"(?i)n_?gram|lookahead|suffix")
_QUOTES = "'\""
# A message that an engine does not know a name.
_REFUSED_NAME = re.compile(
    r"\b(?:[Uu]nsupported|[Uu]nknown|[Uu]nrecognized|[Ii]nvalid|[Nn]o such)\b[^:'\"]{0,40}"
    r"(?::|['\"]) ?(?P<names>[^\s].{0,120})"
)
# Short forms of parallelism, as messages have them.
_SHORT_FORMS = {"DP": "data-parallel", "EP": "expert-parallel", "DCP": "decode-context-parallel"}
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b")
# Variables that a line of a shell, or of a list of the environment, sets at its begin. A sentence
# that asks for one does not begin so.
_LEADING_VARIABLES = re.compile(
    r"\A\W{0,4}(?:export |env |declare -x )?(?:[A-Z][A-Z0-9_]*=\S*(?: +|\Z)){1,40}"
)
_SETTING = r"(?P<name>(?:VLLM|SGLANG|SGL)_[A-Z0-9_]+)=[\"']?(?P<value>[\w.-]+)[\"']?(?=[\s\\]|\Z)"
_LEADING_SETTING = re.compile(rf"(?<![\w=]){_SETTING}")
_CONTAINER_SETTING = re.compile(rf"(?:-e|--env)[ =][\"']?{_SETTING}")
_OWN_PREFIXES = ("VLLM_", "SGLANG_", "SGL_")
# Secrets, and variables that change only the output, its place, and its duration.
_SILENT_VARIABLE = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|LOGG|_LOG\b|TRACE|DEBUG|VERBOSE|TIMEOUT|SECONDS"
    r"|_(?:IP|PORT|HOST|URL|PATH|DIR|ROOT)\b"
)
# Words of a variable's name that are not part of the engine, or stand in any traceback.
_SWITCH_WORDS = frozenset(
    {"VLLM", "SGLANG", "SGL", "USE", "ENABLE", "DISABLE", "SKIP", "FORCE", "BACKEND", "EXECUTE"}
    | {"RUNTIME", "MULTIPROC", "MULTIPROCESSING", "PROCESS", "DEFAULT", "REQUEST", "REQUESTS"}
)
# A shorter word may stand in any text.
_MIN_WORD_LETTERS = 7
_SIZES = frozenset({"size", "gb"})
# Words of options by which code divides. Nothing is divided by a seed, a rank or a level.
_DIVISORS = frozenset({"size", "num", "max", "min", "len", "steps", "interval", "blocks", "tokens"})


class StartOptions:
    """The options of one start, by flag without dashes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._parts: dict[str, list[str]] = {}
        """The values inside the value of an option."""
        self._variables: dict[str, str] = {}
        """The engine's own variables that the log shows as set."""
        self._is_complete = False
        """Whether an option that is not listed was not given."""

    def read(self, line: str) -> None:
        """Read a line of the log, without the prefix of its record."""
        if any(prefix in line for prefix in _OWN_PREFIXES):
            self._read_variables(line)
        if "args" not in line:
            return
        if match := _NON_DEFAULT_ARGS.search(line):
            self._add_options(_PAIR, match["all"])
            self._is_complete = match["all"].rstrip().endswith("}")
        elif match := _VALUES.search(line):
            self._add_options(_VALUE, match["all"])

    def is_set(self, flag: str) -> bool | None:
        """Whether an option was given; None if the log does not show it."""
        if flag in self._values:
            return self._values[flag] not in _UNSET_VALUES
        return False if self._is_complete else None

    def is_on(self, flag: str) -> bool:
        """Whether a switch was given."""
        return self._values.get(flag) == "True"

    def gives(self, name: str, value: str) -> bool:
        """Whether a flag, or a variable of the engine, was given with this value."""
        text = self._values.get(name, self._variables.get(name, ""))
        return text.strip("'\"").lower() == value.lower()

    def sets(self, variable: str) -> bool:
        """Whether this start sets a variable of the environment, as far as the log shows it."""
        return variable in self._variables

    def options_of_value(self, name: str) -> list[tuple[str, str]]:
        """The options with a value of which a word stands in a name of code, with the values."""
        return [
            (flag, value.strip("'\""))
            for flag, value in self._set_options().items()
            if any(
                word in name for word in _option_words("", value) if len(word) >= _MIN_WORD_LETTERS
            )
        ]

    @property
    def features(self) -> str:
        """The features of this start that it can do without, as flags; at most three."""
        flags = [f"--{flag}" for flag in _FEATURES if self.is_set(flag)]
        return ", ".join(flags[:_MAX_FLAGS])

    def options_in(self, message: str) -> str:
        """The options of this start whose whole name stands in a message, as flags; at most
        three."""
        flags = [
            flag
            for flag, value in self._set_options().items()
            if _is_named(flag, message)
            or _is_dtype(flag, value, message)
            or _ends_in(flag, message)
        ]
        return ", ".join(f"--{flag}" for flag in flags[:_MAX_FLAGS])

    def number(self, *flags: str) -> int | None:
        """The number that the start gave for the first of these flags; None without one."""
        values = (self._values.get(flag, "") for flag in flags)
        return next((int(value) for value in values if value.isdecimal()), None)

    def refused_value(self, message: str) -> tuple[str, str]:
        """The value of an option that a message calls unknown, and the flag; empty without one."""
        refusal_match = _REFUSED_NAME.search(message)
        if refusal_match is None:
            return "", ""
        for flag, value in self._set_options().items():
            for part in (value, *self._parts.get(flag, ())):
                name = part.strip("'\"")
                if len(name) >= _MIN_WORD_CHARACTERS and name in refusal_match["names"]:
                    return name, f"--{flag}"
        return "", ""

    def options_about(self, text: str) -> str:
        """The options of this start whose name or value a text speaks of, as flags; at most
        three."""
        lower_text = text.lower()
        flags = [flag for flag in self._set_options() if _is_named(flag, text)] + [
            flag
            for flag, value in self._set_options().items()
            if not _NUMBER.fullmatch(value)
            and (
                any(word in lower_text for word in _option_words(flag, value))
                or any(_is_valued(part, lower_text) for part in (value, *self._parts.get(flag, ())))
            )
        ]
        flags += [
            flag
            for flag, value in self._set_options().items()
            if flag in _FEATURES and _NUMBER.fullmatch(value) and _is_partly_named(flag, lower_text)
        ]
        return ", ".join(f"--{flag}" for flag in list(dict.fromkeys(flags))[:_MAX_FLAGS])

    def chosen_option(self, text: str) -> str:
        """The option of this start of which a text has a word of the name and one of the value, as
        a flag: the code of a choice is named after both. Empty without one.
        """
        lower_text = text.lower()
        for flag, value in self._values.items():
            # Names of choices stand in quotes.
            if value[:1] != "'" or flag in _PLACES or flag in MODEL_OPTIONS:
                continue
            words = [set(_option_words("", part.replace("-", "_"))) for part in (flag, value)]
            is_plain = value.strip("'\"").replace("_", "").isalnum()
            if (
                is_plain
                and not words[0] & words[1]
                and all(any(word in lower_text for word in part) for part in words)
            ):
                return f"--{flag}"
        return ""

    def unset_part(self, frames: str) -> tuple[str, str]:
        """The model of a part that is on and failed, printed as unset, and the option that is on.

        Both are flags, and empty without such a pair. frames: the code that failed.
        """
        for flag, value in self._set_options().items():
            part, _, switch = flag.partition("-")
            if switch not in _PART_SWITCHES or part not in frames or _MODEL_FREE.search(value):
                continue
            for name, text in self._values.items():
                if name.startswith(f"{part}-") and name.endswith(_MODEL_ENDS) and text == "None":
                    return f"--{name}", f"--{flag} {value.strip(_QUOTES)}"
        return "", ""

    def variable_about(self, text: str) -> tuple[str, str]:
        """A variable that this start sets and whose part of the engine a text names, with its
        value; empty without one."""
        letters = re.sub(r"[^a-z0-9]", "", text.lower())
        for name, value in self._variables.items():
            words = [word.lower() for word in name.split("_") if word not in _SWITCH_WORDS]
            if any(len(word) >= _MIN_WORD_LETTERS and word in letters for word in words):
                return name, value
        return "", ""

    def zero_option(self, text: str) -> str:
        """The option that this start gives as 0 and that a text names, or the only size or number,
        as a flag.

        Empty without one.
        """
        zeros = [flag for flag, value in self._values.items() if value == "0"]
        named_flags = [flag for flag in zeros if _is_named(flag, text)]
        chosen_flags = named_flags or [
            flag for flag in zeros if _DIVISORS.intersection(flag.split("-"))
        ]
        return f"--{chosen_flags[0]}" if len(chosen_flags) == 1 else ""

    def narrow(self, step: str) -> str:
        """The step with only those of its listed settings that this start can change.

        Empty if there is none. A step without a list of settings is returned as it is.
        """
        list_match = _LIST_SENTENCE.match(step)
        if list_match is None:
            return step
        omits = step.startswith("Omit")
        items = [item.strip() for item in _ITEM.findall(list_match["items"])]
        able = [item for item in items if self._can_change(item, omits_flag=omits)]
        return f"{list_match['rest']}{', '.join(able)}{list_match['end'] or ''}" if able else ""

    def _set_options(self) -> dict[str, str]:
        return {
            flag: value
            for flag, value in self._values.items()
            if value not in _UNSET_VALUES and flag not in _PLACES
        }

    def _can_change(self, option_text: str, *, omits_flag: bool) -> bool:
        """Whether a start can omit one of the settings of an item, or be given one of them."""
        flags = _FLAG.findall(option_text) or [
            flag
            for word, word_flags in _FLAGS_OF_WORD.items()
            if word in option_text
            for flag in word_flags
        ]
        if not flags:
            return True
        return any(
            self.is_set(flag) is not False
            if omits_flag and not flag.startswith("no-")
            else not self.is_on(flag)
            for flag in flags
        )

    def rules_out(self, step: str) -> bool:
        """Whether a step changes nothing: it omits a setting that was not given, or repeats one
        that was."""
        named_flags = _FLAG.findall(step)
        if omitted := _OMISSION_FLAGS.search(step):
            flags = _FLAG.findall(omitted["flags"])
            return (
                len(flags) == len(named_flags)
                and ", or " not in step
                and all(self.is_set(flag) is False for flag in flags)
            )
        if _OMISSION.search(step) or _VARIABLE.search(step):
            return False
        return any(map(self.is_on, named_flags))

    def _read_variables(self, line: str) -> None:
        """Read the engine's own variables that a line sets, without secrets."""
        if leading := _LEADING_VARIABLES.match(line):
            settings = _LEADING_SETTING.finditer(leading[0])
        else:
            settings = _CONTAINER_SETTING.finditer(line.partition("docker run ")[2])
        for match in settings:
            if not _SILENT_VARIABLE.search(match["name"]):
                self._variables.setdefault(match["name"], match["value"])

    def _add_options(self, pair: re.Pattern[str], text: str) -> None:
        depth = 0
        flag = ""
        for match in pair.finditer(text):
            if bracket := match["bracket"]:
                depth += 1 if bracket == "{" else -1
                continue
            value = match["value"].strip()
            if depth > 1:
                self._parts.setdefault(flag, []).append(value)
                continue
            flag = match["name"].replace("_", "-")
            self._values.setdefault(flag, value)
            if value.startswith("'{"):
                self._parts.setdefault(flag, []).extend(_JSON.findall(value))


def _is_named(flag: str, text: str) -> bool:
    """Whether a text has the whole name of a flag, or its short form."""
    # A message speaks of "expert parallelism" where --enable-expert-parallel is set.
    part = _SWITCH.sub("", flag)
    name = (part if part.count("-") else flag).replace("-", "[-_ ]")
    short_form = next(
        (short_form for short_form, words in _SHORT_FORMS.items() if words in flag), None
    )
    return bool(
        re.search(rf"(?<![A-Za-z0-9]){name}(?:ism)?(?![A-Za-z0-9])", text, re.IGNORECASE)
        or (short_form and re.search(rf"\b{short_form}\b", text))
    )


def _is_partly_named(flag: str, text: str) -> bool:
    """Whether a text has two words of a flag side by side: `context_parallel` of
    --decode-context-parallel-size."""
    words = [word for word in flag.split("-") if word not in _SIZES]
    return any(re.search(f"{first}[-_ ]?{second}", text) for first, second in pairwise(words))


def _ends_in(flag: str, text: str) -> bool:
    """Whether a text has the last two of at least three words of a flag: "no storage backend" of
    --hicache-storage-backend."""
    words = flag.split("-")
    if len(words) < _MIN_NAME_WORDS or {*words[-2:]} <= _COMMON_WORDS:
        return False
    return bool(re.search(rf"\b{words[-2]}[-_ ]{words[-1]}\b", text, re.IGNORECASE))


def _is_dtype(flag: str, value: str, text: str) -> bool:
    """Whether a text speaks of a dtype by its owner: "fp8 KV cache" for --kv-cache-dtype=fp8."""
    owner = flag.removesuffix("-dtype")
    width = re.match(r"[a-z]+\d+", value.strip("'\""))
    return bool(
        owner not in (flag, "")
        and width
        and re.search(owner.replace("-", "[-_ ]"), text, re.IGNORECASE)
        and width[0] in text.lower()
    )


def _is_valued(value: str, text: str) -> bool:
    """Whether a text has the whole value of an option, which is not a plain word."""
    value = value.strip("'\"").lower()
    return (
        len(value) >= _MIN_WORD_CHARACTERS
        and not value.isalpha()
        and bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    )


def _option_words(flag: str, value: str) -> list[str]:
    """The words of an option's name and value that name a field."""
    words = [*flag.split("-"), *re.split(r"[\W_]+", value.lower())]
    return [
        word for word in words if len(word) >= _MIN_WORD_CHARACTERS and word not in _COMMON_WORDS
    ]
