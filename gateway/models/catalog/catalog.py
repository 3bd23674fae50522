"""What a model is: a folder, or a Hugging Face repository at a commit, read into a ModelSpec.

Only config.json, the quantization block in it and the headers of safetensors files are read, never
weights. Whatever is wrong with them is a BadModel that names the file.
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
from gateway.models.catalog.hub import REPOSITORY, Hub
from gateway.models.catalog.hub_cache import COMMIT
from gateway.models.catalog.safetensors import MOST_TENSORS
from gateway.models.drafter import Drafter
from gateway.models.read_drafter import read_drafter as drafter_from
from gateway.models.spec import TOKENIZER_CODE, Tensor, read_model

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
# The index of a model with 10^5 tensors takes 15 MB.
MAX_INDEX_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What transformers calls the files of a model that has several.
_SHARD = re.compile(r"(?P<begin>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_MOST_SHARDS = 10_000
# Of missing shards.
_NAMED = 3
# Values of --load-format that read *.safetensors of the source here, where nothing else is. Source:
# DefaultModelLoader._prepare_weights (vllm/model_executor/model_loader/default_loader.py:164-196 of
# 0.32.0). Other loaders know other places.
_READ_HERE = ("", "auto", "hf", "safetensors")
_FOREIGN = (".bin", ".pt", ".pth", ".gguf")
_SENTENCE_CONFIGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_EMBEDDING_FILES = {"modules.json", "config_sentence_transformers.json", "1_Pooling"}
# A bare ...Model has no head to generate with, but for these. Source:
# vllm/model_executor/models/registry.py.
_GENERATING = re.compile(r"(LMHead|LM|Chat|ChatGLM|Aquila|Omni|Ultravox|Reward|MTP|Draft)Model$")


class Facts(NamedTuple):
    """What `read_model` takes, and a limit of the context that stands outside config.json."""

    source: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, Tensor] | None
    file_bytes: int | None
    remote_code: tuple[str, ...]
    task_hint: Task | None
    sentence_limit: int | None
    chat_template: str | None
    added_tokens: tuple[str, ...]


def load(
    source: str, *, revision: str | None = None, allow_remote_code: bool = False, hub: Hub
) -> ModelSpec:
    """The spec of the model in the folder or repository `source`. Raises BadModel saying what to
    do."""
    return spec_of(gather(source, revision, allow_remote_code=allow_remote_code, hub=hub))


def spec_of(facts: Facts) -> ModelSpec:
    """The spec of a model whose facts were gathered. Raises BadModel."""
    spec: ModelSpec = read_model(*facts[:7]).evolve(
        chat_template=facts.chat_template, added_tokens=facts.added_tokens
    )
    limit = facts.sentence_limit
    if limit is not None and limit < spec.max_position:
        spec = spec.evolve(max_position=limit)
    return spec


def load_drafter(source: str, *, allow_remote_code: bool = False, hub: Hub) -> Drafter:
    """The drafter in the folder or repository `source`. Raises BadModel saying what to do."""
    facts = gather(source, None, allow_remote_code=allow_remote_code, hub=hub)
    if facts.remote_code and not allow_remote_code:
        raise NeedsRemoteCode.of(source, facts.remote_code)
    return drafter_from(facts.source, facts.revision, facts.config, facts.tensors)


def load_adapter(name: str, source: str, *, hub: Hub) -> Adapter:
    """The LoRA adapter in the folder or repository (`org/name`, `org/name@revision`) `source`.
    Raises BadModel saying what to do."""
    files, commit = _files(*_with_revision(source), hub=hub)
    for needed in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if needed not in files.names:
            raise BadModel(
                f"There is no {files.where(needed)}.",
                hint=(
                    f"An adapter is a folder or repository with {ADAPTER_CONFIG} and"
                    f" {ADAPTER_WEIGHTS}, as peft saves it with safe_serialization."
                ),
            )
    (header,) = files.headers([ADAPTER_WEIGHTS])
    place = str(files.path) if isinstance(files, Folder) else source.partition("@")[0]
    return read_adapter(
        name, place, commit, _json_object(files, ADAPTER_CONFIG, MAX_CONFIG_BYTES), header.tensors
    )


def _with_revision(source: str) -> tuple[str, str | None]:
    repo, at, revision = source.partition("@")
    return (repo, revision) if at and REPOSITORY.fullmatch(repo) else (source, None)


def _files(
    source: str, revision: str | None, *, hub: Hub
) -> tuple[Folder | Repository, str | None]:
    """And the commit of a repository. Raises BadModel."""
    # Not Path.is_dir, which raises on what can be no path.
    if source.startswith(("/", "./", "../", "~")) or os.path.isdir(source):  # noqa: PTH112
        return Folder(_resolved(source)), None
    if not REPOSITORY.fullmatch(source):
        raise BadModel(
            f"{printable(source)[:200]} is neither a folder nor a Hugging Face repository.",
            hint="A folder begins with /, ./, ../ or ~; a repository is written org/name.",
        )
    listing = hub.resolve(source, revision)
    return Repository(hub, listing), listing.commit


def gather(source: str, revision: str | None, *, allow_remote_code: bool, hub: Hub) -> Facts:
    """The raw facts of the model, after all checks of its files; blocks."""
    # Not Path.is_dir, which raises on what can be no path.
    if source.startswith(("/", "./", "../", "~")) or os.path.isdir(source):  # noqa: PTH112
        folder = Folder(_resolved(source))
        return _facts(str(folder.path), None, folder)
    if not REPOSITORY.fullmatch(source):
        raise BadModel(
            f"{printable(source)[:200]} is neither a model folder nor a Hugging Face repository.",
            hint="A folder begins with /, ./, ../ or ~; a repository is written org/name.",
        )
    listing = hub.resolve(source, revision)
    if allow_remote_code and not COMMIT.fullmatch(revision or ""):
        raise BadModel(
            f"Code of {source} may only run at a commit that you chose, and"
            f" {revision or 'its default branch'} can change.",
            hint=f"Read the code, then set revision to its commit; now that is {listing.commit}.",
        )
    return _facts(source, listing.commit, Repository(hub, listing))


def weight_files(files: Files) -> list[str]:
    """The safetensors files that make up the model; empty when it has no weights here."""
    present = sorted(name for name in files.names if name.endswith(".safetensors"))
    if INDEX in files.names:
        weight_map = _json_object(files, INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise BadModel(
                f"{files.where(INDEX)} has no weight_map of file names.",
                hint="Download or copy it again.",
            )
        shards = sorted(set(weight_map.values()))
        _check_whole(files, shards, f"that {INDEX} names")
        return shards
    if "model.safetensors" in present:
        return ["model.safetensors"]
    foreign = sorted(name for name in files.names if name.endswith(_FOREIGN))
    if not present and foreign:
        raise BadModel(
            f"The weights are only there as {files.where(foreign[0])}, and only safetensors are"
            " served.",
            hint=(
                "Convert them to safetensors (save_pretrained of transformers does), or take a"
                " repository that has them."
            ),
        )
    numbered = [found for found in map(_SHARD.fullmatch, present) if found is not None]
    for begin, count in sorted(
        {
            (found["begin"], found["count"])
            for found in numbered
            if int(found["count"]) <= _MOST_SHARDS
        }
    ):
        shards = [
            f"{begin}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)
        ]
        _check_whole(files, shards, "that their names tell of")
    return present


def _check_whole(files: Files, shards: list[str], told: str) -> None:
    """Raises BadModel where some of the shards are not there."""
    missing = [shard for shard in shards if shard not in files.names]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        are = "are" if len(missing) > 1 else "is"
        raise BadModel(
            f"{', '.join(map(files.where, missing[:_NAMED]))}{more} {are} missing, {len(missing)}"
            f" of the {len(shards)} shards {told}.",
            hint="Download or copy the model again.",
        )


def check_weights(spec: ModelSpec, load_format: str) -> None:
    """An engine that loads weights in this format ("": nobody set one) finds some. Raises
    BadModel."""
    if spec.tensors_from == "config" and load_format in _READ_HERE:
        raise BadModel(
            f"There are no weights in {printable(spec.source)}: it has a config.json, and no file"
            " *.safetensors.",
            hint=(
                "Download or copy the whole model; `--arg load-format=dummy` serves it with weights"
                " that are made up."
            ),
        )


def _facts(source: str, commit: str | None, files: Files) -> Facts:
    shards = weight_files(files)
    if "config.json" not in files.names:
        raise BadModel(
            f"There is no {files.where('config.json')}.",
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
        if twice := tensors.keys() & header.tensors.keys():
            raise BadModel(
                f"{files.where(shard)} has tensor {min(twice)}, which another file has too.",
                hint="Keep the files of one model only, with the index that belongs to them.",
            )
        tensors |= header.tensors
        if len(tensors) > MOST_TENSORS:
            raise BadModel(
                f"{files.where(shard)} and the weights before it have more than {MOST_TENSORS}"
                " tensors.",
                hint="No model has so many: keep the files of one model only.",
            )
        file_bytes += header.size
    return Facts(
        source=source,
        revision=commit,
        config=config,
        tensors=tensors if shards else None,
        file_bytes=file_bytes if shards else None,
        remote_code=code,
        task_hint="embed" if _embeds(files, config) else None,
        sentence_limit=_sentence_limit(files),
        chat_template=_chat_template(files),
        added_tokens=_added_tokens(files),
    )


def _added_tokens(files: Files) -> tuple[str, ...]:
    """Tokens that tokenizer_config.json and added_tokens.json name; tokenizer.json, which has all,
    takes megabytes."""
    found: set[str] = set()
    if "tokenizer_config.json" in files.names:
        decoder = _json_object(files, "tokenizer_config.json", MAX_CONFIG_BYTES).get(
            "added_tokens_decoder"
        )
        rows = decoder.values() if isinstance(decoder, dict) else ()
        found |= {
            row["content"]
            for row in rows
            if isinstance(row, dict) and isinstance(row.get("content"), str)
        }
    if "added_tokens.json" in files.names:
        found |= set(_json_object(files, "added_tokens.json", MAX_CONFIG_BYTES))
    return tuple(sorted(found))


def _chat_template(files: Files) -> str | None:
    """The chat template where engines look for it; of several that have names, all of them: one is
    for tools.

    Source: transformers 5 reads chat_template.jinja, then chat_template.json, then
    tokenizer_config.json (PreTrainedTokenizerBase.from_pretrained,
    ProcessorMixin.get_processor_dict).
    """
    if "chat_template.jinja" in files.names:
        return files.read("chat_template.jinja", MAX_TEMPLATE_BYTES).decode(errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in files.names:
            found = _json_object(files, name, MAX_CONFIG_BYTES).get("chat_template")
            if isinstance(found, str):
                return found
            if isinstance(found, list):
                return (
                    "\n".join(
                        str(one.get("template", "")) for one in found if isinstance(one, dict)
                    )
                    or None
                )
    return None


def _sentence_limit(files: Files) -> int | None:
    """The length that a sentence-transformers model was made for: engines refuse more, whatever
    config.json says.

    Source: get_sentence_transformer_tokenizer_config (vllm/transformers_utils/config.py), whose
    list of names this is.
    """
    for name in _SENTENCE_CONFIGS:
        if name in files.names:
            limit = _json_object(files, name, MAX_CONFIG_BYTES).get("max_seq_length")
            return (
                limit
                if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
                else None
            )
    return None


def _remote_code(files: Files, config: dict[str, Any]) -> tuple[str, ...]:
    found = ["auto_map in config.json"] if config.get("auto_map") else []
    if "tokenizer_config.json" in files.names and _json_object(
        files, "tokenizer_config.json", MAX_CONFIG_BYTES
    ).get("auto_map"):
        found.append(TOKENIZER_CODE)
    return (*found, *sorted(printable(name) for name in files.names if name.endswith(".py")))


def _embeds(files: Files, config: dict[str, Any]) -> bool:
    if files.names & _EMBEDDING_FILES:
        return True
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return isinstance(first, str) and first.endswith("Model") and not _GENERATING.search(first)


def _json_object(files: Files, name: str, limit: int) -> dict[str, Any]:
    where, hint = files.where(name), "Repair it, or download or copy it again."
    try:
        # The standard library's parser, as configs hold Infinity and NaN, which are not JSON.
        text = files.read(name, limit)
        value = json.loads(text)
        if b"\\u" in text:
            # Half a surrogate pair, which no answer or database of ours could hold.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadModel(
            f"{where} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.",
            hint=hint,
        ) from None
    except UnicodeDecodeError as error:
        raise BadModel(
            f"{where} is not JSON: byte {error.start} is not UTF-8.", hint=hint
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{where} is not JSON that we read: {error}.", hint=hint) from None
    if not isinstance(value, dict):
        raise BadModel(f"{where} is not a JSON object.", hint=hint)
    return value


def _resolved(source: str) -> Path:
    """The path without links, resolved once: one folder is checked, planned and mounted, even when
    a link is changed meanwhile."""
    shown, hint = (
        printable(source),
        "Give the folder that holds config.json, as this machine sees it.",
    )
    try:
        path = Path(source).expanduser().resolve(strict=True)
        str(path).encode()
    except FileNotFoundError:
        raise BadModel(f"There is no folder {shown}.", hint=hint) from None
    except OSError as error:
        raise BadModel(f"{shown} cannot be read: {error.strerror}.", hint=hint) from None
    except (ValueError, RuntimeError):
        raise BadModel(f"{shown} is not a path.", hint=hint) from None
    if not path.is_dir():
        raise BadModel(f"{shown} is not a folder.", hint=hint)
    return path
