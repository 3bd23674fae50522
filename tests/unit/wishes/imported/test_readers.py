"""Files of llama-swap, Ollama and Docker Compose become models, and the rest is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.engines.common.open_flags import closing_reason
from gateway.errors import BadRequest
from gateway.profiles.profiles import Profiles
from gateway.wishes.imported.engine_command import engine_command, split_words
from gateway.wishes.imported.readers import EngineKnowledge, ImportedModels, read_file
from gateway.wishes.models_file import load
from tests.support.swap_config import SWAP
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
KNOWLEDGE = EngineKnowledge(
    {"vllm": PROFILES.engine(VLLM_REF), "sglang": PROFILES.engine(SGLANG_REF)},
    closing_reason,
    PROFILES.engine,
)


def read_models(text: str, name: str = "file") -> ImportedModels:
    result = read_file(text, name, KNOWLEDGE)
    assert result is not None
    return result


def notices(result: ImportedModels) -> dict[str, int]:
    return {notice.text: notice.line for notice in result.notices}


def test_a_name_of_ollama_becomes_words_to_search_with() -> None:
    (notice,) = read_models("FROM qwen3:8b\n").notices
    assert notice.text == (
        "file: names of Ollama's library, as qwen3:8b, are not known. `fitserve search qwen3 8b`"
        " finds the repository."
    )


def test_published_ports_are_those_of_the_gateway() -> None:
    command = "docker run -p 9000:8000 --ipc=host vllm/vllm-openai:v0.33.0 --model org/name"
    texts = {*notices(read_models(yaml.safe_dump({"models": {"m": {"cmd": command}}})))}
    assert "m: -p: clients reach all models at the gateway's port." in texts
    assert "m: --ipc: the gateway starts its engines by itself." in texts


def test_no_notice_advises_to_leave_out_a_flag_that_the_file_lacks() -> None:
    command = "vllm serve org/name --port 9000 --no-such-flag 1"
    result = read_models(yaml.safe_dump({"models": {"m": {"cmd": command}}}))
    assert "args" not in result.models["m"]
    texts = [*notices(result)]
    assert len(texts) == 2
    assert not [text for text in texts if "Leave it out" in text or text.endswith(" ")]


def test_a_machine_without_gpus_gets_no_field_that_needs_one() -> None:
    result = read_file(SWAP, "file", KNOWLEDGE._replace(has_gpu=False))
    assert result is not None
    fields = result.models["qwen"]
    assert not {"engines", "gpus", "tensor_parallel"} & set(fields)
    assert (fields["source"], fields["context"]) == ("Qwen/Qwen3-8B", 32768)
    (notice,) = [notice.text for notice in result.notices if "no GPU" in notice.text]
    assert notice.startswith("qwen: engines, gpus, tensor_parallel: this machine has no GPU")


def test_llama_swap_becomes_models_and_each_remaining_line_is_reported() -> None:
    result = read_models(SWAP)
    assert result.models == {
        "qwen": {
            "engines": ["vllm"],
            "source": "Qwen/Qwen3-8B",
            "context": 32768,
            "tensor_parallel": 2,
            "args": {"enable-prefix-caching": True, "max-num-seqs": 64},
            "aliases": ["qwen3", "gpt-4o-mini"],
            "gpus": ["0", "1"],
            "env": {"NCCL_DEBUG": "INFO"},
            "policy": {"keep_alive": "300s"},
        }
    }
    lines = notices(result)
    notice_counts = {
        "healthCheckTimeout: each start": 1,
        "groups: groups are not needed": 4,
        "qwen: --port: the gateway sets it": 7,
        "qwen: --gpu-memory-utilization=0.9: the plan sizes": 7,
        "qwen: --no-such-flag: vllm==0.33.0 has no such flag": 7,
        "qwen: HF_TOKEN: set FITSERVE_HF_TOKEN": 7,
        "qwen: checkEndpoint: the gateway checks": 7,
        "llama: /models/qwen3-8b-q4_k_m.gguf is GGUF": 16,
        "llama: llama-server starts no vLLM or SGLang": 16,
    }
    for text, line in notice_counts.items():
        assert [place for words, place in lines.items() if words.startswith(text)] == [line], text
    assert len(lines) == len(notice_counts)
    assert "`fitserve search qwen3-8b`" in " ".join(lines)
    assert "hidden-token" not in " ".join(lines)


def test_a_compose_file_gives_its_engines_and_leaves_other_services() -> None:
    result = read_models(
        """\
