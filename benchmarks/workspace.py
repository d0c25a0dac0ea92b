"""What benchmarks of the whole pipeline share: a copy of the project, commands in it, servers."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import yaml

from eyas.records import Sample

ROOT = Path(__file__).resolve().parents[1]
STAGE = re.compile(r"Running stage '([^']+)'")
KEY = "sk-or-v1-c0ffee0123456789"  # made up; what is shared must not hold it


def copy_tree(folder: Path) -> None:
    """Copy what git knows or would take, without results of a run; make it a repository."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file() and not source.is_symlink() and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    shell(folder, "git init -q . && rm -f metrics/*.json")
    (ROOT / "var/cache").mkdir(parents=True, exist_ok=True)  # the tiny target's weights
    (folder / "var").mkdir()
    (folder / "var/cache").symlink_to(ROOT / "var/cache")


def commit(folder: Path) -> None:
    """Commit everything."""
    shell(folder, "git add -A && git -c user.name=e -c user.email=e@example.org commit -qm state")


def environment(folder: Path) -> dict[str, str]:
    """Return what a command in a copy sees: its own sources, and keys that open nothing."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(
            [str(folder / "src"), *os.environ.get("PYTHONPATH", "").split(":")[1:]]
        ),
        "OPENROUTER_API_KEY": KEY,
        "AWS_ACCESS_KEY_ID": "eyas",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "COLUMNS": "120",
    }


def shell(folder: Path, command: str, *, check: bool = True) -> str:
    """Run a command line as a user would; return what it printed, errors last."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode:
        sys.exit(
            f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout + done.stderr


def stages_of(output: str) -> list[str]:
    """Return the stages that DVC ran."""
    return STAGE.findall(output)


def free_port() -> int:
    """Return a port that nobody holds now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write_yaml(path: Path, value: Any, head: str = "") -> None:
    """Write a file of conf/."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(value, sort_keys=False), encoding="utf-8")


@contextlib.contextmanager
def served(folder: Path, arguments: list[str], url: str, log: Path) -> Generator[None]:
    """Run a server in `folder` until it has answered at `url`, and end it afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
            stdout=out,
            stderr=out,
        )
        try:
            for _ in range(600):
                with contextlib.suppress(urllib.error.HTTPError):
                    try:
                        urllib.request.urlopen(url).close()
                        break
                    except urllib.error.HTTPError:
                        break
                    except urllib.error.URLError:
                        time.sleep(0.1)
                if process.poll() is not None:
                    sys.exit(f"{arguments}: ended\n{log.read_text()[-2000:]}")
            yield
        finally:
            process.terminate()
            process.wait(10)


def sample_of(number: int, ids: Sequence[int]) -> Sample:
    """Return ids as a sample of the project's own texts, whose last two thirds are the reply."""
    return Sample(
        id=f"{number:032x}",
        dataset="project",
        input_ids=tuple(ids),
        spans=((len(ids) // 3, len(ids)),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=None,
    )
