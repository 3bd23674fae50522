"""A start of vLLM, as far as it runs without weights and without memory for its cache.

The command line of a plan goes through the checks of the API server, the configuration, the model
on the meta device, the cache of the planned bytes, the backends with their metadata builders, and
the CUDA graphs. Refusals are the engine's own (`inside/stages.py`).
"""

from __future__ import annotations

import importlib
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ...inside.meta import fit, write_folder
from ...inside.stages import Start
from . import answers
from .model import build_on_meta, given_arguments, parse_arguments, parse_engine_arguments, prepare

# These stages of this engine are never run.
_SKIPPED_STAGES = ("measurement of memory", "capture of CUDA graphs")
# Packages of the extra `audio`.
_SOUND_PACKAGES = ("soundfile", "av", "soxr")


def rehearse(
    files: Mapping[str, bytes],
    argv: Sequence[str],
    kv_bytes: int,
    error_text: Callable[[BaseException], str],
) -> dict[str, Any]:
    """The start of this command line with a cache of `kv_bytes` on each rank; 0: no cache.

    Of pipeline stages the first is built. The answer has the values `blocks` and `graph_sizes`.
    """
    prepare()
    start = Start("vllm", error_text)
    start.left_out += _SKIPPED_STAGES
    with write_folder(files) as folder:
        start.run("arguments", lambda: _serve_arguments(folder, argv))
        start.run("loader", lambda: _loader(folder, argv))
        start.run("tokenizer", lambda: _tokenizer(folder, argv))
        arguments = start.run("parser", lambda: parse_engine_arguments(folder, argv))
        if arguments is not None:
            start.run("", lambda: _build_engine(start, arguments, kv_bytes))
    return start.answer


def _serve_arguments(folder: str, argv: Sequence[str]) -> None:
    """The API server's checks of its own flags, before an engine."""
    arguments = parse_arguments(folder, argv)
    for name in ("openai", "launchers", "common"):
        try:
            module: Any = importlib.import_module(f"vllm.entrypoints.{name}.cli_args")
        except ModuleNotFoundError:
            continue
        module.validate_parsed_serve_args(arguments)
        if hasattr(module, "validate_api_server_args"):
            module.validate_api_server_args(arguments)
        return


def _loader(folder: str, argv: Sequence[str]) -> None:
    """The loader of the weights, which loads nothing."""
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    loaders.get_model_loader(given_arguments(folder, argv).create_load_config())


def _tokenizer(folder: str, argv: Sequence[str]) -> None:
    """The class for the mode of the tokenizer. "auto" looks at files that are not here."""
    mode = given_arguments(folder, argv).tokenizer_mode
    if mode != "auto":
        registry: Any = importlib.import_module("vllm.tokenizers.registry")
        registry.TokenizerRegistry.load_tokenizer_cls(mode)


def _build_engine(start: Start, arguments: Any, kv_bytes: int) -> None:
    """Build model and caches without memory, as a start would."""
    with build_on_meta(arguments) as (engine_config, _):
        start.ran += ["configuration", "model"]
        start.run("", lambda: rehearse_transcription(start, engine_config.model_config))
        cache_layers = start.run("cache layers", lambda: answers.specs(engine_config))
        if not cache_layers:
            return
        plans = answers.planner()
        groups = start.run(
            "cache groups", lambda: answers.group_caches(plans, engine_config, cache_layers)
        )
        if groups is None or not kv_bytes:
            return
        cache = start.run(
            "cache",
            lambda: answers.plan_cache(plans, engine_config, cache_layers, groups, kv_bytes),
        )
        if cache is None:
            return
        start.results["blocks"] = int(cache.num_blocks)
        support = start.run("backends", lambda: _backends(engine_config, cache))
        start.run("graphs", lambda: _graphs(engine_config, cache, support))
        sizes = engine_config.compilation_config.cudagraph_capture_sizes or ()
        start.results["graph_sizes"] = [int(size) for size in sizes]


def rehearse_transcription(start: Start, model: Any) -> None:
    """A model that only transcribes reads a second of silence, as a request brings it: that needs
    packages which no other model does."""
    if not model.registry.is_transcription_only_model(model.architectures, model):
        return
    media: Any = importlib.import_module("vllm.multimodal.media.audio")
    if not hasattr(media, "load_audio"):
        return
    try:
        start.run("sound", lambda: media.load_audio(silence(), sr=16_000), passed_error=ImportError)
    except ImportError:
        missing_packages = [name for name in _SOUND_PACKAGES if find_spec(name) is None]
        start.refuse(
            "sound",
            "sound cannot be read, because packages for it are missing in the engine's environment:"
            f" {', '.join(missing_packages)}; `pip install {' '.join(missing_packages)}` in its"
            " environment",
            "multimodal/media/audio.py",
        )


def silence() -> io.BytesIO:
    """A second of silence as a WAV file, whose rate is not the model's."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound_file:
        sound_file.setnchannels(1)
        sound_file.setsampwidth(2)
        sound_file.setframerate(44_100)
        sound_file.writeframes(bytes(2 * 44_100))
    file.seek(0)
    return file


def _backends(engine_config: Any, cache: Any) -> Any:
    """Blocks of the kernels and metadata builders of all groups: init_attn_backend."""
    utils: Any = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    device = importlib.import_module("torch").device("meta")
    result = fit(
        utils.init_attn_backend, kv_cache_config=cache, vllm_config=engine_config, device=device
    )
    return result[1]


def _graphs(engine_config: Any, cache: Any, support: Any) -> None:
    """_check_and_update_cudagraph_mode of the runners. support: of the backends; None: unknown,
    so that any graph counts as possible."""
    backend: Any = importlib.import_module("vllm.v1.attention.backend")
    drafted = getattr(engine_config.speculative_config, "num_speculative_tokens", 0) or 0
    fit(
        engine_config.compilation_config.resolve_cudagraph_mode_and_sizes,
        min_cg_support=getattr(support, "min_cg_support", backend.AttentionCGSupport.ALWAYS),
        min_cg_attn_backend=getattr(support, "min_cg_attn_backend", None),
        uniform_decode_query_len=1 + drafted,
        use_v2_model_runner=False,
        kv_cache_config=cache,
        max_num_reqs=engine_config.scheduler_config.max_num_seqs,
        is_profiling=False,
    )
