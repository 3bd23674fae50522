"""The advice in a message: settings to change, their limits, and packages to install. Pure.

A flag or a setting counts only where a version of the engine has it, and only next to a word that
asks for a change. Two settings with a comparison between them are a limit of each other. A message
may hold words of a model's author, so a package counts only where an engine itself names it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

# Words that ask for a change, by the change. The words of a clause nearest to a setting decide.
_VERBS = {
    "raise": r"increas(?:e|ing)|rais(?:e|ing)|enlarg(?:e|ing)|larger|bigger|higher|greater",
    "lower": r"decreas(?:e|ing)|reduc(?:e|ing)|lower(?:ing)?|shrink(?:ing)?|smaller|fewer",
    "omit": r"remov(?:e|ing)|omit(?:ting)?|unset(?:ting)?|drop(?:ping)?|without",
    "disable": r"disabl(?:e|ing)|turn(?:ing)? off",
    "set": r"set(?:ting)?|us(?:e|ing)|add(?:ing)?|pass(?:ing)?|specify(?:ing)?|enabl(?:e|ing)"
    r"|try(?:ing)?"
    r"|export(?:ing)?|provid(?:e|ing)|choos(?:e|ing)|switch(?:ing)? to|requir(?:e|es|ing)|needs?"
    r"|adjust(?:ing)?|chang(?:e|ing)|updat(?:e|ing)|with",
}
_VERB = re.compile(
    r"(?<![\w-])(?:" + "|".join(f"(?P<{name}>{words})" for name, words in _VERBS.items()) + r")\b",
    re.IGNORECASE,
)
# A verb farther from a setting belongs to something else.
_NEARBY_CHARACTERS = 90
_START_VERB = re.compile(r"\b(?:launch|start|restart|run|retry|again)\b", re.IGNORECASE)
# The words before a verb that asks for something; `requires` and `needs` follow a noun.
_REQUEST_PREFIX = re.compile(
    r"(?:\A|[:;,(\"'`]|\b(?:please|or|by|to|and|then|try|can|could|should|must|consider|instead"
    r"|either|launch\w*|start\w*|run|fix|you|server|engine|again|it|vllm|serve))\s*\Z",
    re.IGNORECASE,
)
_REQUIREMENT_VERB = re.compile(r"requir|need", re.IGNORECASE)
_REASON_PREFIX = re.compile(
    r"\b(?:when|if|with|for|by)(?: using| enabling| you use| the| option| flag)*\s+[`'\"]?\Z",
    re.IGNORECASE,
)
_FAILURE_PREFIX = re.compile(
    r"\b(?:cannot|can't|could not|unable|fail\w*)\b[^,;]*\bby\s*\Z", re.IGNORECASE
)
_REQUIREMENT_CLAUSE = re.compile(r"\b(?:is|are) (?:required|needed|necessary)\b", re.IGNORECASE)
# A size that is asked for: "use a smaller value for".
_SIZE = re.compile(r"\A(?:larg|bigg|high|great|small|few|lower\b)", re.IGNORECASE)
_SIZE_PREFIX = re.compile(
    r"\b(?:set|use|using|try|choose|specify|give|with|pass|need)\b[^.;]{0,40}\Z", re.IGNORECASE
)
_RAISE_CLAUSE = re.compile(r"\bto (?:increase|raise|extend|allow (?:more|longer))\b", re.IGNORECASE)
_CONDITION = re.compile(
    r"\b(?:when|if|while|whenever|because|since|although)\b[^,]*\Z", re.IGNORECASE
)
_REFUSAL = re.compile(
    r"\bnot\b|n't\b|\bcannot\b|\bunsupported\b|incompatible|\bonly\b|\bnever\b", re.IGNORECASE
)
_NEGATION_PREFIX = re.compile(r"(?:\bnot|n't|\bcannot|\bnever)\s+(?:be\s+)?\Z", re.IGNORECASE)
# Words after a setting that describe its change.
_CHANGE_SUFFIX = re.compile(
    r"\A[`'\"]?(?:\s?=\s?[\w.]+)?[`'\"]?\s+(?:flag\s+|option\s+|argument\s+)?"
    r"(?:(?P<set>(?:is|are|must be|should be|has to be|needs to be)\s+(?:explicitly\s+)?"
    r"(?:required|set\b|enabled|specified|given|provided|used))"
    r"|(?P<omit>(?:is|are)\s+(?:not|un)\s?(?:yet\s+)?(?:supported|compatible|allowed)|cannot be"
    r"|can't be|must not be|(?:must|should) be (?:disabled|unset|removed)|is incompatible"
    r"|is deprecated|does not support|doesn't support))",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?:[.;!?](?=\s|\Z)|\n)\s*")
_FLAG = r"--[a-z][a-z0-9]{0,40}(?:[-_.][a-z0-9]{1,40}){0,8}"
_OBJECT = re.compile(
    rf"(?<![\w-])(?P<flag>{_FLAG})"
    r"(?:=(?P<value>[\w.:/+-]*\w)| (?P<value4>[\w.:/+-]*\w)(?=[`'\"]))?"
    r"|\b(?P<variable>[A-Z][A-Z0-9]{1,40}(?:_[A-Z0-9]{1,40}){1,12})"
    r"(?:\s?=\s?(?P<value2>[\w.:/+-]*\w))?"
    r"|(?<![\w./-])(?P<setting>[a-z][a-z0-9]{0,40}(?:_[a-z0-9]{1,40}){1,8})"
    r"(?:\s?=\s?['\"]?(?P<value3>[\w.-]*\w))?"
)
_VARIABLE = re.compile(
    r"(?:VLLM|SGLANG|NCCL|CUDA|HF|TORCH|PYTORCH|FLASHINFER|TRITON|OMP|GLOO|NVSHMEM"
    r"|RAY|LMCACHE|MOONCAKE|UCX)_"
)
# Variables and flags that show a cause, or risk more than they cure, and change none.
_DEBUG_SETTING = re.compile(
    r"_DEBUG|DEBUG_|LAUNCH_BLOCKING|SERIALIZE_KERNEL|_DSA\b|LOG(?:GING)?_|_LOGS?\b|TRACE"
    r"|VERBOSE|trust-remote-code|\Ahelp\Z|local_files_only|VERSION_CHECK"
)
# A setting in plain words behind a verb that asks for more or less of it.
_WORDED_REQUEST = re.compile(
    rf"\b(?:(?P<raise>{_VERBS['raise']})|(?:{_VERBS['lower']})) (?:the |your |its )?"
    r"(?P<words>[a-z]{2,20}(?:[ -][a-z]{2,20}){1,5})",
    re.IGNORECASE,
)
_SENTENCE_BEGIN = re.compile(r"(?:\A|[.;:!?]\s+)\Z")
_SHORT_WORDS = {"length": "len", "sequences": "seqs", "maximum": "max", "number": "num"}
_NUMBER = r"[\[(=: ]{0,3}(\d[\d,]*(?:\.\d+)?)[)\]]?"
_NAME = rf"[`'\"]?(?<![\w-])({_FLAG}|[a-z][a-z0-9]{{0,40}}(?:_[a-z0-9]{{1,40}}){{1,8}})[`'\"]?"
_LOWER_BOUND_WORDS = (
    r"smaller than|less than|lower than|below"
    r"|must be at least|must be >=?|must be (?:greater|larger)"
)
_UPPER_BOUND_WORDS = (
    r"larger than|greater than|higher than|bigger than|more than|exceeds?|above|must be at most"
)
_LIMIT = re.compile(
    rf"{_NAME}\s?{_NUMBER}[^.;\n]{{0,30}}?\b(?:(?P<smaller>{_LOWER_BOUND_WORDS})|(?P<larger>{_UPPER_BOUND_WORDS}))"
    rf"[^.;\n]{{0,40}}?{_NAME}\s?{_NUMBER}",
    re.IGNORECASE,
)
_BOUND = re.compile(
    rf"(?P<verb>increase|raise|set|decrease|reduce|lower) {_NAME} (?:to )?"
    rf"(?P<end>at least|at most|to|below|above)?\s?{_NUMBER}",
    re.IGNORECASE,
)
_REQUIREMENT = r"[A-Za-z][\w.-]*\w(?:\[[\w,]+\])?(?:\s?(?:[<>=!~]=|[<>])\s?\d[\w.*+]*)?"
INSTALL = re.compile(
    r"\b(?P<pip>(?:uv )?pip3? install)(?: -{1,2}[\w-]+)*\s+[`'\"]?(?P<first>"
    + _REQUIREMENT
    + r")(?P<rest>(?: (?!and\b|or\b|to\b|for\b|first\b|if\b)[\w.-]+(?:[<>=!~]=\S+)?)*)"
    r"|\b(?:re)?install(?:ing)?\s+(?:the\s+|a\s+)?(?:(?:latest|newer|newest)\s+)?"
    r"(?:version\s+of\s+)?"
    r"[`'\"]?(?P<named>"
    + _REQUIREMENT
    + r")[`'\"]?(?=\s+(?:for|to|first|packages?|library|kernels?|with|via|from|and|or|in|by)\b"
    + r"|[.,;:)\n]|\s*\Z)"
)
_VERSION_REQUIREMENT = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z][\w.-]{0,60}\w)\s?"
    r"(?P<bound>(?:>=|==|~=|<=|<|>)\s?\d[\w.*+]*)[\w ,()]{0,20}?"
    r"\b(?:is|are) (?:required|needed)"
    r"|\b(?:requires?|needs?)\s+(?:at least\s+)?(?P<name2>[A-Za-z][\w.-]*\w)\s?(?:version\s)?"
    r"(?P<bound2>(?:>=|==|~=)\s?\d[\w.*+]*)"
)
# "a (1.2) does not match b (1.3)", where both are packages.
_VERSION_MISMATCH = re.compile(
    r"(?<![\w.-])(?P<first>[A-Za-z][\w.-]{0,60}\w) version \(?(?:\d[\w.+]*)\)?"
    r" (?:does not match|differs from)"
    r" (?:the )?(?P<second>[A-Za-z][\w.-]*\w) version \(?(?P<version>\d[\w.]*)"
)
# The package is there, and a part of it is not: a newer package may lack it, too.
_MISSING_PART = re.compile(r"No module named '(?P<package>[A-Za-z]\w*)\.")
_REMOVAL = re.compile(
    r"\b(?:remov|delet|clear|clean)(?:e|ing)?\b (?:the )?[`'\"]?"
    r"(?P<path>[~$]?[\w{}.-]*/[\w./{}$-]*\w)",
    re.IGNORECASE,
)
_UNKNOWN_PACKAGE = (
    "Use the engine's image, or look the package of the line up before you install it: no described"
    " engine names it."
)
_MAX_STEPS = 3
# Advice stands at the beginning of a message, or in the lines after it.
_MAX_MESSAGE_CHARACTERS = 2000


class KnownFlags(NamedTuple):
    """The flags of an engine, without dashes.

    is_complete: its version has no other.
    variables: the variables of its environment.
    """

    names: frozenset[str] = frozenset()
    is_complete: bool = False
    variables: frozenset[str] = frozenset()


class _Change(NamedTuple):
    """A change of one setting. value: the one to set, or a limit in words."""

    verb: str
    name: str
    value: str = ""

    def __str__(self) -> str:
        if self.verb == "set":
            return f"Set {self.name}{f'={self.value}' if self.value else ''}: the line asks for it."
        if self.verb == "omit":
            word = "Omit" if self.name.startswith("--") else "Unset"
            return f"{word} {self.name}: the line says so."
        return f"{self.verb.title()} {self.name}{f' to {self.value}' if self.value else ''}."


def distribution_name(name: str) -> str:
    """The name of a distribution as package registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def advice_of_message(
    message: str, flags: KnownFlags, packages: Collection[str]
) -> tuple[str, ...]:
    """The steps that a message itself asks for, at most three: limits first, then its order.

    packages: the names of distributions that engines name. A flag with dashes counts also where
    the engine's version is not described.
    """
    message = message[:_MAX_MESSAGE_CHARACTERS]
    limits = [*_limits(message, flags)]
    named_limits = {limit.name for limit in limits}
    changes = [
        flag_change
        for flag_change in _advised_changes(message, flags)
        if flag_change.name not in named_limits
    ]
    removals = (f"Remove {match['path']}." for match in _REMOVAL.finditer(message))
    named_settings = named_limits.union(change.name for change in changes)
    changes += [
        worded_change
        for worded_change in _worded_changes(message, flags)
        if worded_change.name not in named_settings
    ]
    lines = [*map(str, limits), *_packages(message, packages), *map(str, changes), *removals]
    return tuple(dict.fromkeys(lines))[:_MAX_STEPS]


