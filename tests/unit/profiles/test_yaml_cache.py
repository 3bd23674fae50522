"""The cache of YAML files: it answers as the files do, and nothing that happens to it matters."""

import os
from pathlib import Path

import msgspec
import pytest

from gateway.errors import SettingsError
from gateway.profiles.profiles import Profiles
from gateway.profiles.yaml_cache import Documents
from tests.support.versions import SGLANG_REF, VLLM_REF

CACHE = "profiles.msgpack"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text("a: 1\n---\nb: [2, x]\n")
    return path


def test_a_kept_document_is_read_without_the_file(rules: Path, tmp_path: Path) -> None:
    first_documents = Documents(tmp_path / "made" / CACHE)
    assert first_documents.read(rules) == [{"a": 1}, {"b": [2, "x"]}]
    first_documents.save()
    text = msgspec.msgpack.decode((tmp_path / "made" / CACHE).read_bytes())
    assert text[str(rules)][2] == [{"a": 1}, {"b": [2, "x"]}]
    text[str(rules)][2] = ["from the cache"]
    (tmp_path / "made" / CACHE).write_bytes(msgspec.msgpack.encode(text))
    assert Documents(tmp_path / "made" / CACHE).read(rules) == ["from the cache"]
    assert Documents(tmp_path / "made" / CACHE).first(rules) == "from the cache"
    assert list((tmp_path / "made").iterdir()) == [tmp_path / "made" / CACHE]


def test_only_the_first_document_is_cached_when_only_it_is_read(
    rules: Path, tmp_path: Path
) -> None:
    first_documents = Documents(tmp_path / CACHE)
    assert first_documents.first(rules) == {"a": 1}
    first_documents.save()
    text = msgspec.msgpack.decode((tmp_path / CACHE).read_bytes())
    ((name, entry),) = text.items()
    entry[2] = ["from the cache"]
    (tmp_path / CACHE).write_bytes(msgspec.msgpack.encode({name: entry}))
    assert Documents(tmp_path / CACHE).first(rules) == "from the cache"
    assert Documents(tmp_path / CACHE).read(rules) == [{"a": 1}, {"b": [2, "x"]}]


def test_a_changed_file_is_read_again(rules: Path, tmp_path: Path) -> None:
    first_documents = Documents(tmp_path / CACHE)
    first_documents.read(rules)
    first_documents.save()
    rules.write_text("a: 2\n---\nb: [2, x]\n")
    os.utime(rules, ns=(1, 1))
    assert Documents(tmp_path / CACHE).read(rules)[0] == {"a": 2}


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"\x91\x01", b"\x81\xa1x\x01", b"\xc0", b"\x91" * 100_000]
)
def test_a_broken_cache_is_as_good_as_none(rules: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / CACHE).write_bytes(content)
    assert Documents(tmp_path / CACHE).read(rules)[0] == {"a": 1}
    key = msgspec.msgpack.encode(str(rules))
    (tmp_path / CACHE).write_bytes(b"\x81" + key + content)
    assert Documents(tmp_path / CACHE).read(rules)[0] == {"a": 1}


def test_a_cache_that_cannot_be_written_is_left_alone(rules: Path, tmp_path: Path) -> None:
    documents = Documents(rules / "below a file" / CACHE)
    assert documents.read(rules)[0] == {"a": 1}
    documents.save()


def test_numbers_of_items_are_kept(tmp_path: Path) -> None:
    sources = tmp_path / "sources.yaml"
    sources.write_text("linear: {kernels: {1: linear.py:10, 2: linear.py:20}}\n")
    documents = Documents(tmp_path / CACHE)
    read = documents.first(sources)
    documents.save()
    text = msgspec.msgpack.decode((tmp_path / CACHE).read_bytes(), strict=False)
    assert [*text] == [f"{sources} (first document)"]
    assert Documents(tmp_path / CACHE).first(sources) == read


def test_a_document_that_the_cache_would_change_is_not_kept(rules: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text("one: 1\nday: 2026-11-21\n")
    documents = Documents(tmp_path / CACHE)
    read = documents.read(odd)
    documents.read(rules)
    documents.save()
    assert set(msgspec.msgpack.decode((tmp_path / CACHE).read_bytes())) == {str(rules)}
    assert Documents(tmp_path / CACHE).read(odd) == read


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(SettingsError, match=r"bad\.yaml is not YAML"):
        Documents().read(tmp_path / "bad.yaml")


def test_profiles_are_the_same_from_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        profiles = Profiles(cache=tmp_path / CACHE)
        engines = profiles.engines((VLLM_REF, SGLANG_REF), device="cuda")
        text = repr((engines, profiles.rules(engines), profiles.facts))
        profiles.documents.save()
        plain = Profiles()
        second_engines = plain.engines((VLLM_REF, SGLANG_REF), device="cuda")
        assert text == repr((second_engines, plain.rules(second_engines), plain.facts))
    assert (tmp_path / CACHE).stat().st_size > 10_000
