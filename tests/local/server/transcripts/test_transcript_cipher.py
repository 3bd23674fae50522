"""The operator's file of keys: a file that protects nothing is refused with the step to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.server.transcripts.transcript_cipher import TranscriptCipher, read_keys
from tests.support.transcripts import new_key, write_keys


def read(path: Path) -> int:
    return len(read_keys(path, path.parent / "data"))


def test_keys_are_read_in_their_order_with_comments(tmp_path: Path) -> None:
    first_key, second_key = new_key(), new_key()
    path = write_keys(tmp_path / "keys", "# rotated today", first_key, "", second_key)
    keys = read_keys(path, tmp_path / "data")
    assert [key.reveal() for key in keys] == [first_key, second_key]
    token = TranscriptCipher(keys).encrypt(b"text")
    assert TranscriptCipher(keys[:1]).decrypt(token) == b"text"
    assert TranscriptCipher(keys[1:]).decrypt(token) is None


def test_a_file_without_a_valid_key_is_refused(tmp_path: Path) -> None:
    for lines in (["# nothing"], ["not a key"], [new_key(), "short"]):
        with pytest.raises(SettingsError) as refusal:
            read(write_keys(tmp_path / "keys", *lines))
        assert "new-key" in str(refusal.value.hint)
        assert "not a key" not in str(refusal.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        read(tmp_path / "absent")


def test_a_file_of_every_user_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys")
    assert read(path) == 1
    path.chmod(0o604)
    with pytest.raises(SettingsError, match="Every user"):
        read(path)


def test_a_file_in_the_data_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    path = write_keys(data / "keys")
    with pytest.raises(SettingsError, match="in the data folder"):
        read_keys(path, data)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(SettingsError, match="in the data folder"):
        read_keys(link, data)
