"""Reading of transcripts from files: search, pages, rotated keys and damage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.errors import BadRequest, NotFound
from gateway.secret import Secret
from gateway.server.transcripts.archive import TranscriptArchive, TranscriptQuery
from gateway.server.transcripts.redaction import Redactor
from gateway.server.transcripts.segments import SegmentWriter, list_segments
from gateway.server.transcripts.transcript import build_transcript
from gateway.server.transcripts.transcript_cipher import TranscriptCipher
from tests.support.transcripts import exchange_copy, new_key

OLD_KEY, NEXT_KEY = new_key(), new_key()
EVERY = TranscriptQuery()


def cipher(*keys: str) -> TranscriptCipher:
    return TranscriptCipher([Secret(key) for key in keys])


def write(folder: Path, key: str, *answers: str, model: str = "m") -> None:
    """Write a transcript for each answer, into a file of their own."""
    writer = SegmentWriter(folder, 1024**2, 3600)
    for answer in answers:
        body = msgspec.json.encode({"choices": [{"message": {"content": answer}}]})
        fields = build_transcript(exchange_copy(answer=body, model=model), Redactor(""))
        writer.append(cipher(key).encrypt(msgspec.json.encode(fields)))
    writer.close()


def answers(archive: TranscriptArchive, query: TranscriptQuery = EVERY) -> list[str]:
    return [view.answer for view in archive.views(query)]


def test_pages_lead_from_the_newest_to_the_oldest(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "1", "2", "3", "4", "5")
    archive = TranscriptArchive(tmp_path, cipher(OLD_KEY))
    seen_ids: list[str] = []
    last_id: str | None = None
    for count in (2, 2, 1):
        page = archive.page(EVERY, last_id, 2)
        assert len(page.data) == count
        seen_ids += [row.id for row in page.data]
        last_id = page.last_id
    assert last_id is None
    assert [archive.find(id_).answer for id_ in seen_ids] == ["5", "4", "3", "2", "1"]


def test_a_search_finds_words_of_requests_and_answers(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "Straße", "other")
    write(tmp_path, OLD_KEY, "third", model="second-model")
    archive = TranscriptArchive(tmp_path, cipher(OLD_KEY))
    assert answers(archive, TranscriptQuery(text="STRASSE")) == ["Straße"]
    assert len(answers(archive, TranscriptQuery(text='"content":"hi"'))) == 3
    assert answers(archive, TranscriptQuery(model="second-model")) == ["third"]
    assert answers(archive, TranscriptQuery(key="nobody")) == []
    assert answers(archive, TranscriptQuery(request_id="req_1", text="other")) == ["other"]


def test_former_keys_read_and_absent_keys_leave_a_transcript_locked(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "old")
    archive = TranscriptArchive(tmp_path, cipher(NEXT_KEY, OLD_KEY))
    assert answers(archive) == ["old"]
    locked_archive = TranscriptArchive(tmp_path, cipher(NEXT_KEY))
    (row,) = locked_archive.page(EVERY, None, 10).data
    assert row.is_locked
    assert locked_archive.find(row.id).is_locked
    assert answers(locked_archive, TranscriptQuery(text="old")) == []


def test_a_damaged_line_is_locked_and_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "1", "2")
    (segment,) = list_segments(tmp_path)
    data = bytearray(segment.path.read_bytes())
    data[40] ^= 1
    segment.path.write_bytes(data)
    archive = TranscriptArchive(tmp_path, cipher(OLD_KEY))
    assert [view.is_locked for view in archive.views(EVERY)] == [False, True]


def test_no_text_is_on_the_disk(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "canary")
    data = b"".join(segment.path.read_bytes() for segment in list_segments(tmp_path))
    assert data
    for word in (b"canary", b"content", b"app", b"req_1"):
        assert word not in data


@pytest.mark.parametrize("id_", ["x", "../../etc/passwd-0", "1700000000000-0-x", "1-2", "1" * 99])
def test_an_id_of_another_form_is_refused(tmp_path: Path, id_: str) -> None:
    with pytest.raises(BadRequest):
        TranscriptArchive(tmp_path, cipher(OLD_KEY)).find(id_)


def test_an_unknown_id_is_not_found(tmp_path: Path) -> None:
    archive = TranscriptArchive(tmp_path / "absent", cipher(OLD_KEY))
    for id_ in ("1700000000000-00000000-0", "1700000000000-/../../x-0"):
        with pytest.raises(NotFound):
            archive.find(id_)
    assert archive.page(EVERY, None, 5).data == ()


def test_a_deletion_removes_all_files(tmp_path: Path) -> None:
    write(tmp_path, OLD_KEY, "1")
    archive = TranscriptArchive(tmp_path, cipher(OLD_KEY))
    size = archive.size
    assert archive.delete_all() == size > 0
    assert answers(archive) == []