services:
  web: {image: nginx}
  llm:
    image: vllm/vllm-openai:latest
    command: ["--model", "org/name", "--dtype", "half", "--api-key", "hidden-key"]
    environment: {NCCL_DEBUG: INFO}
    ports: ["8000:8000"]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 2}]}}}
  other:
    image: lmsysorg/sglang:latest
    command: python3 -m sglang.launch_server --model-path org/two --tp 2 --context-length 8192
    deploy: {resources: {reservations: {devices: [{device_ids: ["3"]}]}}}
"""
    )
    assert result.models == {
        "llm": {
            "engines": ["vllm"],
            "source": "org/name",
            "dtype": "float16",
            "env": {"NCCL_DEBUG": "INFO"},
            "gpus": 2,
        },
        "other": {
            "engines": ["sglang"],
            "source": "org/two",
            "tensor_parallel": 2,
            "context": 8192,
            "gpus": ["3"],
        },
    }
    words = " ".join(notices(result))
    assert "web: it starts no vLLM or SGLang" in words
    assert "llm: ports: clients reach all models at the gateway's port" in words
    assert "--api-key" in words
    assert "hidden-key" not in words


def test_a_modelfile_gives_its_source_context_and_adapter() -> None:
    result = read_models(
        'FROM ./weights\nPARAMETER num_ctx 8192\nPARAMETER temperature 0.2\nSYSTEM """You are\n'
        'FROM nobody"""\nADAPTER ./lora\n',
        "mine",
    )
    assert result.models == {
        "mine": {"source": "./weights", "context": 8192, "loras": {"adapter": "./lora"}}
    }
    assert [(line, text.partition(":")[0]) for text, line in notices(result).items()] == [
        (3, "PARAMETER temperature"),
        (4, "SYSTEM"),
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("qwen3:8b", "names of Ollama's library, as qwen3:8b, are not known"),
        ("hf.co/org/name-GGUF:Q4_K_M", "`fitserve search name`"),
    ],
)
def test_a_model_that_is_not_planned_here_leads_to_the_search(source: str, words: str) -> None:
    result = read_models(f"FROM {source}\n")
    assert result.models == {}
    assert words in result.notices[0].text


def test_a_repository_of_the_hub_keeps_its_name() -> None:
    assert read_models("FROM hf.co/org/name\n", "n").models == {"n": {"source": "org/name"}}


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("--max-model-len 32k", {"context": 32000}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--no-enable-chunked-prefill", {"args": {"enable-chunked-prefill": False}}),
        ("--max_num_seqs 8", {"args": {"max-num-seqs": 8}}),
        ("--data-parallel-size 2", {"data_parallel": 2}),
        ("--lora-modules a=org/a b=./b", {"loras": {"a": "org/a", "b": "./b"}}),
        (
            """--speculative-config '{"model": "org/draft", "num_speculative_tokens": 3}'""",
            {"drafter": "org/draft", "num_speculative_tokens": 3},
        ),
        ("""--speculative-config '{"method": "ngram"}'""", {"speculative": "ngram"}),
        ("--chat-template ./t.jinja", {"chat_template": {"text": "${file:./t.jinja}"}}),
        ("--dtype=bfloat16", {"dtype": "bfloat16"}),
        ("--dtype auto --data-parallel-size 1", {}),
        ("-tp=2", {"tensor_parallel": 2}),
        (f"--max-model-len {'9' * 400}", {}),
        (f"-tp {'9' * 5000}", {}),
        ("--speculative-config '" + "[" * 100_000 + "'", {}),
        ("-O3 extra words", {}),
    ],
)
def test_flags_of_vllm_become_fields(flags: str, fields: dict[str, Any]) -> None:
    text = yaml.safe_dump({"models": {"m": {"cmd": f"vllm serve org/name {flags}"}}})
    assert read_models(text).models["m"] == {"engines": ["vllm"], "source": "org/name", **fields}


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (
            "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
            " --speculative-num-draft-tokens 4",
            {"speculative": "mtp", "num_speculative_tokens": 3},
        ),
        ("--speculative-algorithm eagle", {"speculative": "mtp"}),
        ("--speculative-algorithm EAGLE3", {}),
        ("--speculative-eagle-topk 8", {}),
    ],
)
def test_drafting_of_sglang_becomes_fields(flags: str, fields: dict[str, Any]) -> None:
    command = f"python -m sglang.launch_server --model-path org/name {flags}"
    result = read_models(yaml.safe_dump({"models": {"m": {"cmd": command}}}))
    assert result.models["m"] == {"engines": ["sglang"], "source": "org/name", **fields}
    assert bool(result.notices) == (not fields)


