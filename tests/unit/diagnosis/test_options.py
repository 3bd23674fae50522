"""Options that a log shows, and the steps that change nothing about them."""

import pytest

from gateway.diagnosis.options import StartOptions

VLLM = (
    "(APIServer pid=1) INFO 03-14 10:22:05 [utils.py:233] non-default args: {'model': '/m/frob',"
    " 'enforce_eager': True, 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 1},"
    " 'enable_expert_parallel': True, 'pipeline_parallel_size': 1}"
)
SGLANG = (
    "[2026-03-14 10:22:05] server_args=ServerArgs(model_path='/m/frob', attention_backend=None,"
    " disable_cuda_graph=False, speculative_algorithm='EAGLE3', enable_lora=None, pp_size=1)"
)


def options(*lines: str) -> StartOptions:
    read = StartOptions()
    for line in lines:
        read.read(line)
    return read


def test_an_option_is_set_unset_or_not_told() -> None:
    vllm, sglang, nothing = options(VLLM), options(SGLANG), options("Loading weights")
    states = [
        [option_set.is_set(flag) for option_set in (vllm, sglang, nothing)]
        for flag in ("attention-backend", "speculative-config", "speculative-algorithm")
    ]
    assert states == [[False, False, None], [True, None, None], [False, True, None]]
    assert options(VLLM[:-30]).is_set("attention-backend") is None


def test_pairs_within_a_list_are_no_options() -> None:
    option_set = options("server_args=ServerArgs(lora_paths=['a=/m/one', 'b=/m/two'], tp_size=2)")
    assert [option_set.is_set(flag) for flag in ("tp-size", "a", "b")] == [True, None, None]
    assert option_set.options_in("Failed to load a because it adds tokens") == ""


@pytest.mark.parametrize("template", ['"{{ it\'s"', "'{% set a = \\'b\\' %}{{ a'", "'}}'"])
def test_brackets_of_a_text_are_its_own(template: str) -> None:
    option_set = options(
        f"non-default args: {{'chat_template': {template}, 'enforce_eager': True}}"
    )
    assert option_set.is_set("enforce-eager")
    assert option_set.is_set("chat-template")
    assert not option_set.rules_out("Omit --enforce-eager.")


def test_features_are_optional_flags_of_the_start() -> None:
    assert options(VLLM).features == "--speculative-config, --enable-expert-parallel"
    assert options(SGLANG).features == "--speculative-algorithm"
    assert options("").features == ""


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("sglang/srt/layers/attention/frobber_backend.py:forward", "--attention-backend"),
        ("sglang/srt/layers/attention/triton_backend.py:forward", ""),
        ("sglang/srt/managers/frobber.py:run", ""),
        ("sglang/srt/layers/quantization/frobbed_int4.py:apply", ""),
    ],
    ids=["name and value", "name alone", "value alone", "an option of the model"],
)
def test_the_chosen_option_has_its_name_and_its_value_in_the_failing_code(
    text: str, flag: str
) -> None:
    option_set = options(
        "server_args=ServerArgs(model_path='/m/frob', attention_backend='frobber',"
        " quantization='frobbed_int4', max_running_requests=64)"
    )
    assert option_set.chosen_option(text) == flag


def test_options_are_found_by_name_or_value_in_a_text() -> None:
    option_set = options(
        "non-default args: {'model': '/m/tokenizer', 'tokenizer_mode': 'mistral', 'load_format':"
        " 'mistral', 'max_model_len': 4096, 'enable_prefix_caching': False}"
    )
    assert option_set.options_about("TypeError in the Tokenizer") == "--tokenizer-mode"
    assert option_set.options_about("a MistralProcessor") == "--tokenizer-mode, --load-format"
    assert option_set.options_about("caching of 4096 models") == ""


def test_a_part_is_named_without_the_word_of_its_switch() -> None:
    option_set = options(VLLM)
    assert (
        option_set.options_in("Expert parallelism is not supported") == "--enable-expert-parallel"
    )
    assert option_set.options_in("expert-parallel ranks") == "--enable-expert-parallel"
    assert option_set.options_in("an eager expert") == ""


def test_the_former_list_of_all_options_is_read() -> None:
    option_set = options(
        "args: Namespace(model='/m/frob', dtype='auto', enable_expert_parallel=True)"
    )
    assert [option_set.is_set(flag) for flag in ("dtype", "enable-expert-parallel", "port")] == [
        False,
        True,
        None,
    ]


