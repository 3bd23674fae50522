"""Public measurements of engines (benchmarks/published.yaml) and settings in use (experts.yaml),
for comparison with plans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gateway.domain import Value
from gateway.domain.wish import Goal
from tests.support.paths import ROOT
from tests.support.yaml_file import read_yaml

# Whose config.json has the model's shapes: tests/models/NAME.json, or
# model_configs/NAME_config.json of aiconfigurator-core.
CONFIG = r"^(tests|aiconfigurator):[A-Za-z0-9._-]+$"
# int4_g32: compressed-tensors in groups of 32, as cyankiwi (once cpatonn) makes the repositories
# with AWQ in their names: GLM-4.5-Air's 10944 inputs divide by no larger one that is used, and 63.4
# GB of the checkpoint are those of this one.
Quantization = Literal[
    "bf16",
    "fp16",
    "fp8",
    "fp8_block",
    "int4",
    "int4_g32",
    "awq_int4",
    "gptq_int4",
    "autoround_int4",
    "nvfp4",
    "mxfp4",
]


class Figure(Value):
    """One measurement. Lengths are means of a request; None: not said."""

    input_tokens: int | None = Field(None, ge=0, description="0: a prompt too short to matter")
    output_tokens: int | None = Field(None, gt=0)
    concurrency: float = Field(
        ge=1,
        description=(
            "requests at once: the mean where it was measured, else how many clients there were"
        ),
    )
    output_tokens_s: float | None = Field(
        None, gt=0, description="of all requests, over the whole time"
    )
    decode_tokens_s: float | None = Field(
        None, gt=0, description="of one request, after its first token"
    )
    tpot_ms: float | None = Field(
        None, gt=0, description="mean time per output token after the first"
    )
    ttft_ms: float | None = Field(None, gt=0, description="mean time to the first token")

    @model_validator(mode="after")
    def _says(self) -> Figure:
        if self.output_tokens_s is None and self.decode_tokens_s is None and self.tpot_ms is None:
            raise ValueError("a figure has a rate or a time per token")
        return self


class Measured(Value):
    """One engine on one machine, and its results. Nothing here drafts tokens (speculative
    decoding)."""

    model: str = Field(description="as it was named there")
    config: str = Field(pattern=CONFIG)
    quantization: Quantization
    gpu: str = Field(description="a card of profiles/cards.yaml")
    count: int = Field(ge=1, description="GPUs that served these requests")
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    expert_parallel: bool = False
    engine: Literal["vllm", "sglang"]
    version: str | None = Field(None, description="None: not said")
    context: int | None = Field(
        None, gt=0, description="the longest request that the engine was started for"
    )
    max_sequences: int | None = Field(None, gt=0)
    kv_dtype: Literal["auto", "fp8"] = "auto"
    power_w: int | None = Field(None, gt=0, description="a limit set on each card below its own")
    source: str = Field(pattern=r"^https://")
    note: str = ""
    figures: tuple[Figure, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _with_place(self) -> Measured:
        if self.tensor_parallel * self.pipeline_parallel != self.count:
            raise ValueError(
                f"{self.model}: {self.count} GPUs are not {self.tensor_parallel} x"
                f" {self.pipeline_parallel}"
            )
        return self


class Published(Value):
    measured: tuple[Measured, ...]


def published_figures() -> tuple[Measured, ...]:
    return Published.model_validate(read_yaml(ROOT / "benchmarks/published.yaml")).measured


class Setting(Value):
    """The settings of an engine; None: the engine's default."""

    engine: Literal["vllm", "sglang"]
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    expert_parallel: bool = False
    context: int | None = Field(None, gt=0)
    kv_dtype: Literal["fp8", "int8"] | None = None
    max_sequences: int | None = Field(None, gt=0)

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class Purpose(Value):
    """The purpose of a setting by its source, in the words of a wish."""

    goal: Goal = "balanced"
    concurrency: int | None = Field(None, gt=0)
    context: int | None = Field(None, gt=0)
    gpus: int | None = Field(None, gt=0, description="that the source has, of a machine with more")


class Choice(Value):
    """The settings with which people run one model on one machine. Each of them is an equal
    choice."""

    machine: str = Field(description="a snapshot of profiles/hardware")
    model: str
    config: str = Field(pattern=CONFIG)
    quantization: Quantization
    accepted: tuple[Setting, ...] = Field(min_length=1)
    sources: tuple[Annotated[str, Field(pattern=r"^https://")], ...] = Field(min_length=1)
    note: str = ""
    wish: Purpose = Purpose()
    ours: str = Field(
        "",
        description=(
            "why the first plan, though another, is as good, with a source or a measurement"
        ),
    )
    fields: dict[str, Any] = Field(
        {},
        description=(
            "of config.json, where the checkpoint's differ from those of `config`; the note says"
            " from where"
        ),
    )


class Experts(Value):
    choices: tuple[Choice, ...]


def experts() -> tuple[Choice, ...]:
    return Experts.model_validate(read_yaml(ROOT / "benchmarks/experts.yaml")).choices