@pytest.mark.parametrize(
    ("command", "kind", "flags"),
    [
        ("/usr/bin/vllm serve org/m --x", "vllm", ("org/m", "--x")),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm", ("--model", "m")),
        ("docker run --rm --gpus all vllm/vllm-openai:v0.9 --model m", "vllm", ("--model", "m")),
        ("podman run -it ghcr.io/x/sglang:1 --model-path m", "sglang", ("--model-path", "m")),
        ("llama-server -m x", None, ()),
        ("", None, ()),
        ("vllm serve 'unclosed", "vllm", ("'unclosed",)),
        # Values of docker's options may look like an image.
        ("docker run --name vllm -v vllm-c:/c vllm/vllm-openai m", "vllm", ("m",)),
        (
            "sudo docker container run -it -p8:8 --init vllm/vllm --model m",
            "vllm",
            ("--model", "m"),
        ),
        ("docker run --name vllm nginx", None, ()),
        ("docker run --rm", None, ()),
        ("bash -lc '. env; exec vllm serve m --x 4; echo vllm'", "vllm", ("m", "--x", "4")),
        ("vllm serve m && echo", "vllm", ("m",)),
        ("# ${x}\nvllm serve m\n  # more\n--x", "vllm", ("m", "--x")),
    ],
)
def test_the_start_of_an_engine_is_found_in_a_command(
    command: str, kind: str | None, flags: tuple[str, ...]
) -> None:
    start = engine_command(split_words(command))
    assert (
        start.kind if start else None,
        start.flags if start else (),
    ) == (kind, flags)


def test_a_switch_before_the_model_takes_no_value() -> None:
    result = read_models("models:\n  m: {cmd: vllm serve --no-enable-prefix-caching org/name}\n")
    assert result.models["m"]["source"] == "org/name"
    assert result.models["m"]["args"] == {"enable-prefix-caching": False}


def test_words_without_a_flag_are_reported_and_not_shown() -> None:
    result = read_models("models:\n  m: {cmd: vllm serve org/name -k hidden-word}\n")
    words = " ".join(notices(result))
    assert "-k: this short form is not known" in words
    assert "1 further word without a flag" in words
    assert "hidden-word" not in words


def test_names_of_macros_may_have_hyphens_and_the_model_is_one() -> None:
    result = read_models(
        "macros: {vllm-cmd: vllm serve}\nmodels:\n"
        "  m: {cmd: '${vllm-cmd} org/name --served-model-name ${MODEL_ID}-a'}\n"
    )
    assert result.models["m"] == {"engines": ["vllm"], "source": "org/name", "aliases": ["m-a"]}


def test_macros_in_macros_take_bounded_memory() -> None:
    macros = {name: f"${{{further}}}" * 5000 for name, further in ("ab", "bc", "cd", "de")}
    text = yaml.safe_dump({"macros": macros, "models": {"m": {"cmd": "${a}"}}})
    assert read_models(text).models == {}
    assert max(len(words) for words in notices(read_models(text))) < 1000


def test_variables_before_a_command_count() -> None:
    result = read_models(
        "models:\n  m: {cmd: env CUDA_VISIBLE_DEVICES=1 NCCL_DEBUG=INFO vllm serve org/name}\n"
    )
    assert (result.models["m"]["gpus"], result.models["m"]["env"]) == (
        ["1"],
        {"NCCL_DEBUG": "INFO"},
    )


@pytest.mark.parametrize(
    ("ttl", "keep_alive"), [("", "60s"), ("ttl: -1", "60s"), ("ttl: 0", "-1"), ("ttl: 5", "5s")]
)
def test_the_time_of_the_whole_file_counts_where_a_model_has_none(
    ttl: str, keep_alive: str
) -> None:
    text = f"globalTTL: 60\nmodels:\n  m:\n    cmd: vllm serve org/name\n    {ttl}\n"
    assert read_models(text).models["m"]["policy"] == {"keep_alive": keep_alive}
    assert not read_models(text).notices


def test_an_alias_may_be_an_object() -> None:
    text = "models:\n  m: {cmd: vllm serve org/name, aliases: [{id: a, unlisted: true}, b]}\n"
    assert read_models(text).models["m"]["aliases"] == ["a", "b"]