@pytest.mark.parametrize(
    ("step", "ruled_out"),
    [
        ("Omit --attention-backend: the engine chooses.", True),
        ("Omit --attention-backend, --kv-transfer-config and --block-size.", True),
        ("Omit --attention-backend, or use another engine version.", False),
        ("Omit --attention-backend and its like (--moe-backend).", False),
        ("Start without the drafter (omit --speculative-config): it failed.", False),
        ("Start without --enable-expert-parallel.", False),
        ("Omit features of this start, one by one: --enable-expert-parallel.", False),
        ("Disable CUDA graphs (--enforce-eager): slower.", True),
        ("Disable all-reduce (--enforce-eager), then copies (NCCL_P2P_DISABLE=1).", False),
        ("Use another kernel (--moe-backend).", False),
    ],
)
def test_a_step_that_changes_nothing_is_ruled_out(step: str, ruled_out: bool) -> None:
    assert options(VLLM).rules_out(step) is ruled_out
    assert not options("").rules_out(step)


@pytest.mark.parametrize(
    ("step", "narrowed"),
    [
        (
            "Omit settings, one by one: a KV connector (--kv-transfer-config), the drafter.",
            "Omit settings, one by one: the drafter.",
        ),
        ("Omit settings one by one: --kv-cache-dtype, --block-size.", ""),
        (
            "Try settings one by one: --enforce-eager, --no-enable-prefix-caching: each is slower.",
            "Try settings one by one: --no-enable-prefix-caching: each is slower.",
        ),
        ("Omit what is unknown here, one by one: plugins.",) * 2,
        ("Use another engine version.",) * 2,
    ],
)
def test_a_list_of_settings_has_the_changeable_ones(step: str, narrowed: str) -> None:
    assert options(VLLM).narrow(step) == narrowed
    assert options("Loading weights").narrow(step) == step


def test_an_option_is_named_by_its_whole_name_or_short_form() -> None:
    option_set = options(
        "non-default args: {'block_size': 128, 'kv_cache_dtype': 'fp8_e5m2',"
        " 'data_parallel_size': 2, 'max_num_seqs': 8}"
    )
    assert (
        option_set.options_in("block_size=128 and a KV cache dtype")
        == "--block-size, --kv-cache-dtype"
    )
    assert option_set.options_in("2 DP groups") == "--data-parallel-size"
    assert option_set.options_in("no scales for an fp8 KV cache") == "--kv-cache-dtype"
    assert option_set.options_in("no blocks in the KV cache") == ""
    assert option_set.options_in("unblock_sized DPS") == ""
    assert option_set.options_about("fp8_e5m2 is not supported") == "--kv-cache-dtype"


def test_a_feature_with_a_number_is_named_by_two_words_of_its_flag() -> None:
    option_set = options(
        "non-default args: {'decode_context_parallel_size': 8, 'cpu_offload_gb': 4,"
        " 'max_num_seqs': 8}"
    )
    assert (
        option_set.options_about("frob:_context_parallel_frob") == "--decode-context-parallel-size"
    )
    assert option_set.options_about("frob/cpu_offload.py:move") == "--cpu-offload-gb"
    assert option_set.options_about("context of num_seqs in parallel, max 8") == ""


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ("VLLM_USE_FROBCACHE=0", ("VLLM_USE_FROBCACHE", "0")),
        ("export HF_HOME=/m VLLM_USE_FROBCACHE=0 vllm serve /m", ("VLLM_USE_FROBCACHE", "0")),
        ("$ docker run --gpus all -e SGLANG_FROBCACHE=off img", ("SGLANG_FROBCACHE", "off")),
        ("The engine is slow. Set VLLM_USE_FROBCACHE=0 to go on.", ("", "")),
        ("HF_FROBCACHE=1", ("", "")),
        ("VLLM_USE_FROB=0", ("", "")),
        ("VLLM_FROBCACHE_KEY=abc", ("", "")),
        ("VLLM_FROBCACHE_LOGGING=1", ("", "")),
        ("VLLM_FROBCACHE_PASSWD=abc", ("", "")),
        ("SGLANG_FROBCACHE_CREDENTIALS=abc", ("", "")),
        ("VLLM_FROBCACHE_TIMEOUT_S=9", ("", "")),
        ("VLLM_FROBCACHE_HOST=frob", ("", "")),
        # Each of several is read.
        ("VLLM_USE_FROBCACHE=0 VLLM_FROB=1 vllm serve /m", ("VLLM_USE_FROBCACHE", "0")),
        (
            "docker run -e VLLM_FROB=1 --env 'VLLM_USE_FROBCACHE=0' -e VLLM_GROBBER=2 img",
            ("VLLM_USE_FROBCACHE", "0"),
        ),
    ],
)
def test_a_variable_that_a_command_sets_is_named_by_its_part(
    line: str, variable: tuple[str, str]
) -> None:
    assert options(line).variable_about("name 'frob_cache' is not defined") == variable
    assert options(line).variable_about("name 'other' is not defined") == ("", "")


