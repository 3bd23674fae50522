"""No plan drops images, video or audio silently."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, ModelSpec
from gateway.models.media import read_media
from gateway.planner import explain
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, wish
from tests.support.paths import MODELS
from tests.support.planning import decide
from tests.support.published import config, model_from_config, published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
SEEING = sorted(path.stem for path in MODELS.glob("*.json") if read_media(config(path.stem)))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 1280,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": 51866,
    "torch_dtype": "float16",
}


def make_decision(model: ModelSpec, *refs: str, **fields: Any) -> Decision:
    engines = [PROFILES.engine(ref) for ref in refs or (SGLANG_REF, VLLM_REF)]
    rules = PROFILES.rules(engines)
    fields = {"tensor_parallel": 4, **fields}
    return decide(
        model, machine("8xh100"), engines, wish(**fields), rules=rules, gpus=PROFILES.gpus
    )


@pytest.mark.parametrize("name", SEEING)
def test_the_first_plan_serves_all_that_a_model_takes(name: str) -> None:
    model = published_model(name)
    for text_only in (False, True):
        decision = make_decision(model, text_only=text_only)
        best = decision.plans[0]
        assert (best.engine.kind, best.drops) == ("vllm", ())
        assert best.model.inputs == ("text", *read_media(model.config))
        assert all(not plan.drops or text_only for plan in decision.plans)
        assert not explain.headline(decision).startswith("Without")


def test_a_quantized_checkpoint_that_no_reader_knows_keeps_its_images() -> None:
    """Qwen2-VL 7B in GPTQ: both engines are unsure of it, and one sees."""
    fields = config("qwen2.5-vl-7b", quantization_config=GPTQ) | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
    }
    decision = make_decision(model_from_config(fields), text_only=True)
    assert decision.plans[0].engine.kind == "vllm"
    assert decision.plans[0].drops == ()


def test_a_text_only_plan_is_marked_in_its_first_line() -> None:
    model = published_model("qwen3-vl-8b")
    decision = make_decision(model, SGLANG_REF)
    assert (decision.plans, [rejection.verdict for rejection in decision.rejected]) == (
        (),
        ["text_only"],
    )
    accepted = make_decision(model, SGLANG_REF, text_only=True)
    assert accepted.plans[0].drops == ("image", "video")
    assert explain.headline(accepted).startswith("Without image, video: ")
    assert "without image, video" in explain.changes(accepted.plans[0])


@pytest.mark.parametrize(
    ("args", "drops"),
    [
        ({"limit-mm-per-prompt": '{"image": 0, "video": 0}'}, ("image", "video")),
        ({"limit-mm-per-prompt": '{"video": 0}'}, ("video",)),
        ({"limit-mm-per-prompt": '{"image": {"count": 0}, "video": 0}'}, ("image", "video")),
        ({"limit_mm_per_prompt": '{"image": {"count": 0, "width": 512}}'}, ("image",)),
        ({"language-model-only": True}, ("image", "video")),
        ({"limit-mm-per-prompt": '{"image": 2}'}, ()),
    ],
)
def test_flags_of_the_user_drop_media_too(args: dict[str, Any], drops: tuple[str, ...]) -> None:
    best = make_decision(published_model("qwen3-vl-8b"), VLLM_REF, args=args).plans[0]
    assert best.drops == drops
    assert not set(drops) & set(best.model.inputs)


def test_a_batch_holds_a_whole_recording_of_a_speech_model() -> None:
    """vLLM ends with `max_tokens_per_mm_item is larger than max_num_batched_tokens`."""
    for frames, tokens in ((1500, 8192), (9000, 9000)):
        fields = WHISPER | {"max_source_positions": frames}
        model = model_from_config(fields)
        best = make_decision(model, VLLM_REF, tensor_parallel=1).plans[0]
        assert best.max_num_batched_tokens.value == tokens


def test_a_speech_model_is_not_served_without_sound() -> None:
    model = model_from_config(WHISPER)
    decision = make_decision(model, tensor_parallel=1, text_only=True)
    best = decision.plans[0]
    assert (best.model.task, best.model.inputs) == ("transcribe", ("audio",))
    assert best.max_model_len.value == 448
    assert best.max_model_len.source == "max_target_positions in config.json"
    assert {plan.engine.kind for plan in decision.plans} == {"vllm"}
    assert decision.rejected[0].verdict == "unsafe_media"