def test_texts_inside_a_compose_file_do_not_make_it_a_modelfile() -> None:
    result = read_models(
        "services:\n  a:\n    build:\n      dockerfile_inline: |\n        FROM vllm/vllm-openai\n"
        "    image: vllm/vllm-openai\n    command: --model ${MODEL:-org/name} --max-num-seqs 4\n"
    )
    assert result.models == {
        "a": {"engines": ["vllm"], "source": "org/name", "args": {"max-num-seqs": 4}}
    }


def test_variables_outside_the_file_are_those_of_a_models_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTS", "/data")
    swap = read_models("models:\n  m: {cmd: 'vllm serve ${env.WEIGHTS}/m'}\n").models
    assert swap["m"]["source"] == "${env:WEIGHTS}/m"
    compose = (
        "services:\n  m:\n    image: vllm/vllm-openai\n    command: --model $${x}${WEIGHTS:?no}/m\n"
    )
    (notice,) = read_models(compose).notices
    assert "the value of ${x}" in notice.text
    assert read_models(compose.replace("$${x}", "")).models == swap
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": swap}))
    assert load(path).wishes["m"].source == "/data/m"
    (notice,) = read_models("models:\n  m: {cmd: 'vllm serve ${gone}/m'}\n").notices
    assert notice.text == "m: the value of ${gone}/m is not in the file. Write `source` yourself."


def test_parts_of_a_container_are_reported_without_their_values() -> None:
    compose = read_models(
        "services:\n  m:\n    image: vllm/vllm-openai\n    command: --model org/name\n"
        "    env_file: hidden\n    restart: always\n    healthcheck: {test: hidden}\n"
    )
    docker = read_models(
        "models:\n  m: {cmd: docker run --rm --name m --ipc=hidden -v hidden:/c -e NCCL_DEBUG=INFO"
        " vllm/vllm-openai org/name}\n"
    )
    assert notices(compose).keys() == {
        "m: env_file: write the engine's variables under `env`.",
        "m: healthcheck, restart: the gateway starts its engines by itself.",
    }
    assert notices(docker).keys() == {
        "m: --ipc: the gateway starts its engines by itself.",
        "m: volume /c: the weights are in the gateway's cache (FITSERVE_MODELS_DIR), or in the"
        " folder that `source` names.",
    }


DOCKER = "docker run --rm --gpus all"
OPENAI = "vllm/vllm-openai"


@pytest.mark.parametrize(
    ("image", "engine", "notice"),
    [
        (f"{OPENAI}:v0.26.0", "vllm==0.26.0", ""),
        (f"{OPENAI}:v0.19.1-cu130", "vllm==0.19.1", ""),
        (f"docker.io/{OPENAI}:v0.26.0", "vllm==0.26.0", ""),
        ("lmsysorg/sglang:v0.5.23-cu129", "sglang==0.5.23", ""),
        (f"{OPENAI}:v0.20.0", "vllm==0.20.0", ""),
        (f"{OPENAI}:latest", "vllm", ""),
        (OPENAI, "vllm", ""),
        (f"{OPENAI}:nightly", "vllm", f"m: image {OPENAI}:nightly: its tag names no version."),
        (f"{OPENAI}@sha256:12", "vllm", f"m: image {OPENAI}@sha256:12: its tag names no version."),
        ("me/vllm:2.1", "vllm", "m: image me/vllm:2.1: its publisher is not the engine's."),
    ],
)
def test_the_tag_of_an_image_is_the_version_of_the_engine(
    image: str, engine: str, notice: str
) -> None:
    swap = read_models(
        yaml.safe_dump({"models": {"m": {"cmd": f"{DOCKER} {image} --model org/name"}}})
    )
    compose = read_models(
        yaml.safe_dump({"services": {"m": {"image": image, "command": "--model org/name"}}})
    )
    for result in (swap, compose):
        assert result.models == {"m": {"engines": [engine], "source": "org/name"}}
        texts = [notice.text for notice in result.notices]
        assert (len(texts), "".join(texts).startswith(notice)) == (bool(notice), True)


def test_flags_are_those_of_the_version_in_the_tag() -> None:
    flags = "--model org/name --swap-space 4"
    old_models = read_models(f"models:\n  m: {{cmd: {DOCKER} {OPENAI}:v0.18.0 {flags}}}\n")
    new_models = read_models(f"models:\n  m: {{cmd: {DOCKER} {OPENAI}:v0.33.0 {flags}}}\n")
    is_listed = [
        "swap-space" in PROFILES.engine(f"vllm=={version}").flags
        for version in ("0.18.0", "0.33.0")
    ]
    assert ["args" in result.models["m"] for result in (old_models, new_models)] == is_listed