def _limits(message: str, flags: KnownFlags) -> Iterator[_Change]:
    """The changes that two compared settings allow: each up to, or down to, the other."""
    for match in _LIMIT.finditer(message):
        first = match[1]
        low = match[2]
        second = match[5]
        high = match[6]
        is_smaller = bool(match["smaller"])
        for name, verb, number in (
            (first, "raise" if is_smaller else "lower", high),
            (second, "lower" if is_smaller else "raise", low),
        ):
            if (flag := _flag(name, flags)) is not None:
                yield _Change(verb, flag, f"at {'least' if verb == 'raise' else 'most'} {number}")
    for match in _BOUND.finditer(message):
        if (flag := _flag(match[2], flags)) is not None:
            yield _bounded_change(match, flag)


def _bounded_change(match: re.Match[str], flag: str) -> _Change:
    """The change that "reduce NAME to 4" or "set NAME to at least 4" asks for."""
    verb = match["verb"].lower()
    end = (match["end"] or "").lower()
    number = match[4]
    if verb in ("decrease", "reduce", "lower") or end in ("at most", "below"):
        return _Change("lower", flag, f"at most {number}")
    if verb == "set" and end in ("", "to"):
        return _Change("set", flag, number)
    return _Change("raise", flag, f"at least {number}")


