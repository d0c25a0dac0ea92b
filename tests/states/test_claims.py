import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.states import claims
from eyas.states.shards import shard_path

HOLD = """
import sys, time
from pathlib import Path
from eyas.states.claims import claimed
with claimed(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_a_claim_is_held_by_one_and_free_again_afterwards(tmp_path: Path) -> None:
    shard = shard_path(tmp_path, 3)
    with claims.claimed(shard) as first, claims.claimed(shard) as second:
        assert (first, second) == (True, False)
    with claims.claimed(shard) as again:
        assert again
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_a_killed_worker_is_taken_over(tmp_path: Path) -> None:
    shard = shard_path(tmp_path, 0)
    command = [sys.executable, "-c", HOLD, str(shard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with claims.claimed(shard) as mine:
            assert not mine
        holder.send_signal(signal.SIGKILL)
    with claims.claimed(shard) as mine:
        assert mine


def test_every_shard_is_made_once_and_what_others_make_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [shard_path(tmp_path, number) for number in range(3)]
    there, made = {0}, []
    torn = tmp_path / ".shard-00002.safetensors.abc"
    torn.write_bytes(b"x")
    (tmp_path / ".shard-00001.safetensors.live").write_bytes(b"x")
    other = claims.claimed(paths[1])

    def make(number: int) -> None:
        made.append(number)
        there.add(number)

    def wait(_seconds: float) -> None:  # meanwhile the other worker finishes
        there.add(1)
        other.__exit__(None, None, None)

    monkeypatch.setattr(claims.time, "sleep", wait)
    assert other.__enter__()
    claims.work_through(paths, there.__contains__, make)
    assert made == [2]
    assert not torn.exists(), "what a kill left of the shard is cleared"
    assert (tmp_path / ".shard-00001.safetensors.live").exists(), "a live worker's file is not"


def test_a_claim_file_that_was_removed_meanwhile_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, held = shard_path(tmp_path, 0), claims.claimed(shard_path(tmp_path, 0))
    assert held.__enter__()
    lock = claims.fcntl.flock

    def late(*arguments: int) -> None:  # the file is open; before it is locked its holder is done
        held.__exit__(None, None, None)
        monkeypatch.setattr(claims.fcntl, "flock", lock)
        lock(*arguments)

    monkeypatch.setattr(claims.fcntl, "flock", late)
    with claims.claimed(shard) as mine, claims.claimed(shard) as other:
        assert (mine, other) == (False, True)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_its_maker_withdraws_is_made_by_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, there, made = shard_path(tmp_path, 0), {0}, []
    maker = claims.claimed(shard)

    def withdraw(_seconds: float) -> None:
        there.clear()
        maker.__exit__(EyasError, EyasError("another norm"), None)

    def make(number: int) -> None:
        made.append(number)
        there.add(number)

    monkeypatch.setattr(claims.time, "sleep", withdraw)
    assert maker.__enter__()
    claims.work_through([shard], there.__contains__, make)
    assert made == [0]


def test_a_failure_leaves_the_shard_to_others(tmp_path: Path) -> None:
    paths = [shard_path(tmp_path, 0)]

    def fail(_number: int) -> None:
        raise EyasError("no space")

    with pytest.raises(EyasError, match="no space"):
        claims.work_through(paths, lambda _number: False, fail)
    with claims.claimed(paths[0]) as mine:
        assert mine


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", no_locks)
    with pytest.raises(EyasError, match=r"keeps locks, got .*\n  hint: .*local disk or on NFS"):
        claims.claimed(shard_path(tmp_path, 0)).__enter__()