@pytest.mark.parametrize(
    "mount",
    [
        "-v /srv/models:/models:ro",
        "--volume=/srv/models/:/models/",
        "--mount type=bind,src=/srv/models,dst=/models",
    ],
)
def test_paths_of_a_container_become_paths_of_the_host(mount: str) -> None:
    flags = (
        "--model /models/a/b --lora-modules x=/models/x y=org/y --chat-template /models/t.jinja"
        """ --speculative-config '{"model": "/models/draft"}'"""
    )
    result = read_models(
        yaml.safe_dump({"models": {"m": {"cmd": f"{DOCKER} {mount} {OPENAI} {flags}"}}})
    )
    assert result.models["m"] == {
        "engines": ["vllm"],
        "source": "/srv/models/a/b",
        "loras": {"x": "/srv/models/x", "y": "org/y"},
        "chat_template": {"text": "${file:/srv/models/t.jinja}"},
        "drafter": "/srv/models/draft",
    }
    assert not result.notices


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ("/srv:/models", "/srv/m"),
        ("./weights:/models:ro", "./weights/m"),
        ("${WEIGHTS}:/models", "${env:WEIGHTS}/m"),
        ({"type": "bind", "source": "${W:-/srv}", "target": "/models"}, "/srv/m"),
    ],
)
def test_volumes_of_a_service_are_folders_of_the_host(volume: Any, source: str) -> None:
    service = {"image": OPENAI, "command": "--model /models/m", "volumes": [volume]}
    result = read_models(yaml.safe_dump({"services": {"m": service}}))
    assert (result.models["m"]["source"], result.notices) == (source, [])


@pytest.mark.parametrize(
    ("mount", "place"),
    [
        ("", "the container"),
        ("-v weights:/models", "the volume weights"),
        ("-v /a:/mod", "the container"),
    ],
)
def test_a_path_that_the_host_does_not_have_is_reported(mount: str, place: str) -> None:
    result = read_models(f"models:\n  m: {{cmd: {DOCKER} {mount} {OPENAI} --model /models/m}}\n")
    notice = f"m: source: /models/m is a path in {place}. Write the host's path."
    assert notice in notices(result)


def test_a_folder_in_a_folder_is_the_nearest_one() -> None:
    volumes = ["/all:/data", "/one:/data/models", "~/cache:/root/.cache"]
    service = {"image": OPENAI, "command": "vllm serve /data/models/m", "volumes": volumes}
    result = read_models(yaml.safe_dump({"services": {"m": service}}))
    assert result.models["m"]["source"] == "/one/m"
    (notice,) = result.notices
    assert notice.text.startswith("m: volume /data, /root/.cache: the weights are in")


def test_members_of_a_persistent_group_are_pinned() -> None:
    result = read_models(
        "groups: {g: {persistent: true, swap: false, members: [a]}}\nmodels:\n"
        "  a: {cmd: vllm serve org/a, ttl: 5}\n  b: {cmd: vllm serve org/b, ttl: 5}\n"
    )
    assert [result.models[name]["policy"] for name in "ab"] == [
        {"pinned": True},
        {"keep_alive": "5s"},
    ]
    assert notices(result).keys() == {
        "a: ttl: a model of a persistent group is pinned, so it stays loaded."
    }
    more = read_models("groups: {g: {members: [a, b]}}\nmodels: {a: {cmd: vllm serve org/a}}\n")
    assert [notice.text[:7] for notice in more.notices] == ["groups:"]


def test_a_matrix_is_ignored_with_its_replacement_in_the_notice() -> None:
    result = read_models(
        "matrix: {vars: {a: a}, evict_costs: {a: 5}, sets: {both: a & b}}\n"
        "models: {a: {cmd: vllm serve org/a}}\n"
    )
    (notice,) = result.notices
    assert notice.text.startswith("matrix: no sets are needed")
    assert "priority: N" in notice.text


@pytest.mark.parametrize(
    ("command", "proxy", "endpoints"),
    [
        ("ssh gpu2 start-it", "http://gpu2:8000", ["http://gpu2:8000/v1"]),
        ("ssh gpu2 vllm serve org/m", "http://gpu2:${p}/v1", ["http://gpu2:8000/v1"]),
        ("vllm serve org/m", "http://127.0.0.1:${PORT}", None),
        (f"{DOCKER} --name m {OPENAI} org/m", "http://m:8000", None),
    ],
)
def test_a_proxy_to_another_machine_is_an_endpoint(
    command: str, proxy: str, endpoints: list[str] | None
) -> None:
    entry = {"cmd": command, "proxy": proxy}
    result = read_models(yaml.safe_dump({"macros": {"p": "8000"}, "models": {"m": entry}}))
    assert result.models["m"].get("endpoints") == endpoints
    is_told = any("proxy" in notice.text for notice in result.notices)
    assert is_told == (endpoints is None)


