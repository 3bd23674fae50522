"""The catalog: a model folder, or a Hugging Face repository at a commit, read into a ModelSpec.

Only config.json, its quantization block and the headers of safetensors files are read, never
weights. Every fault in them raises a BadModel that names the file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from gateway.domain import Adapter, ModelSpec, Task
from gateway.errors import BadModel, NeedsRemoteCode
from gateway.models.adapter import read_adapter
from gateway.models.catalog.files import Files, Folder, Repository, printable
from gateway.models.catalog.hub import REPOSITORY, Hub, gguf_hint, repository_hint
from gateway.models.catalog.hub_cache import COMMIT
from gateway.models.catalog.safetensors import MAX_TENSORS
from gateway.models.catalog.structure_files import structure_text
from gateway.models.drafter import Drafter
from gateway.models.quantization_block import FILES
from gateway.models.read_drafter import read_drafter as drafter_from
from gateway.models.spec import TOKENIZER_CODE, add_quant_files, read_model
from gateway.models.tensor import Tensor

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
# The index of a model with 10^5 tensors takes 15 MB.
MAX_INDEX_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_MODELS_FILE_HINT = (
    "`fitserve config check` checks a file of models, and `fitserve apply` serves it."
)
# The file names that transformers gives to the shards of a model.
_SHARD = re.compile(r"(?P<begin>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_MAX_SHARDS = 10_000
_MAX_NAMED_SHARDS = 3
# Values of --load-format that read *.safetensors of the source. Source:
# DefaultModelLoader._prepare_weights (vllm/model_executor/model_loader/default_loader.py:164-196 of
# 0.32.0). Other loaders read weights from elsewhere.
SAFETENSORS_FORMATS = ("", "auto", "hf", "safetensors")
_FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
_SENTENCE_CONFIGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_EMBEDDING_FILES = {"modules.json", "config_sentence_transformers.json", "1_Pooling"}


class CheckpointFiles(NamedTuple):
    """The arguments of `read_model`, and the context limit that stands outside config.json."""

    source: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, Tensor] | None
    file_bytes: int | None
    remote_code: tuple[str, ...]
    task_hint: Task | None
    sentence_limit: tuple[str, int] | None
    chat_template: str | None
    added_tokens: tuple[str, ...]
    quant_files: dict[str, dict[str, Any]] = {}  # of FILES, by name  # noqa: RUF012
    answer_limit: int | None = None


def load(
    source: str, *, revision: str | None = None, allow_remote_code: bool = False, hub: Hub
) -> ModelSpec:
    """The spec of the model in the folder or repository `source`. Raises BadModel."""
    return build_spec(gather(source, revision, allow_remote_code=allow_remote_code, hub=hub))


def build_spec(files: CheckpointFiles) -> ModelSpec:
    """The spec of a model from its files. Raises BadModel."""
    spec = read_model(*files[:7], structure_text(files.config)).evolve(
        chat_template=files.chat_template,
        added_tokens=files.added_tokens,
        answer_limit=files.answer_limit,
    )
    if files.quant_files:
        spec = add_quant_files(spec, files.quant_files)
    if files.sentence_limit is None:
        return spec
    name, limit = files.sentence_limit
    if limit >= spec.max_position:
        return spec
    return spec.evolve(
        max_position=limit,
        sentence_limit=limit,
        sources={**spec.sources, "max_position": f"max_seq_length in {name}"},
    )


def load_drafter(source: str, *, hub: Hub) -> Drafter:
    """The drafter in the folder or repository `source`. Raises BadModel, NeedsRemoteCode."""
    files = gather(source, None, allow_remote_code=False, hub=hub)
    if files.remote_code:
        raise NeedsRemoteCode.source_error(source, files.remote_code)
    return drafter_from(files.source, files.revision, files.config, files.tensors)


def load_adapter(name: str, source: str, *, hub: Hub) -> Adapter:
    """The LoRA adapter in the folder or repository (`org/name`, `org/name@revision`) `source`.

    Raises BadModel.
    """
    files, commit = _files(*_split_revision(source), hub=hub)
    for name_in_folder in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if name_in_folder not in files.names:
            raise BadModel(
                f"There is no {files.location(name_in_folder)}.",
                hint=(
                    f"An adapter is a folder or repository with {ADAPTER_CONFIG} and"
                    f" {ADAPTER_WEIGHTS}, as peft saves it with safe_serialization."
                ),
            )
    (header,) = files.headers([ADAPTER_WEIGHTS])
    repository = str(files.path) if isinstance(files, Folder) else source.partition("@")[0]
    return read_adapter(
        name,
        repository,
        commit,
        _json_object(files, ADAPTER_CONFIG, MAX_CONFIG_BYTES),
        header.tensors,
    )


def _split_revision(source: str) -> tuple[str, str | None]:
    repo, separator, revision = source.partition("@")
    return (repo, revision) if separator and REPOSITORY.fullmatch(repo) else (source, None)


def _files(
    source: str, revision: str | None, *, hub: Hub
) -> tuple[Folder | Repository, str | None]:
    """The files, and the commit where `source` is a repository. Raises BadModel."""
    # Path.is_dir raises on a text that cannot be a path.
    if source.startswith(("/", "./", "../", "~")) or os.path.isdir(source):  # noqa: PTH112
        return Folder(_resolve(source)), None
    if not REPOSITORY.fullmatch(source):
        raise BadModel(
            f"{printable(source)[:200]} is neither a folder nor a Hugging Face repository.",
            hint="A folder begins with /, ./, ../ or ~; a repository is written org/name.",
        )
    listing = hub.resolve(source, revision)
    return Repository(hub, listing), listing.commit


def gather(
    source: str, revision: str | None, *, allow_remote_code: bool, hub: Hub
) -> CheckpointFiles:
    """The contents of the model's files, after all checks. Blocks. Raises BadModel."""
    # Path.is_dir raises on a text that cannot be a path.
    if source.startswith(("/", "./", "../", "~")) or os.path.isdir(source):  # noqa: PTH112
        folder = Folder(_resolve(source))
        return _read_checkpoint(str(folder.path), None, folder)
    if not REPOSITORY.fullmatch(source):
        raise BadModel(
            f"{printable(source)[:200]} is neither a model folder nor a Hugging Face repository.",
            hint=repository_hint(source),
        )
    listing = hub.resolve(source, revision)
    if allow_remote_code and not COMMIT.fullmatch(revision or ""):
        raise BadModel(
            f"Code of {source} may run only at a fixed commit, and"
            f" {revision or 'its default branch'} can change.",
            hint=f"Read the code, then set revision to its present commit {listing.commit}.",
        )
    return _read_checkpoint(source, listing.commit, Repository(hub, listing))


