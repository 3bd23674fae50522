"""Kinds of media other than text that a model takes. Pure.

Source: get_supported_mm_limits of the processing class of each architecture, vLLM 0.33.0, 0.30.0,
0.26.0 and 0.19.1 (vllm/model_executor/models). Other architectures are read by their config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# A kind with a question mark depends on the model's own config.
_ARCHITECTURES: dict[tuple[str, ...], str] = {
    ("audio",): (
        "AudioFlamingo3ForConditionalGeneration CohereAsrForConditionalGeneration "
        "FireRedASR2ForConditionalGeneration FireRedLIDForConditionalGeneration "
        "FunASRForConditionalGeneration FunAudioChatForConditionalGeneration "
        "GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration "
        "GraniteSpeechPlusForConditionalGeneration MiDashengLMModel MoonshotKimiaForCausalLM "
        "MossAudioModel MossTranscribeDiarizeForConditionalGeneration "
        "MusicFlamingoForConditionalGeneration Qwen2AudioForConditionalGeneration "
        "Qwen3ASRForConditionalGeneration Qwen3ASRForcedAlignerForTokenClassification "
        "Qwen3ASRRealtimeGeneration UltravoxModel VoxtralForConditionalGeneration "
        "VoxtralRealtimeGeneration WhisperForConditionalGeneration"
    ),
    ("image",): (
        "Alpamayo2Super AriaForConditionalGeneration AyaVisionForConditionalGeneration "
        "BagelForConditionalGeneration BailingMoeV3VLForConditionalGeneration "
        "BeeForConditionalGeneration Blip2ForConditionalGeneration CLIPModel "
        "ChameleonForConditionalGeneration Cheers CheersForConditionalGeneration "
        "Cohere2VisionForConditionalGeneration CohereCompassForConditionalGeneration "
        "ColModernVBertForRetrieval ColPaliForRetrieval ColUltraVBertForRetrieval "
        "DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV41ForCausalLM "
        "DeepseekV4ForConditionalGeneration DeepseekVLV2ForCausalLM DotsOCRForCausalLM "
        "Eagle2_5_VLForConditionalGeneration Emu3ForConditionalGeneration FuyuForCausalLM "
        "GLM4VForCausalLM Gemma3ForConditionalGeneration Granite4VisionForConditionalGeneration "
        "H2OVLChatModel HfMoondream HunYuanVLForConditionalGeneration "
        "Idefics3ForConditionalGeneration IsaacForConditionalGeneration "
        "KananaVForConditionalGeneration KimiK3ForConditionalGeneration "
        "KimiVLForConditionalGeneration Lfm2VlForConditionalGeneration "
        "LightOnOCRForConditionalGeneration Llama4ForConditionalGeneration "
        "LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel Llama_Nemotron_Nano_VL "
        "LlavaNextForConditionalGeneration MantisForConditionalGeneration "
        "MiniMaxVL01ForConditionalGeneration Mistral3ForConditionalGeneration ModernVBertModel "
        "MolmoForCausalLM Moondream3ForCausalLM NVLM_D NemotronParseForConditionalGeneration "
        "OpenCUAForConditionalGeneration OpenVLAForActionPrediction Ovis "
        "PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration Phi3VForCausalLM "
        "Phi4ForCausalLMV PixtralForConditionalGeneration PrithviGeoSpatialMAE "
        "QianfanOCRForConditionalGeneration QwenVLForConditionalGeneration "
        "RForConditionalGeneration RadioMBartPrefixForCausalLM SiglipModel SkyworkR1VChatModel "
        "SmolVLMForConditionalGeneration Step3VLForConditionalGeneration "
        "Step3p7ForConditionalGeneration Step5ForConditionalGeneration "
        "StepVLForConditionalGeneration TarsierForConditionalGeneration Terratorch "
        "UnlimitedOCRForCausalLM"
    ),
    ("image", "audio"): ("Gemma3nForConditionalGeneration Phi4MMForCausalLM"),
    ("image", "video"): (
        "ClefFlashForJointSchema Cosmos3EdgeForConditionalGeneration "
        "Cosmos3ForConditionalGeneration D3ForSequenceClassification "
        "Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration "
        "Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration "
        "Glm5NextForConditionalGeneration GlmOcrForConditionalGeneration HCXVisionForCausalLM "
        "HCXVisionV2ForCausalLM InternS1ForConditionalGeneration "
        "InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration "
        "InternS2PreviewForConditionalGeneration InternVLForConditionalGeneration "
        "JinaVLForRanking KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration "
        "KimiK25ForConditionalGeneration LlavaOnevision2ForConditionalGeneration "
        "LlavaOnevisionForConditionalGeneration MiniCPMOcrForConditionalGeneration "
        "MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration "
        "MiniMaxM3SparseForConditionalGeneration Molmo2ForConditionalGeneration "
        "MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration "
        "OpenPanguVLForConditionalGeneration Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM "
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration "
        "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration "
        "Qwen4ExpForConditionalGeneration Tarsier2ForConditionalGeneration"
    ),
    ("image", "video", "audio"): (
        "ClefOmniForJointSchema MiMoV2OmniForCausalLM Qwen2_5OmniForConditionalGeneration "
        "Qwen2_5OmniModel Qwen3OmniMoeForConditionalGeneration"
    ),
    ("image", "video", "audio?"): (
        "DiffusionGemmaForBlockDiffusion EmbeddingGemma2Model Gemma4ForConditionalGeneration "
        "Gemma4UnifiedForConditionalGeneration"
    ),
    ("image", "video?"): (
        "ColQwen3 ColQwen3_5 InternVLChatModel MiniCPMV OpsColQwen3Model Qwen3VLNemotronEmbedModel"
    ),
    ("image", "video?", "audio"): ("MiniCPMO"),
    ("image", "video?", "audio?"): (
        "NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 "
        "NemotronH_Super_Omni_Reasoning_V3"
    ),
    ("image?", "audio?"): ("InklingForConditionalGeneration"),
    ("image?", "video?", "audio?"): ("Dots3NoteForCausalLM"),
    ("video",): ("LlavaNextVideoForConditionalGeneration"),
}
_MEDIA_OF_ARCHITECTURE = {
    name: media for media, names in _ARCHITECTURES.items() for name in names.split()
}

# Fields of a config for each kind, in any part of the file. Source: the configuration classes of
# transformers 5.19.0 and of vllm/transformers_utils/configs of 0.33.0.
_FIELDS = {
    "image": (
        "vision_config",
        "vision_tower_config",
        "vision_encoder_config",
        "vit_config",
        "visual",
        "image_token_id",
        "image_token_index",
        "image_token",
        "img_processor",
        "mm_vision_tower",
    ),
    "video": ("video_token_id", "video_token_index", "video_placeholder"),
    "audio": (
        "audio_config",
        "audio_encoder_config",
        "audio_processor",
        "audio_token_id",
        "audio_token_index",
        "sound_config",
        "speech_config",
        "whisper_config",
        "num_mel_bins",
    ),
}
_DEPTH = 3


def read_media(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of content other than text: image, video and audio. Empty: the model reads text."""
    names = config.get("architectures")
    blocks = list(_nested_configs(config, _DEPTH))
    named_kinds = [
        kind
        for kind, fields in _FIELDS.items()
        if any(block.get(field) is not None for block in blocks for field in fields)
    ]
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and (kinds := _MEDIA_OF_ARCHITECTURE.get(name)):
            return tuple(
                kind
                for kind in _FIELDS
                if kind in kinds or (f"{kind}?" in kinds and kind in named_kinds)
            )
    return tuple(named_kinds)


def _nested_configs(config: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """The config and the objects inside it."""
    yield config
    for value in config.values():
        if depth and isinstance(value, Mapping):
            yield from _nested_configs(value, depth - 1)
