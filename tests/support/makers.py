"""Small values for tests: a model, an engine, machines, attempts."""

from __future__ import annotations

from typing import Any

from gateway.domain import Attempt, Decision, Engine, Fact, Flag, Hardware, ModelSpec, Plan, Wish
from gateway.profiles.profiles import Profiles
from tests.support.planning import decide
from tests.support.published import model_from_config

GIB = 1024**3

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def spec(**changes: Any) -> ModelSpec:
    """Llama 3.1 8B from its config alone, with changes to the config."""
    return model_from_config({**LLAMA_8B, **changes}, source="/models/llama")


def engine(device: str = "cuda", version: str = "9.9.0", **changes: Any) -> Engine:
    """An engine with the flags that planning knows."""
    flags = {
        name: Flag(type="int")
        for name in (
            "tensor-parallel-size",
            "max-model-len",
            "max-num-seqs",
            "max-num-batched-tokens",
        )
    }
    flags |= {
        "gpu-memory-utilization": Flag(type="float"),
        "kv-cache-memory-bytes": Flag(type="int"),
    }
    flags |= {
        "enforce-eager": Flag(type="bool"),
        "disable-custom-all-reduce": Flag(type="bool"),
        "host": Flag(type="str", is_reserved=True),
        "chat-template": Flag(type="str", is_reserved=True),
        "enable-lora": Flag(type="bool"),
        "lora-modules": Flag(type="str", is_reserved=True),
        "max-lora-rank": Flag(type="int", choices=("8", "16")),
        "max-loras": Flag(type="int"),
    }
    flags |= {
        "dtype": Flag(
            type="str", choices=("auto", "bfloat16", "float16", "float32", "half", "float")
        )
    }
    fields: dict[str, Any] = {
        "kind": "vllm" if device == "cuda" else "vllm-cpu",
        "version": version,
        "device": device,
        "image": f"engine:{version}",
        "container_command": ("python3", "-m", "engine"),
        "process_command": ("{env}/bin/python", "-m", "engine"),
        "default_utilization": 0.92,
        "block_size": 16 if device == "cuda" else 128,
        "flags": flags,
        "key_env": "VLLM_API_KEY",
        "user_env": ("VLLM_CPU_KVCACHE_SPACE", "NCCL_P2P_DISABLE"),
    }
    return Engine.model_validate({**fields, **changes})


def machine(name: str = "2x3090") -> Hardware:
    return Profiles().hardware(name)


def wish(**fields: Any) -> Wish:
    return Wish.model_validate({"name": "m", "source": "/models/llama", **fields})


def make_decision(
    hardware: str = "2x3090",
    *,
    facts: tuple[Fact, ...] = (),
    model: ModelSpec | None = None,
    **fields: Any,
) -> Decision:
    """The decision for Llama 8B on a snapshot with one engine of the right device."""
    hardware_value = machine(hardware)
    return decide(
        model or spec(),
        hardware_value,
        [engine("cuda" if hardware_value.gpus else "cpu")],
        wish(**fields),
        facts,
    )


def plan(hardware: str = "2x3090", **fields: Any) -> Plan:
    return make_decision(hardware, **fields).plans[0]


def attempt(number: int = 1, state: str = "starting", **fields: Any) -> Attempt:
    base: dict[str, Any] = {
        "id": number,
        "model": "m",
        "replica": 0,
        "state": state,
        "plan": plan(),
        "port": 8000,
        "started_at": 0.0,
    }
    base |= fields
    base.setdefault("fingerprint", base["plan"].fingerprint)
    return Attempt.model_validate(base)