def _advised_changes(message: str, flags: KnownFlags) -> Iterator[_Change]:
    change_by_name: dict[str, _Change] = {}
    bounds = [0, *(match.end() for match in _SENTENCE.finditer(message)), len(message)]
    for start, end in pairwise(bounds):
        sentence = message[start:end]
        for match in _OBJECT.finditer(sentence):
            name = _setting_name(match, flags)
            values = (match["value"], match["value2"], match["value3"], match["value4"])
            value = next(filter(None, values), "")
            if name is None or _DEBUG_SETTING.search(name.strip("-")):
                continue
            if earlier_change := change_by_name.get(name):
                if earlier_change.value and value and value not in earlier_change.value:
                    change_by_name[name] = earlier_change._replace(
                        value=f"{earlier_change.value} or {value}"
                    )
                continue
            change = _requested_change(sentence, match, name)
            if change is None:
                continue
            change_by_name[name] = _Change(change, name, value if change == "set" else "")
    yield from change_by_name.values()


def _worded_changes(message: str, flags: KnownFlags) -> Iterator[_Change]:
    """The changes of settings that a message asks for in plain words: "increase the block size"."""
    for match in _WORDED_REQUEST.finditer(message):
        prefix = message[: match.start()]
        if not (_SENTENCE_BEGIN.search(prefix) or _REQUEST_PREFIX.search(prefix)):
            continue
        words = [_SHORT_WORDS.get(word, word) for word in re.split("[ -]", match["words"].lower())]
        if name := _worded_setting(words, flags):
            yield _Change("raise" if match["raise"] else "lower", name)


