"""Model folders of hostile authors, and the judge of the effects of reading and planning them.

Each folder is a good model with one to six changes: values of its JSON files, bytes of the headers
of its weights, names, links, pipes and folders in the places of files. A path outside of the folder
must not be opened, and no text of the file there may come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.domain.plan_request import PlanRequest
from gateway.planner.service.messages import WorkerConfig
from gateway.planner.service.plan_program import PlanWorker, answer_frames
from gateway.profiles.profiles import Profiles
from gateway.secret import Secret
from tests.hostile.json_values import changed_json
from tests.support.adapters import adapter_config, shapes
from tests.support.makers import wish
from tests.support.model_files import experts, model, safetensors, sharded_model, write
from tests.support.paths import ROOT
from tests.support.versions import NEWEST_SGLANG, NEWEST_VLLM

SLOW_S = 5.0
"""Processor time of one plan: other work of the machine does not count."""
HUNG_S = 120.0
CANARY = "the-words-of-a-file-elsewhere"
MACHINES = ("2x3090", "4xh100", "cpu")
ENGINES = (f"vllm=={NEWEST_VLLM}", f"sglang=={NEWEST_SGLANG}", "vllm==0.26.0")
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "added_tokens.json",
    "model.safetensors.index.json",
    "chat_template.json",
    "chat_template.jinja",
    "params.json",
    "modules.json",
    "config_sentence_transformers.json",
    "preprocessor_config.json",
    "adapter_config.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
)
_NEW_KEYS = ("", "\ud800", "a" * 10_000, "rope_scaling", "text_config")
# None takes long to run: those of a wish are compiled, which runs their constants.
TEMPLATES = (
    "{{ messages }}",
    "{%" * 5000,
    "{% if a %}" * 5000,
    "{{ " + "(" * 5000,
    "{#" * 9000,
    "\x00",
    "<think>" * 20_000,
    "{{ a" + ".b" * 20_000 + " }}",
    "{{ [" + "1," * 20_000 + "] }}",
    "\ud800",
    "{% generation %}" * 300,
    "{% for a in range(10) %}" * 300,
    "{{ 'a' * 10 ** 6 }}",
    "{{ 1 / 0 }}",
    "{% include '/etc/hostname' %}",
    "{% extends a %}",
    "{{ ''.__class__ }}",
    " " * 200_000,
    "\n" * 99_999,
    "{{ a|" + "b|" * 5000 + "c }}",
    "tool_call" * 20_000,
    "{%- macro a(b) -%}" * 200,
    "{{'" + "\\" * 20_001,
)
OTHER_WEIGHTS = (
    "model.gguf",
    "model-00001-of-00002.gguf",
    "pytorch_model.bin",
    "model.pt",
    "model.ckpt",
    "consolidated.00.pth",
    "adapter_model.bin",
    "tf_model.h5",
    "original/consolidated.safetensors",
)
QUANTIZATION = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
)
_INAPPLICABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""A change to a part that an earlier change has broken."""
Change = Callable[[random.Random, Path, Path], None]


class TooSlow(Exception):
    """A plan took longer than it may."""


@dataclass
class FolderTally:
    """The findings of a run over many folders."""

    folders: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    violations: list[str] = field(default_factory=list)


def seeds() -> list[dict[str, bytes]]:
    """File name -> content of good models."""
    files = [model(), sharded_model(), experts(1)]
    # Those of a preview, before its weights.
    files += [
        {"config.json": path.read_bytes()}
        for path in sorted((ROOT / "tests/models").glob("*.json"))
    ]
    block = [{"quantization_config": block} for block in QUANTIZATION]
    return files + [model(**fields) for fields in block]


def adapters() -> list[dict[str, bytes]]:
    """File name -> content of good adapters."""
    config = adapter_config(rank_pattern={"a.b": 4}, modules_to_save=None, use_dora=False)
    weights = safetensors(shapes(hidden=64, inner=128), "F32")
    return [
        {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights}
    ]


