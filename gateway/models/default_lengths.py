"""Longest inputs by model type: defaults of the configuration classes of transformers.

Source: an instance of each class of CONFIG_MAPPING of transformers 5.19.0, and of its text model.
Fields that `attribute_map` renames stand under the name of config.json.
"""

from __future__ import annotations

_TYPES: dict[str, dict[int, str]] = {
    "max_position_embeddings": {
        9: "moshi_depth",
        13: "qwen3_asr_encoder",
        16: "owlv2 owlv2_text_model owlvit owlvit_text_model",
        33: "csm_depth_decoder_model",
        40: "vilt",
        50: "florence_vision",
        64: (
            "siglip siglip2 siglip2_text_model siglip_text_model tipsv2 tipsv2_text_model "
            "videoprism videoprism_text_model"
        ),
        77: (
            "aimv2 aimv2_text_model clip clip_text_model clipseg clipseg_text_model groupvit "
            "groupvit_text_model metaclip_2 metaclip_2_text_model omdet-turbo sam3 sam3_lite_text "
            "sam3_lite_text_text_model xclip xclip_text_model"
        ),
        128: "blenderbot",
        450: "vibevoice_asr",
        510: "nystromformer",
        512: (
            "albert align align_text_model bert bert-generation blenderbot-small blip "
            "blip_2_qformer blip_text_model bros camembert chinese_clip chinese_clip_text_model "
            "convbert data2vec-text deberta deberta-v2 distilbert dpr electra ernie flaubert "
            "flava flava_text_model fnet granite_speech5_encoder grounding-dino ibert "
            "instructblip_qformer instructblipvideo_qformer layoutlm layoutlmv2 layoutlmv3 "
            "layoutxlm lilt longformer luke lxmert markuplm megatron-bert mm-grounding-dino "
            "mobilebert moonshine mpnet mra prophetnet rembert roberta roberta-prelayernorm "
            "roc_bert sew-d splinter squeezebert trocr tvp visual_bert xlm xlm-roberta xmod"
        ),
        514: (
            "altclip altclip_text_model bridgetower bridgetower_text_model clap clap_text_model "
            "xlm-roberta-xl"
        ),
        608: "clvp_decoder",
        750: "kyutai_speech_to_text",
        1024: (
            "bart biogpt canary canary_decoder cohere_asr deformable_detr dia_encoder florence2 "
            "fsmt git m2m_100 marian mbart muse_glimmer_vision mvp nllb-moe pegasus plbart "
            "seamless_m4t tapas"
        ),
        1026: "esm",
        1500: "glmasr_encoder voxtral_realtime_encoder",
        1536: "roformer",
        2048: (
            "aria aria_text bitnet blip-2 csm deepseek_ocr2 deepseek_ocr2_text deepseek_v2 "
            "deepseek_vl deepseek_vl_hybrid diffllama doge dots1 esmc exaone4 exaone4_5 "
            "exaone_moe falcon glmasr gpt_neo gpt_neox gpt_neox_japanese granite granite4_vision "
            "granite4_vision_text granite_speech granite_speech_plus granitemoe granitemoe_swa "
            "granitemoehybrid granitemoeshared higgs_audio_v2 hrm_text hunyuan_v1_dense "
            "hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hyperclovax hyperclovax_vision_v2 idefics "
            "idefics3 instructblip instructblipvideo janus kosmos-2 kosmos_2_text_model llama "
            "llava llava_next llava_next_video musicgen_decoder musicgen_melody_decoder nanochat "
            "nomic_bert olmo olmo2 olmo3 opt perceiver perception_lm phi smolvlm video_llava "
            "vipllava voxtral xglm"
        ),
        2049: "fun_asr_nano_encoder",
        2704: "step3p5_vision",
        3000: "moshi",
        3072: "dia dia_decoder",
        4096: (
            "arcee big_bird bigbird_pegasus blt blt_global_transformer chameleon deepseek_v3 "
            "flex_olmo helium jetmoe kimi_k25 kosmos-2.5 kosmos_2_5_text_model "
            "moonshine_streaming moonshine_streaming_encoder nemotron nemotron_h nemotron_h_omni "
            "neucodec olmoe phi3 reformer seamless_m4t_v2 stablelm starcoder2 xcodec2 yoso zamba "
            "zamba2"
        ),
        5000: "nemotron3_diarization_audio nemotron_asr_streaming_encoder parakeet_encoder",
        8000: "mimi",
        8192: (
            "EvollaModel aya_vision blt_patcher cohere cohere2 cohere2_moe cohere2_vision "
            "cohere_compass cohere_compass_text colmodernvbert colpali eurobert evolla falcon_h1 "
            "gemma gemma2 granite_swa gte jais2 modernbert modernbert-decoder modernvbert "
            "paligemma pe_audio t5_gemma_module t5gemma vaultgemma"
        ),
        8194: "jina_embeddings_v3",
        9216: "emu3 emu3_text_model",
        10000: "lasr_encoder pe_audio_encoder",
        16384: "afmoe canine fuyu neomme pegasus_x persimmon timesfm2_5",
        24576: "blt_local_decoder blt_local_encoder",
        32768: (
            "audioflamingo3 axk1 colqwen2 deepseek_ocr2_encoder fast_vlm fun_asr_nano gemma3n "
            "gemma3n_text glm46v glm4v glm4v_text glmga got_ocr2 internvl lighton_ocr "
            "llava_onevision minicpm3 minicpmv4_6 minicpmv4_7 musicflamingo ovis2 pp_chart2table "
            "qianfan_ocr qwen2 qwen2_5_omni qwen2_5_omni_dit qwen2_5_omni_talker "
            "qwen2_5_omni_text qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_audio "
            "qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text "
            "qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe "
            "qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text "
            "qwen3_omni_moe_thinker qwen4_exp qwen4_exp_text smollm3 vibevoice video_llama_3"
        ),
        65536: "apertus glm4v_moe glm4v_moe_text olmo_hybrid",
        128000: (
            "cosmos3_omni lfm2 lfm2_moe lfm2_vl qwen3_vl qwen3_vl_moe qwen3_vl_moe_text "
            "qwen3_vl_text step3p5 step3p7"
        ),
        131072: (
            "axk2 cosmos3_edge cosmos3_edge_text cwm diffusion_gemma diffusion_gemma_text "
            "ernie4_5 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text gemma3 gemma3_text gemma4 "
            "gemma4_text gemma4_vision glm glm4 glm4_moe glm_image glm_image_text glm_ocr "
            "glm_ocr_text gpt_oss hy_v3 idefics2 inkling_mm_model inkling_text laguna llama4 "
            "llama4_text longcat_flash mellum mimo_v2_flash minimax ministral mistral mistral3 "
            "mixtral mllama mllama_text_model muse_glimmer muse_glimmer_assistant "
            "muse_glimmer_text openai_privacy_filter paddleocr_vl paddleocr_vl_text "
            "phi4_multimodal phimoe shieldgemma2 solar_open t5gemma2 t5gemma2_decoder "
            "t5gemma2_encoder t5gemma2_text voxtral_realtime voxtral_realtime_text youtu zaya"
        ),
        163840: "deepseek_v32",
        196608: "minimax_m2",
        202752: "glm4_moe_lite glm_moe_dsa",
        262144: (
            "bamba embedding_gemma2 embedding_gemma2_text gemma4_unified gemma4_unified_text "
            "hy_v4 jamba ministral3"
        ),
        524288: "minimax_m3_vl minimax_m3_vl_text seed_oss",
        1048576: "deepseek_v4 glm5_next glm5_next_text mistral4",
    },
    "n_positions": {
        256: "ctrl",
        512: "openai-gpt",
        1024: "decision_transformer gpt-sw3 gpt2 gpt_bigcode imagegpt",
        2048: "codegen gptj",
    },
    "max_seq_len": {
        2048: "dbrx mpt",
    },
    "model_max_length": {
        1048576: "kimi_linear",
    },
    "seq_len": {
        4096: "pix2struct_vision_model",
    },
    "max_target_positions": {
        448: "whisper",
        1024: "speech_to_text",
    },
}

OUTER_LENGTHS: dict[str, dict[str, int]] = {
    "fun_asr_nano": {"max_position_embeddings": 40960},
    "glmasr": {"max_position_embeddings": 8192},
    "idefics2": {"max_position_embeddings": 32768},
    "lighton_ocr": {"max_position_embeddings": 40960},
    "voxtral": {"max_position_embeddings": 131072},
}
"""Lengths of text models that differ from the defaults of their class, by outer model type."""


def _lengths_by_type() -> dict[str, dict[str, int]]:
    lengths_by_type: dict[str, dict[str, int]] = {}
    for field, lengths in _TYPES.items():
        for length, names in lengths.items():
            for name in names.split():
                lengths_by_type.setdefault(name, {})[field] = length
    return lengths_by_type


DEFAULTS = _lengths_by_type()
"""Fields of config.json and their values where the file lacks them, by model type."""