def weight_files(files: Files) -> list[str]:
    """The safetensors files that make up the model; empty when it has no weights here."""
    present_names = sorted(name for name in files.names if name.endswith(".safetensors"))
    if INDEX in files.names:
        weight_map = _json_object(files, INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise BadModel(
                f"{files.location(INDEX)} has no weight_map of file names.",
                hint="Download or copy it again.",
            )
        shards = sorted(set(weight_map.values()))
        _check_complete(files, shards, f"that {INDEX} lists")
        return shards
    if "model.safetensors" in present_names:
        return ["model.safetensors"]
    foreign_names = sorted(name for name in files.names if name.endswith(_FOREIGN_SUFFIXES))
    if not present_names and foreign_names:
        raise BadModel(
            f"The weights are in {files.location(foreign_names[0])}, and only safetensors are"
            " served.",
            hint=(
                "Convert them to safetensors with save_pretrained of transformers, or choose a"
                " repository that has safetensors."
            ),
        )
    matches = [match for match in map(_SHARD.fullmatch, present_names) if match is not None]
    for begin, count in sorted(
        {
            (match["begin"], match["count"])
            for match in matches
            if int(match["count"]) <= _MAX_SHARDS
        }
    ):
        shards = [
            f"{begin}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)
        ]
        _check_complete(files, shards, "that their names count")
    return present_names


def _check_complete(files: Files, shards: list[str], origin: str) -> None:
    """Check that no shard is missing. Raises BadModel. origin: where their names come from."""
    missing_shards = [shard for shard in shards if shard not in files.names]
    if missing_shards:
        unnamed_count = len(missing_shards) - _MAX_NAMED_SHARDS
        rest_words = f" and {unnamed_count} more" if unnamed_count > 0 else ""
        are = "are" if len(missing_shards) > 1 else "is"
        names = ", ".join(map(files.location, missing_shards[:_MAX_NAMED_SHARDS]))
        raise BadModel(
            f"{names}{rest_words} {are} missing,"
            f" {len(missing_shards)} of the {len(shards)} shards {origin}.",
            hint="Download or copy the model again.",
        )


def check_weights(spec: ModelSpec, load_format: str) -> None:
    """Check that an engine with this load format ("": the default) finds weights.

    Raises BadModel.
    """
    if spec.tensors_from == "config" and load_format in SAFETENSORS_FORMATS:
        raise BadModel(
            f"There are no weights in {printable(spec.source)}: it has a config.json and no"
            " *.safetensors file.",
            hint=(
                "Download or copy the whole model. `--arg load-format=dummy` serves it with random"
                " weights."
            ),
        )


def _read_checkpoint(source: str, commit: str | None, files: Files) -> CheckpointFiles:
    """Config and headers of a model's files. Raises BadModel."""
    shards = weight_files(files)
    if "config.json" not in files.names:
        raise BadModel(
            f"There is no {files.location('config.json')}.",
            hint=(
                "A model folder or repository holds config.json and *.safetensors, as transformers"
                " writes them."
            ),
        )
    config = _json_object(files, "config.json", MAX_CONFIG_BYTES)
    code = _remote_code(files, config)
    tensors: dict[str, Tensor] = {}
    file_bytes = 0
    for shard, header in zip(shards, files.headers(shards), strict=True):
        if duplicates := tensors.keys() & header.tensors.keys():
            raise BadModel(
                f"{files.location(shard)} has tensor {min(duplicates)}, and another file has it"
                " too.",
                hint="Keep the files of one model only, with their index.",
            )
        tensors |= header.tensors
        if len(tensors) > MAX_TENSORS:
            raise BadModel(
                f"{files.location(shard)} and the files before it have more than {MAX_TENSORS}"
                " tensors.",
                hint="Keep the files of one model only.",
            )
        file_bytes += header.size
    return CheckpointFiles(
        source=source,
        revision=commit,
        config=config,
        tensors=tensors if shards else None,
        file_bytes=file_bytes if shards else None,
        remote_code=code,
        task_hint="embed" if files.names & _EMBEDDING_FILES else None,
        sentence_limit=_sentence_limit(files),
        chat_template=_chat_template(files),
        added_tokens=_added_tokens(files),
        quant_files={
            name: _json_object(files, name, MAX_CONFIG_BYTES)
            for name in FILES
            if name in files.names
        },
        answer_limit=_answer_limit(files),
    )


def _answer_limit(files: Files) -> int | None:
    """The tokens of an answer by generation_config.json. Engines go on without a file that cannot
    be read."""
    if "generation_config.json" not in files.names:
        return None
    try:
        limit = _json_object(files, "generation_config.json", MAX_CONFIG_BYTES).get(
            "max_new_tokens"
        )
    except BadModel:
        return None
    return limit if type(limit) is int and limit > 0 else None


def _added_tokens(files: Files) -> tuple[str, ...]:
    """Tokens that tokenizer_config.json and added_tokens.json name.

    tokenizer.json has all tokens, and takes megabytes.
    """
    tokens: set[str] = set()
    if "tokenizer_config.json" in files.names:
        decoder = _json_object(files, "tokenizer_config.json", MAX_CONFIG_BYTES).get(
            "added_tokens_decoder"
        )
        rows = decoder.values() if isinstance(decoder, dict) else ()
        tokens |= {
            row["content"]
            for row in rows
            if isinstance(row, dict) and isinstance(row.get("content"), str)
        }
    if "added_tokens.json" in files.names:
        tokens |= set(_json_object(files, "added_tokens.json", MAX_CONFIG_BYTES))
    return tuple(sorted(tokens))


def _chat_template(files: Files) -> str | None:
    """The chat template that engines read; named templates are joined, as one is for tools.

    Source: transformers 5 reads chat_template.jinja, then chat_template.json, then
    tokenizer_config.json (PreTrainedTokenizerBase.from_pretrained,
    ProcessorMixin.get_processor_dict).
    """
    if "chat_template.jinja" in files.names:
        return files.read("chat_template.jinja", MAX_TEMPLATE_BYTES).decode(errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in files.names:
            template = _json_object(files, name, MAX_CONFIG_BYTES).get("chat_template")
            if isinstance(template, str):
                return template
            if isinstance(template, list):
                texts = [str(row.get("template", "")) for row in template if isinstance(row, dict)]
                return "\n".join(texts) or None
    return None


def _sentence_limit(files: Files) -> tuple[str, int] | None:
    """The file and the length in tokens that a sentence-transformers model was trained for.

    Engines refuse longer inputs, even where config.json allows them. Source of the file names:
    get_sentence_transformer_tokenizer_config (vllm/transformers_utils/config.py).
    """
    for name in _SENTENCE_CONFIGS:
        if name in files.names:
            limit = _json_object(files, name, MAX_CONFIG_BYTES).get("max_seq_length")
            if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
                return name, limit
            return None
    return None


def _remote_code(files: Files, config: dict[str, Any]) -> tuple[str, ...]:
    locations = ["auto_map in config.json"] if config.get("auto_map") else []
    if "tokenizer_config.json" in files.names and _json_object(
        files, "tokenizer_config.json", MAX_CONFIG_BYTES
    ).get("auto_map"):
        locations.append(TOKENIZER_CODE)
    return (*locations, *sorted(printable(name) for name in files.names if name.endswith(".py")))


def _json_object(files: Files, name: str, limit: int) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes. Raises BadModel."""
    location = files.location(name)
    hint = "Repair it, or download or copy it again."
    try:
        # The standard library's parser takes the Infinity and NaN of configs, which are not JSON.
        text = files.read(name, limit)
        value = json.loads(text)
        if b"\\u" in text:
            # Half of a surrogate pair fits in no answer and no database.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadModel(
            f"{location} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.",
            hint=hint,
        ) from None
    except UnicodeDecodeError as error:
        raise BadModel(
            f"{location} is not JSON: byte {error.start} is not UTF-8.", hint=hint
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadModel(
            f"{location} uses JSON features that are not supported: {error}.", hint=hint
        ) from None
    if not isinstance(value, dict):
        raise BadModel(f"{location} is not a JSON object.", hint=hint)
    return value


def _resolve(source: str) -> Path:
    """The path without links. Raises BadModel.

    The path is resolved once, so that the folder that is checked, planned and mounted is the same
    even when a link changes in between.
    """
    name = printable(source)
    hint = "Give the folder that holds config.json, as this machine sees it."
    try:
        path = Path(source).expanduser().resolve(strict=True)
        str(path).encode()
    except FileNotFoundError:
        raise BadModel(f"There is no folder {name}.", hint=hint) from None
    except OSError as error:
        raise BadModel(f"{name} cannot be read: {error.strerror}.", hint=hint) from None
    except (ValueError, RuntimeError):
        raise BadModel(f"{name} is not a path.", hint=hint) from None
    if not path.is_dir():
        hints = {".gguf": gguf_hint(name), ".yaml": _MODELS_FILE_HINT, ".yml": _MODELS_FILE_HINT}
        raise BadModel(f"{name} is not a folder.", hint=hints.get(path.suffix.lower(), hint))
    return path