def _worded_setting(words: list[str], flags: KnownFlags) -> str:
    """The one flag or variable whose name has the first of these words; empty without one.

    Two words must be the whole name. A name that has more of the words may have two others.
    """
    names = {f"--{flag}": flag.split("-") for flag in flags.names}
    names |= {name: name.lower().split("_")[1:] for name in flags.variables}
    for count in range(len(words), 1, -1):
        first_words = set(words[:count])
        excess_by_name = {
            name: len(parts) - count
            for name, parts in names.items()
            if first_words <= set(parts) and len(parts) - count <= (2 if count > 2 else 0)
        }
        least_excess = min(excess_by_name.values(), default=0)
        nearest_names = [name for name, excess in excess_by_name.items() if excess == least_excess]
        if len(nearest_names) == 1:
            return nearest_names[0]
    return ""


def _setting_name(match: re.Match[str], flags: KnownFlags) -> str | None:
    """The setting that a text names, as a flag or variable; None where the engine has none."""
    if variable := match["variable"]:
        return variable if _VARIABLE.match(variable) or match["value2"] else None
    return _flag(match["flag"] or match["setting"], flags)


def _flag(name: str, flags: KnownFlags) -> str | None:
    """The flag of the engine with that name."""
    plain_name = name.strip("-").replace("_", "-")
    root = plain_name.partition(".")[0]
    is_known = root in flags.names or root.removeprefix("no-") in flags.names
    can_be = name.startswith("--") and not flags.is_complete
    return f"--{plain_name}" if is_known or can_be else None


