"""The journal on a real disk, and on one that fails."""

import errno
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.generation import journal as module
from eyas.generation.journal import Journal
from eyas.records import Response

RESERVE = 4096


def response(fingerprint: str, content: str = "yes") -> Response:
    return Response(
        id="a",
        fingerprint=fingerprint,
        sample=0,
        model="m",
        provider="p",
        generation_id="gen-1",
        reasoning=None,
        content=content,
        tool_calls=({"id": "x"},),
        finish_reason="stop",
        native_finish_reason=None,
        prompt_tokens=10,
        completion_tokens=5,
        cost_usd=0.5,
        latency_s=0.1,
        attempts=1,
        source="local",
        sampling={"seed": 1},
        usage={},
        true_ids=(1, 2),
    )


def write(journal: Journal, fingerprint: str, content: str = "yes") -> None:
    journal.write("responses", asdict(response(fingerprint, content)))


def open_journal(folder: Path) -> Journal:
    return Journal(folder, reserve_bytes=RESERVE)


def failing_writes(monkeypatch: pytest.MonkeyPatch, times: int, *, half: bool = False) -> list[int]:
    """Let the next `times` writes find the disk full; `half` writes a few bytes first."""
    real, left = os.write, [times]

    def fake(handle: int, data: memoryview) -> int:
        if left[0] <= 0:
            return real(handle, data)
        if half and len(data) > 10:
            return real(handle, bytes(data)[:10])
        left[0] -= 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "write", fake)
    return left


def test_answers_come_back_as_they_went(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j") as journal:
        write(journal, "f1")
        write(journal, "f2", "né\n")
        assert journal.read("f2") == response("f2", "né\n")
    with open_journal(tmp_path / "j") as journal:
        assert [journal.read(f) for f in ("f1", "f2")] == [response("f1"), response("f2", "né\n")]
        assert journal.books.entries["f1"].tokens == 15
        assert not (tmp_path / "j" / "responses.torn").exists()
    assert not (tmp_path / "j" / "reserve").exists()


def test_the_first_of_two_answers_counts(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "f1", "first")
        write(journal, "f1", "second")
        assert journal.read("f1").content == "first"
    with open_journal(tmp_path) as journal:
        assert journal.read("f1").content == "first"


def test_a_torn_tail_is_moved_away_and_the_next_line_starts_clean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "f1")
    path = tmp_path / "responses.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "half')
    with open_journal(tmp_path) as journal:
        write(journal, "f2")
        assert list(journal.books.entries) == ["f1", "f2"]
    assert (tmp_path / "responses.torn").read_bytes() == b'{"id": "half\n'
    assert path.read_bytes().count(b"\n") == 2
    assert "cut short" in caplog.text


@pytest.mark.parametrize(
    "bad", [b"{not json", b"[1]", b'{"id": 1}', b'{"fingerprint": "x"}', b"\xff\xfe",
            b'{"fingerprint": "x", "colour": 1}']
)  # fmt: skip
def test_a_corrupt_line_is_reported_with_its_number_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "f1")
        write(journal, "f2")
    path = tmp_path / "responses.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + b"\n" + second)
    with open_journal(tmp_path) as journal:
        assert [journal.read(f).fingerprint for f in ("f1", "f2")] == ["f1", "f2"]
    assert "responses.jsonl:2: skipped" in caplog.text
    assert bad in path.read_bytes()


def test_a_failure_without_its_fields_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failures.jsonl").write_text('{"fingerprint": "x"}\n', encoding="utf-8")
    open_journal(tmp_path).close()
    assert "failures.jsonl:1: skipped" in caplog.text


def test_failures_say_what_is_final_and_what_was_charged(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for final, tokens in ((False, 100), (True, 20)):
            record = {"fingerprint": "f", "reason": "moderation", "final": final}
            journal.write("failures", record | {"charged_tokens": tokens})
    with open_journal(tmp_path) as journal:
        assert journal.books.final == {"f": "moderation"}
        assert journal.books.charged == {"f": 120}


def test_requests_without_an_end_are_counted(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for name in ("f1", "f2", "f3", "f4"):
            journal.write("issued", {"fingerprint": name})
        write(journal, "f1")
        journal.write("abandoned", {"fingerprint": "f2"})
    with open_journal(tmp_path) as journal:
        assert journal.books.all_unended() == 2


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from eyas.generation.journal import Journal\n"
        "try: Journal(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)"
    )
    with open_journal(tmp_path / "j"):
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "j")],
            capture_output=True,
            text=True,
            check=True,
        )
    assert f"j: process {os.getpid()} is using this journal" in result.stdout
    assert "hint: wait until it ends" in result.stdout
    open_journal(tmp_path / "j").close()


def test_on_a_full_disk_the_reserve_takes_the_answer_and_trouble_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_journal(tmp_path) as journal:
        assert (tmp_path / "reserve").stat().st_size == RESERVE
        failing_writes(monkeypatch, 1)
        write(journal, "f1")
        assert not (tmp_path / "reserve").exists()
        assert "cannot write (No space left on device)" in str(journal.trouble)
        assert "hint: free disk space" in str(journal.trouble)
        write(journal, "f2")
    with open_journal(tmp_path) as journal:
        assert list(journal.books.entries) == ["f1", "f2"]


@pytest.mark.parametrize("half", [False, True])
def test_an_answer_that_cannot_be_stored_leaves_the_others_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "f1")
        left = failing_writes(monkeypatch, 2, half=half)
        with pytest.raises(EyasError, match="the 1 answers stored before are intact"):
            write(journal, "f2")
        left[0] = 0
        write(journal, "f3")
        assert journal.read("f3").fingerprint == "f3"
    with open_journal(tmp_path) as journal:
        assert list(journal.books.entries) == ["f1", "f3"]
    assert not (tmp_path / "responses.torn").exists()


def test_a_disk_without_room_for_the_reserve_is_told_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(EyasError, match="reserve: cannot write"):
        open_journal(tmp_path)
    monkeypatch.undo()
    open_journal(tmp_path).close()