def drafters() -> list[dict[str, bytes]]:
    """File name -> content of good drafters."""
    layer = json.loads(model()["config.json"])
    eagle = layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods},
        "transformer_layer_config": layer,
        "draft_vocab_size": 128,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    weights = safetensors({"fc.weight": (64, 192), "lm_head.weight": (128, 64), "d2t": (128,)})
    return [
        model(),
        *(
            {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
            for config in (eagle, speculators)
        ),
    ]


def hostile_folder(random_: random.Random, root: Path, outside: Path, role: str = "source") -> Path:
    """A new folder in `root`; links of it lead to `outside`, whose files have the canary."""
    folder = root / "model"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, random_.choice(_SEEDS[role]))
    if random_.random() < 0.5:
        for name in random_.sample(NAMES, random_.randint(1, 4)):
            if not (folder / name).exists():
                (folder / name).write_text(json.dumps(_file_beside(random_, name)))
    for _ in range(random_.choice((1, 1, 1, 1, 2, 3, 6))):
        with contextlib.suppress(*_INAPPLICABLE):
            random_.choice(_CHANGES)(random_, folder, outside)
    return folder


def _file_beside(random_: random.Random, name: str) -> Any:
    if name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        return random_.choice(QUANTIZATION)
    if name == "model.safetensors.index.json":
        return {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
    documents = {
        "generation_config.json": {"max_new_tokens": 100, "eos_token_id": [1, 2]},
        "tokenizer_config.json": {"chat_template": "{{ messages }}", "added_tokens_decoder": {}},
        "adapter_config.json": {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "a/b"},
        "modules.json": [{"idx": 0, "type": "sentence_transformers.models.Pooling"}],
    }
    return documents.get(name, {"a": 1})


def _files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in suffixes and path.is_file() and not path.is_symlink()
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes) -> None:
    """Writes a new file: a pipe in its place would wait for a reader, and a link leads outside."""
    _remove(path)
    path.write_bytes(data)


def change_value(random_: random.Random, folder: Path, _: Path) -> None:
    """A value at any depth of a JSON file becomes another JSON text, or comes twice."""
    path = random_.choice(_files(folder, ".json"))
    text = changed_json(random_, json.loads(path.read_bytes()), new_keys=_NEW_KEYS)
    path.write_text(text, "utf-8", "surrogatepass")


def change_bytes(random_: random.Random, folder: Path, _: Path) -> None:
    """Bytes of a file: at the beginning of weights, where their header is, and anywhere else."""
    path = random_.choice(_files(folder, ".json", ".safetensors", ".jinja"))
    data = bytearray(path.read_bytes())
    near = min(len(data), 600) if path.suffix == ".safetensors" else len(data)
    for _number in range(random_.randint(1, 4)):
        at = random_.randrange(near + 1)
        match random_.randrange(6):
            case 0:
                data[at : at + 1] = random_.randbytes(1)
            case 1:
                data[at:at] = random_.choice((b"\x00", b"\xff\xfe", b"{", b"}", b'"', b",", b"9"))
            case 2:
                del data[at : at + random_.randint(1, 30)]
            case 3:
                del data[at:]
            case 4:
                data[:8] = random_.choice((0, 1, 2**31, 2**63, 2**64 - 1, 10**8)).to_bytes(
                    8, "little"
                )
            case _:
                data[at:at] = data[at : at + 200]
    path.write_bytes(data)