class _Verb(NamedTuple):
    """The last verb before a setting.

    change: the one that its word asks for.
    prefix: the text before it.
    """

    change: str
    word: str
    prefix: str


def _requested_change(sentence: str, match: re.Match[str], name: str) -> str | None:
    """The change that a sentence asks for with a setting; None if it asks for none."""
    if suffix := _CHANGE_SUFFIX.match(sentence[match.end() :]):
        return suffix.lastgroup
    prefix = sentence[: match.start()]
    # A setting that asks for something else is the other way out.
    if _REASON_PREFIX.search(prefix) and _REQUIREMENT_CLAUSE.search(prefix):
        return "omit"
    verb = _last_verb(prefix)
    if verb is None:
        return None
    if _CONDITION.search(prefix):
        is_refused = verb.word in ("using", "with", "enabling") and _REFUSAL.search(sentence)
        return "omit" if is_refused else None
    if _FAILURE_PREFIX.search(verb.prefix):
        return None
    if _NEGATION_PREFIX.search(verb.prefix):
        return {"set": "omit", "omit": "set"}.get(verb.change)
    if verb.word == "with" and not _START_VERB.search(verb.prefix):
        return "omit" if _REFUSAL.search(verb.prefix) else None
    if verb.word != "with" and not _is_request(verb):
        return None
    return _change_of_setting(verb, match, name)


def _last_verb(prefix: str) -> _Verb | None:
    """The last verb that asks for a change near the end of a text."""
    nearby_text = prefix[-_NEARBY_CHARACTERS:]
    verbs = list(_VERB.finditer(nearby_text))
    if not verbs:
        return None
    verb = verbs[-1]
    verb_start = len(prefix) - len(nearby_text) + verb.start()
    return _Verb(verb.lastgroup or "", verb[0].lower(), prefix[:verb_start])


def _is_request(verb: _Verb) -> bool:
    """Whether the words before a verb, or the verb itself, ask the reader for something."""
    return bool(
        _REQUIREMENT_VERB.match(verb.word)
        or _REQUEST_PREFIX.search(verb.prefix)
        or (_SIZE.match(verb.word) and _SIZE_PREFIX.search(verb.prefix))
    )


def _change_of_setting(verb: _Verb, match: re.Match[str], name: str) -> str:
    """The change that a verb means for a setting: switches that disable are set by "disable"."""
    has_value = bool(match["value"] or match["value2"])
    if verb.change == "set" and not has_value and _RAISE_CLAUSE.search(verb.prefix):
        return "raise"
    if verb.change == "disable":
        is_switch = name.strip("-").lower().startswith(("disable", "no-"))
        return "set" if is_switch or has_value or match["variable"] else "omit"
    if verb.change == "omit" and name.startswith("--no-"):
        return "set"
    return verb.change


def _packages(message: str, packages: Collection[str]) -> Iterator[str]:
    """The step that installs the package of a message."""
    for match in _VERSION_MISMATCH.finditer(message):
        if all(distribution_name(match[name]) in packages for name in ("first", "second")):
            yield (
                f"Install {match['first']} in the version of {match['second']}, {match['version']}."
            )
    names: list[str] = []
    for match in _VERSION_REQUIREMENT.finditer(message):
        name = match["name"] or match["name2"]
        names.append(f"{name}{match['bound'] or match['bound2']}".replace(" ", ""))
    has_command = False
    for match in INSTALL.finditer(message):
        has_command = has_command or match["pip"] is not None
        names += [match["first"] or match["named"], *(match["rest"] or "").split()]
    parted = {match["package"].lower() for match in _MISSING_PART.finditer(message)}
    package_names = [
        name
        for name in names
        if distribution_name(_package_name(name)) in packages
        and not (">" in name and _package_name(name).lower() in parted)
    ]
    bounded = {_package_name(name).lower() for name in package_names if re.search(r"[<>=]", name)}
    package_names = [
        name
        for name in package_names
        if not (re.fullmatch(r"[\w.-]+", name) and name.lower() in bounded)
    ]
    if package_names:
        yield f"Install {' '.join(dict.fromkeys(package_names[:4]))} in the engine's environment."
    elif has_command:
        yield _UNKNOWN_PACKAGE


def _package_name(requirement: str) -> str:
    """The name in a requirement, without extras and versions."""
    return re.split(r"[<>=!~\[]", requirement)[0]