def test_equal_reasons_are_reported_once() -> None:
    swap = read_models(
        "models:\n  a: {cmd: vllm serve org/a --host x --port 1}\n"
        "  b: {cmd: vllm serve org/b --host x --port 1}\n  c: {cmd: vllm serve org/c --port 1}\n"
    )
    (notice,) = swap.notices
    assert notice.text.startswith("a, b: --host, --port; c: --port: the gateway sets it")
    assert notice.line == 2
    modelfile = read_models(
        "FROM org/name\nPARAMETER top_p 1\nPARAMETER top_k 1\nADAPTER ./a\nADAPTER ./b\n"
    )
    (notice,) = modelfile.notices
    assert notice.text.startswith("PARAMETER top_p, PARAMETER top_k: clients send it")
    (model,) = modelfile.models.values()
    assert model["loras"] == {"adapter": "./a", "adapter-2": "./b"}


def test_variables_before_the_command_of_a_service_count() -> None:
    service = {"image": OPENAI, "command": "env NCCL_DEBUG=INFO vllm serve org/name"}
    result = read_models(yaml.safe_dump({"services": {"m": service}}))
    assert result.models["m"]["env"] == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("text", ["services:\n  a: {image: x\n", "models:\n  a: 1\n  a: 2\n"])
def test_a_file_that_is_no_yaml_is_reported_with_its_line(text: str) -> None:
    with pytest.raises(BadRequest, match="Line 3, column"):
        read_models(text)


def test_texts_of_several_lines_hold_no_instructions() -> None:
    result = read_models(
        'FROM\t./x\nMESSAGE user """a\nFROM ./other\n"""\nSYSTEM "two\nFROM ./lines"\n'
        'TEMPLATE """one"""\nPARAMETER\tnum_ctx 4096\nPARAMETER num_ctx many\n',
        "n",
    )
    assert result.models == {"n": {"source": "./x", "context": 4096}}
    assert notices(result)["PARAMETER num_ctx: it is not a number of tokens."] == 9


def test_a_module_of_python_is_no_model() -> None:
    words = notices(read_models("models:\n  m: {cmd: python -m other.server --x}\n"))
    assert list(words) == [
        "m: no model. `fitserve search WORDS` finds the repository.",
        "m: python starts no vLLM or SGLang.",
    ]


def test_a_model_of_a_command_is_not_called_one_of_ollama() -> None:
    (notice,) = read_models("models:\n  m: {cmd: vllm serve gpt2}\n").notices
    assert "'gpt2' is neither a folder nor a repository" in notice.text


def test_a_field_that_no_model_takes_is_left_out_with_its_reason() -> None:
    result = read_models("models:\n  m:\n    cmd: vllm serve org/name --dtype fp4 -tp 900\n")
    assert result.models == {"m": {"engines": ["vllm"], "source": "org/name"}}
    assert sorted(notice.text.split(":")[1].strip() for notice in result.notices) == [
        "dtype",
        "tensor_parallel",
    ]


@pytest.mark.parametrize(
    "text", ["", "a: 1\n", "- models\n", "services: []\n", "models: 3\n", "{", "x: [\n"]
)
def test_another_file_is_none_of_the_three(text: str) -> None:
    assert read_file(text, "name", KNOWLEDGE) is None


@pytest.mark.parametrize(
    "text",
    [
        "models:\n  m:\n",
        "models:\n  m: 3\n  n: {cmd: [1, 2], env: 7, ttl: {}, aliases: 5}\n",
        "services:\n  a:\n  b: {image: 7, command: {x: 1}, deploy: 3, environment: [A]}\n",
        'FROM\nFROM ./x\nSYSTEM """never closed\n',
        "models:\n  m: {cmd: vllm serve org/m --tp}\n",
    ],
)
def test_odd_files_are_read_without_a_fault(text: str) -> None:
    result = read_models(text)
    assert all(notice.line >= 1 for notice in result.notices)


def test_the_models_are_a_valid_models_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": read_models(SWAP).models}))
    (wish,) = load(path).wishes.values()
    assert (wish.name, wish.context, wish.policy.keep_alive) == ("qwen", 32768, 300.0)