def change_header(random_: random.Random, folder: Path, _: Path) -> None:
    """An entry of a safetensors header."""
    path = random_.choice(_files(folder, ".safetensors"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = random_.choice([*header])
    match random_.randrange(5):
        case 0:
            header[name] = json.loads(random_.choice(("[]", "{}", "null", '"a"', '{"dtype": 1}')))
        case 1:
            entry = {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 2**62]}
            header[name] = entry
        case 2:
            header |= {
                f"model.layers.{number}.{'x' * random_.randint(0, 50)}": {
                    "dtype": random_.choice(("F32", "U8", "Q9", "")),
                    "shape": [0] * random_.randint(0, 40),
                    "data_offsets": [0, 0],
                }
                for number in range(random_.choice((1, 100, 20_000)))
            }
        case 3:
            header = {
                f"{key}{random_.choice(('', '.qweight', '/../x', chr(0)))}": value
                for key, value in header.items()
            }
        case _:
            header["__metadata__"] = random_.choice(([], {"a": []}, "a" * 1000, None))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def replace_file(random_: random.Random, folder: Path, outside: Path) -> None:
    """Something else in the place of a file, or beside the files."""
    names = [path.name for path in folder.iterdir()] + [random_.choice(NAMES)]
    path = folder / random_.choice(names)
    _remove(path)
    targets = ("secret.json", "secret.safetensors", "folder", "pipe", "nothing", ".")
    match random_.randrange(8):
        case 0 | 1:
            path.symlink_to(outside / random_.choice(targets))
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to(f"../../{outside.name}/{random_.choice(targets)}")
        case 4:
            os.mkfifo(path)
        case 5:
            path.symlink_to(random_.choice(("/dev/zero", "/dev/stdin", "/proc/self/mem")))
        case 6:
            path.mkdir()
            for number in range(random_.choice((0, 3, 200))):
                (path / f"{number}").touch()
        case _:
            deep = path
            for _number in range(random_.choice((3, 200))):
                deep /= "d"
            deep.mkdir(parents=True)


def name_shards(random_: random.Random, folder: Path, _: Path) -> None:
    """An index whose files are elsewhere, missing or endless."""
    names: list[Any] = [
        "../outside/secret.safetensors",
        "/etc/passwd",
        "a/../../x.safetensors",
        "",
        ".",
        "model.safetensors",
        "\x00",
        "x" * 5000,
        "\ud800.safetensors",
        None,
        7,
        [],
        "config.json",
    ]
    weight_map = {
        f"w{number}": random_.choice(names) for number in range(random_.choice((1, 5, 3000)))
    }
    document = random_.choice(
        ({"weight_map": weight_map}, {"weight_map": names}, {"metadata": 1}, weight_map, [names])
    )
    _write_new(folder / "model.safetensors.index.json", json.dumps(document).encode())


def add_odd_names(random_: random.Random, folder: Path, _: Path) -> None:
    """Files with names that are not Unicode, end like weights, or are many."""
    for number in range(random_.choice((1, 3, 500))):
        name = random_.choice(
            (b"\xff\xfe.safetensors", b"a\nb.json", b"\x1b[2J.bin", b".safetensors", b"a" * 255)
        )
        (folder / os.fsdecode(b"%d" % number + name[:240])).write_bytes(random_.randbytes(20))


def write_template(random_: random.Random, folder: Path, _: Path) -> None:
    """A chat template that takes long to read, in each place of one."""
    text = random_.choice(TEMPLATES)
    templates = [{"name": "default", "template": text}, {"name": "tool_use", "template": 1}]
    kept_choice = random_.choice((text, templates, {"default": text}))
    texts = {
        "chat_template.jinja": text,
        "chat_template.json": json.dumps({"chat_template": kept_choice}),
        "tokenizer_config.json": json.dumps({"chat_template": kept_choice}),
    }
    name = random_.choice([*texts])
    _write_new(folder / name, texts[name].encode("utf-8", "surrogatepass"))


def add_other_weights(random_: random.Random, folder: Path, _: Path) -> None:
    """Weights in another form, with the beginning of one, beside or instead of safetensors."""
    if random_.random() < 0.5:
        for path in _files(folder, ".safetensors"):
            path.unlink()
    huge = (2**63).to_bytes(8, "little")
    contents = (
        b"",
        b"GGUF" + b"\xff" * 60,
        b"GGUF\x03\0\0\0" + huge * 2,
        b"PK\x03\x04",
        b"\x80\x04.",
    )
    for name in random_.sample(OTHER_WEIGHTS, random_.randint(1, 4)):
        (folder / name).parent.mkdir(exist_ok=True)
        _write_new(folder / name, random_.choice(contents))


_CHANGES: tuple[Change, ...] = (
    *(change_value,) * 8,
    write_template,
    add_other_weights,
    change_bytes,
    change_header,
    replace_file,
    replace_file,
    name_shards,
    add_odd_names,
)
_SEEDS = {"source": seeds(), "adapter": adapters(), "drafter": drafters(), "template": [model()]}
# A hostile folder is the model, its adapter or its drafter, or has a template beside it.
_ROLES = ("source", "source", "source", "source", "source", "adapter", "drafter", "template")


class FolderJudge:
    """Plans folders as the plan process does, and watches the opened files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside = root / "outside"
        self.tally = FolderTally()
        (self.outside / "folder").mkdir(parents=True)
        self.good = write(root / "good", model())
        secret = json.dumps({**json.loads(model()["config.json"]), "model_type": CANARY})
        (self.outside / "secret.json").write_text(secret)
        (self.outside / "folder/config.json").write_text(secret)
        (self.outside / "secret.safetensors").write_bytes(model()["model.safetensors"])
        os.mkfifo(self.outside / "pipe")
        roots = tuple(map(str, Profiles().roots))
        self.worker = PlanWorker(
            WorkerConfig(roots, str(root / "data"), Secret("http://127.0.0.1:9"), None, False)
        )

    def run(self, count: int, seed: int, first: int = 0) -> FolderTally:
        """Judge so many folders of a seed, from the first one on."""
        for number in range(first, first + count):
            random_ = random.Random(f"{seed} {number}")
            role = random_.choice(_ROLES)
            folder = hostile_folder(random_, self.root, self.outside, role)
            request = self.request(
                folder,
                random_.choice(ENGINES),
                random_.choice(MACHINES),
                include_uninstalled=random_.random() < 0.8,
                **self.wish_fields(random_, role, folder),
            )
            for problem in self.problems(request):
                self.tally.violations.append(f"seed {seed}, folder {number}: {problem}")
            self.tally.folders += 1
        return self.tally

    def wish_fields(self, random_: random.Random, role: str, folder: Path) -> dict[str, Any]:
        """The fields of a wish in which the folder has that role."""
        good = {"source": str(self.good)}
        match role:
            case "adapter":
                return {**good, "loras": {"l": str(folder)}}
            case "drafter":
                return {**good, "drafter": str(folder)}
            case "template":
                # The API refuses a lone surrogate before.
                texts = [text for text in TEMPLATES if text.isascii()]
                return {"chat_template": {"text": random_.choice(texts)}}
            case _:
                return {}

    def request(
        self,
        folder: Path,
        engine: str = ENGINES[0],
        machine: str = MACHINES[0],
        *,
        include_uninstalled: bool = True,
        **fields: Any,
    ) -> PlanRequest:
        """The request for a plan of a folder, with its files. fields: of the wish."""
        return PlanRequest(
            wish(**{"source": str(folder), "engines": [engine], **fields}),
            machine_name=machine,
            include_uninstalled=include_uninstalled,
            # Most folders lack weights: a plan for show reads the rest of them.
            needs_weights=not include_uninstalled,
            include_files=True,
        )

    def problems(self, request: PlanRequest) -> Iterator[str]:
        """The faults of the answer to a request."""
        began = time.process_time()
        try:
            with _time_limits():
                head, *frames = answer_frames(self.worker, request, b"")
        except TooSlow:
            yield f"no plan within {SLOW_S:g} s of processor time or {HUNG_S:g} s"
            return
        cpu_s = time.process_time() - began
        self.tally.slowest_s = max(self.tally.slowest_s, cpu_s)
        error = json.loads(head)[0]
        self.tally.outcomes[error["class"] if error else "planned"] += 1
        if error and not error["class"]:
            yield f"{error['message']}\n{error['hint']}"
        if error and error["message"].startswith("Reading the model and planning took more"):
            yield "it takes more memory than it may"
        if CANARY.encode() in b"".join((head, *frames)):
            yield f"words of another file come back: {head[:500]!r}"


@contextlib.contextmanager
def _time_limits() -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        raise TooSlow

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SLOW_S)
    signal.setitimer(signal.ITIMER_REAL, HUNG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