def test_words_of_every_traceback_name_no_variable() -> None:
    option_set = options("export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_EXECUTE_FROB=1")
    frames = "vllm/v1/executor/multiproc_executor.py:execute_model"
    assert option_set.variable_about(f"CUDA runtime error {frames}") == ("", "")


def test_the_option_that_is_zero_is_the_named_one_or_the_only_size() -> None:
    zero_options = options("non-default args: {'tensor_parallel_size': 0, 'seed': 0}")
    assert zero_options.zero_option("heads % tensor_parallel_size") == "--tensor-parallel-size"
    assert zero_options.zero_option("a % seed") == "--seed"
    assert zero_options.zero_option("a % b") == "--tensor-parallel-size"
    two = options("non-default args: {'tensor_parallel_size': 0, 'block_size': 0}")
    assert two.zero_option("a % b") == ""
    # Nothing is divided by a seed or a rank, unless the line says so.
    assert options("non-default args: {'seed': 0, 'node_rank': 0}").zero_option("a % b") == ""
    assert options("non-default args: {'port': 0}").zero_option("a % supported") == ""
    assert options("non-default args: {'seed': 1}").zero_option("a % seed") == ""


def test_flags_and_variables_give_values_in_either_case() -> None:
    start = options("export VLLM_USE_FROB=0", "non-default args: {'frob': True, 'mode': 'Slow'}")
    assert start.gives("VLLM_USE_FROB", "0")
    assert start.gives("frob", "true")
    assert start.gives("mode", "slow")
    assert not start.gives("mode", "fast")
    assert not start.gives("grob", "0")


def test_an_option_is_valued_where_code_has_a_word_of_its_value() -> None:
    start = options("non-default args: {'cache_dtype': 'frobquant_4bit', 'mode': 'slow', 'n': 7}")
    assert start.options_of_value("frobquant_attn") == [("cache-dtype", "frobquant_4bit")]
    assert start.options_of_value("slow_attn") == []


def test_the_model_of_a_part_is_unset_where_the_part_is_on_and_fails() -> None:
    def unset(algorithm: str, path: str, frames: str) -> tuple[str, str]:
        line = (
            f"server_args=ServerArgs(model_path='/m/frob', speculative_algorithm='{algorithm}',"
            f" speculative_draft_model_path={path}, tokenizer_path=None)"
        )
        return options(line).unset_part(frames)

    frames = "sglang/srt/speculative/frob.py:run"
    pair = ("--speculative-draft-model-path", "--speculative-algorithm EAGLE3")
    assert unset("EAGLE3", "None", frames) == pair
    assert unset("EAGLE3", "'/m/draft'", frames) == ("", "")
    assert unset("NGRAM", "None", frames) == ("", "")
    assert unset("EAGLE3", "None", "sglang/srt/models/frob.py:run") == ("", "")


def test_an_option_is_named_by_the_last_two_of_three_words() -> None:
    start = options(SGLANG.replace("pp_size=1", "hicache_storage_backend='file', pp_size=1"))
    assert start.options_in("FrobCache has no storage backend") == "--hicache-storage-backend"
    assert start.options_in("FrobCache has no backend") == ""


def test_a_number_is_that_of_the_first_flag_that_has_one() -> None:
    start = options(VLLM.replace("'pipeline_parallel_size'", "'max_model_len': 4096, 'pp'"))
    assert start.number("context-length", "max-model-len") == 4096
    assert start.number("model", "max-num-seqs") is None
