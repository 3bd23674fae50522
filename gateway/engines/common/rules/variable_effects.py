"""Effects of environment variables on an engine's choice of kernels, as its rules have them. Pure.

A variable is written NAME=VALUE, with 1 and 0 for switches that are on and off. The engine looks at
variables after the flags that force a kernel, and before it walks its list.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gateway.domain import Value
from gateway.engines.common.rules.check import Check
from gateway.engines.common.rules.subject import Subject

# Words in names of variables that decide kernels or sizes, and of those that only look so. Read
# in vllm/envs.py of 0.19.1, 0.26.0 and 0.33.0 with their uses, and in sglang/srt/environ.py.
_CHOOSES = re.compile(
    r"_(MARLIN|DEEP_GEMM|FLASHINFER|FBGEMM|MOE|CUTLASS|TRITON|ATTENTION|ATTN|MLA|NVFP4|MXFP\d|FP\d"
    r"|GEMM|GDN|KERNEL|B12X|HUMMING|EMULATION|RUNNER|BREAKABLE|BATCH_INVARIANT)(_|$|S$)"
)
_LEAVES_KERNELS = re.compile(
    r"WARMUP|SAMPLER|ALLREDUCE|AUTOTUNE|A2A|ATOMIC|STREAM|SIMULATION|THRESHOLD|HAS_|DEEPEP|SKIP"
    r"|E8M0|TMA_|FORCE_FIRST|GROUPED_TOPK|F16_ACCUM|CHUNK|FUSION"
)
_TRUE_WORDS = ("1", "true")
_FALSE_WORDS = ("0", "false", "")


class VariableEffect(Value):
    """Kernels that some variables demand or exclude, for the layers and GPUs that match."""

    when: tuple[str, ...]  # NAME=VALUE, all of which are set
    absent: tuple[str, ...] = ()  # names of which none is set
    match: Check = Check()
    demands: tuple[str, ...] = ()  # the kernels that are tried, in this order, and no others
    without: tuple[str, ...] = ()  # kernels that are not tried
    refuses: str = ""  # why the engine refuses layers that match
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that it depends on."""
        return (*(item.partition("=")[0] for item in self.when), *self.absent)

    def holds(self, subject: Subject) -> bool:
        items = subject.variables
        return (
            items.issuperset(self.when)
            and not any(item.partition("=")[0] in self.absent for item in items if "=" in item)
            and self.match.refusal(subject) is None
        )


class AllowedKernels(NamedTuple):
    """Kernels that the engine tries, best first. demand: the variables that allow no others, or
    refuse the layer for the reason `refusal`; "": the list is the engine's own."""

    names: list[str]
    demand: str = ""
    refusal: str = ""


def allowed_kernels(
    effects: Sequence[VariableEffect],
    names: list[str],
    subject: Subject,
    spelled: Mapping[str, tuple[str, ...]],
) -> AllowedKernels:
    """The kernels of `names` that the variables leave. spelled: kernels by the words of effects;
    other words are kernels."""
    for effect in effects:
        if not effect.holds(subject):
            continue
        if effect.refuses:
            return AllowedKernels([], " ".join(effect.when), effect.refuses)
        if effect.demands:
            kernels = [kernel for word in effect.demands for kernel in spelled.get(word, (word,))]
            return AllowedKernels(kernels, " ".join(effect.when))
        dropped_kernels = {
            kernel for word in effect.without for kernel in spelled.get(word, (word,))
        }
        names = [name for name in names if name not in dropped_kernels]
    return AllowedKernels(names)


def rule_variables(env: Mapping[str, str]) -> frozenset[str]:
    """The variables as rules name them: NAME=VALUE, and NAME alone for a switch that is on."""
    on = {name for name, value in env.items() if value.lower() in _TRUE_WORDS}
    disabled_names = {name for name, value in env.items() if value.lower() in _FALSE_WORDS}
    texts = {f"{name}={value}" for name, value in env.items() if name not in on | disabled_names}
    return frozenset(
        {*on, *(f"{name}=1" for name in on), *(f"{name}=0" for name in disabled_names), *texts}
    )


def names_of(effects: Collection[VariableEffect]) -> frozenset[str]:
    """The variables that these effects follow."""
    return frozenset(name for effect in effects for name in effect.names)


def unruled_names(names: Collection[str], followed: Collection[str]) -> list[str]:
    """The variables among these that may decide kernels or sizes, and that no rule follows."""
    return sorted(
        name
        for name in names
        if name not in followed and _CHOOSES.search(name) and not _LEAVES_KERNELS.search(name)
    )
