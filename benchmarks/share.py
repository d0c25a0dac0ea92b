"""Share a paid run through a remote, and count what a colleague's clone asks for again.

The tiny target, whose replies a simulated market sells (its bill counted by the target's own
tokenizer). Prints one JSON line for each kind of remote. Run: python benchmarks/share.py
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import market
import pyarrow.parquet as pq
import yaml
from workspace import KEY, commit, copy_tree, free_port, served, shell, stages_of, write_yaml

EXPERIMENT = Path("conf/experiment/team.yaml")
BUDGET_TOKENS = {"chat": 700, "code": 3000}
OBJECT = re.compile(r'"(PUT|GET|POST) /bucket/([^ "?]+)([^ "]*) HTTP')


def prepare_owner(folder: Path, port: int) -> None:
    """Lay the project into `folder`: the tiny experiment, answers bought at a market on `port`."""
    copy_tree(folder)
    connection = {"url": f"http://127.0.0.1:{port}/api/v1", "confirm_above_usd": None}
    write_yaml(
        folder / EXPERIMENT,
        {
            "defaults": ["tiny", {"override /endpoint": "openrouter"}, "_self_"],
            "endpoint": {"model": market.MODEL, "provider": {}},
            "runtime": {
                "tracking": "off",
                "concurrency": {"short": 20, "long": 20},
                "connection": connection,
            },
            "datasets": {n: {"generate": {"budget_tokens": b}} for n, b in BUDGET_TOKENS.items()},
        },
        "# @package _global_\n",
    )
    change(folder / "conf/config.yaml", "- experiment: null", "- experiment: team")
    shell(folder, "eyas params && dvc repro target")


def change(path: Path, old: str, new: str) -> None:
    """Replace text that must be there."""
    text = path.read_text(encoding="utf-8")
    if old not in text:
        sys.exit(f"{path}: expected '{old}'")
    path.write_text(text.replace(old, new), encoding="utf-8")


@contextlib.contextmanager
def the_market(folder: Path, port: int) -> Generator[str]:
    """Serve replies that cost money; their tokens are counted as the target counts them."""
    simulation = folder.parent / "market.yaml"
    lengths = [{"max_tokens": 1_000_000, "median_tokens": 16.0, "sigma": 0.4}]
    quiet = {"delay_mean_s": 0.05, "reasoning_share": 0.0, "lengths": lengths}
    write_yaml(simulation, {**market.QUIET, **quiet})
    url = f"http://127.0.0.1:{port}/api/v1"
    command = ["eyas.cli", "serve", "--simulate", str(simulation), "--codec", "chatml"]
    with served(
        folder, [*command, "--port", str(port)], f"{url}/key", folder.parent / "market.log"
    ):
        yield url


@contextlib.contextmanager
def the_remote(kind: str, folder: Path) -> Generator[tuple[str, Path, Path]]:
    """Yield the commands that name a remote, where its bytes lie, and its server's log."""
    place, log = folder / f"remote-{kind}", folder / f"{kind}.log"
    log.touch()
    if kind == "folder":
        yield f"dvc remote add -q -d -f team {place}", place, log
        return
    (place / "bucket").mkdir(parents=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with served(folder, ["localbucket", str(place), "--port", str(port)], url, log):
        yield (
            "dvc remote add -q -d -f team s3://bucket/eyas && "
            f"dvc remote modify -q team endpointurl {url}",
            place,
            log,
        )


def repeated(log: str) -> list[str]:
    """Return the requests for an object that a server's log has more than once."""
    seen = Counter(match.groups() for match in OBJECT.finditer(log))
    return [f"{n} x {' '.join(request)}" for request, n in seen.items() if n > 1]


def private_text(place: Path, home: Path) -> list[str]:
    """Return the files under `place` that hold the key or a path of this machine."""
    words = [KEY.encode(), str(home).encode(), f"{Path.home()}/".encode()]
    files = [path for path in place.rglob("*") if path.is_file()]
    return [path.name for path in files if any(word in plain_bytes(path) for word in words)]


def plain_bytes(path: Path) -> bytes:
    """Return a file's bytes, those of a parquet file's columns uncompressed."""
    content = path.read_bytes()
    return str(pq.read_table(path).to_pydict()).encode() if content[:4] == b"PAR1" else content


def share(kind: str, owner: Path, url: str, strangers: int) -> dict[str, Any]:
    """Push from one clone, pull into another, and go on there.

    `strangers`: requests of the clone before, which pushed nothing; this one sends the same again.
    """
    home = owner.parent
    control = home / "control"
    control.mkdir(exist_ok=True)
    (control / "planted").write_text(f"a key: {KEY}")
    clone, forgetful = home / f"clone-{kind}", home / f"forgetful-{kind}"
    with the_remote(kind, home) as (name_it, place, log):
        shell(owner, name_it)
        started = time.monotonic()
        shell(owner, "dvc push && eyas store push")
        push_s = time.monotonic() - started
        again = shell(owner, "dvc push && eyas store push")
        commit(owner)
        facts: dict[str, Any] = {
            "what": "a run shared through a remote",
            "remote": kind,
            "remote_bytes": sum(p.stat().st_size for p in place.rglob("*") if p.is_file()),
            "push_s": round(push_s, 1),
            "second_push_copies": "Everything is up to date" not in again
            or ": 0 shards copied" not in again,
            "files_with_key_or_path": private_text(place, home),
            "control": private_text(control, home),
        }
        before = market.ledger(url)
        pushed = log.read_text()
        facts |= go_on(owner, clone, url)
        facts["s3_repeated_push"] = repeated(pushed)
        facts["s3_repeated_pull"] = repeated(log.read_text()[len(pushed) :])
        facts |= forget_to_pull(owner, forgetful)
        after = market.ledger(url)
    facts["market_requests"] = after["requests"] - before["requests"]
    facts["market_repeated"] = after["repeated"] - before["repeated"] - strangers
    return facts


def go_on(owner: Path, clone: Path, url: str) -> dict[str, Any]:
    """In a fresh clone: pull, run, change what follows the answers, then raise a budget."""
    shell(owner, f"git clone -q . {clone}")
    started = time.monotonic()
    shell(clone, "dvc pull")
    pull_s = time.monotonic() - started
    idle = stages_of(shell(clone, "dvc repro"))
    shell(clone, "eyas store pull && eyas verify")
    before = market.ledger(url)
    change(
        clone / "conf/experiment/tiny.yaml", "train: {epochs: 1,", "train: {lr: 3.0e-4, epochs: 1,"
    )
    downstream = stages_of(shell(clone, "dvc repro train"))
    after_change = market.ledger(url)
    old = answers(clone, "chat")
    budget = BUDGET_TOKENS["chat"]
    change(clone / EXPERIMENT, f"budget_tokens: {budget}", f"budget_tokens: {2 * budget}")
    raised = shell(clone, "dvc repro generate@chat")
    after, new = market.ledger(url), answers(clone, "chat")
    return {
        "pull_s": round(pull_s, 1),
        "stages_after_pull": idle,
        "stages_after_change": downstream,
        "requests_after_change": after_change["requests"] - before["requests"],
        "held_before_raise": len(old),
        "held_after_raise": len(new),
        "kept": len(old & new),
        "requests_after_raise": after["requests"] - after_change["requests"],
        "took_over": " are taken over" in raised,
    }


def answers(folder: Path, name: str) -> set[str]:
    """Return the generation ids of a data set's answers."""
    lines = (folder / f"data/responses/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["generation_id"] for line in lines}


def forget_to_pull(owner: Path, clone: Path) -> dict[str, Any]:
    """In a clone without `dvc pull`: paid answers must not be bought again."""
    shell(owner, f"git clone -q . {clone}")
    (clone / "var").mkdir()
    (clone / "var/cache").symlink_to((owner / "var/cache").resolve())
    output = shell(clone, "dvc repro generate@chat", check=False)
    return {"forgetful_is_told": "dvc pull generate@chat" in output}


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--remotes", nargs="*", default=["folder", "s3"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-share-") as name:
        owner, port = Path(name, "owner"), free_port()
        owner.mkdir()
        prepare_owner(owner, port)
        with the_market(owner, port) as url:
            shell(owner, "dvc repro")
            commit(owner)
            assert yaml.safe_load((owner / "params.yaml").read_text())["endpoint"]["prices"] is None
            strangers = 0
            for kind in options.remotes:
                facts = share(kind, owner, url, strangers)
                strangers = facts["requests_after_raise"]
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
