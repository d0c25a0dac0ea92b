"""Kill a run with SIGKILL again and again, and compare its books with the server's.

Then a torn tail and a full disk. Run: python benchmarks/crash.py --kills 20
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import market

from eyas.errors import EyasError
from eyas.generation.journal import Journal

MAX_TOKENS = 2048
CONCURRENCY = 100


def client(url: str, folder: Path, rows: int) -> None:
    """Ask for what the journal lacks: the process that is killed."""
    common = market.wish(MAX_TOKENS)
    jobs = market.jobs_of(rows, common)
    with Journal(folder / "journal") as journal:
        jobs = [job for job in jobs if job.fingerprint not in journal.entries]
    asyncio.run(market.go(url, jobs, common, folder, plan=market.plan_of(CONCURRENCY)))


def start(url: str, folder: Path, rows: int) -> subprocess.Popen[bytes]:
    """Start the client in a process of its own."""
    command = [sys.executable, __file__, "--client", url, "--folder", str(folder)]
    return subprocess.Popen([*command, "--rows", str(rows)], stderr=subprocess.DEVNULL)


def stored(folder: Path) -> Counter[str]:
    """Count the stored answers by fingerprint."""
    path = folder / "journal" / "responses.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return Counter(json.loads(line)["fingerprint"] for line in lines)


def kill_often(url: str, folder: Path, rows: int, kills: int) -> dict[str, int]:
    """Kill at random moments; return the requests that had no end on record then, summed."""
    done = 0
    dice = random.Random(0)
    while done < kills:
        process = start(url, folder, rows)
        time.sleep(1.2 + dice.uniform(0, 1.5))
        if process.poll() is not None:
            sys.exit(f"all rows came in after {done} kills: raise --rows")
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1
    with Journal(folder / "journal") as journal:
        return {"kills": done, "in_flight_at_kills": journal.unended()}


def tear(folder: Path) -> None:
    """Cut the last answer in half, as a host that goes down may."""
    path = folder / "journal" / "responses.jsonl"
    path.write_bytes(path.read_bytes()[:-200])


def fill_disk(folder: Path, rows: int, url: str) -> dict[str, object]:
    """Run on a disk that is full in the middle; compare what is kept with what was answered."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return {"full_disk": "skipped: mounting a small disk needs root"}
    common = market.wish(MAX_TOKENS)
    jobs = market.jobs_of(rows, common)
    error = ""
    try:
        asyncio.run(market.go(url, jobs, common, folder, plan=market.plan_of(CONCURRENCY)))
    except EyasError as caught:
        error = str(caught).splitlines()[0].replace(str(folder), "...")
    finally:
        kept = len(stored(folder))
        subprocess.run(["umount", str(folder)], check=True)
    answered = market.ledger(url)["answered"]
    return {"full_disk": error, "full_disk_answered": answered, "full_disk_kept": kept}


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--client", help="internal: the URL that the killed process asks")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.client:
        client(options.client, options.folder, options.rows)
        return
    with tempfile.TemporaryDirectory() as name, market.market() as url:
        folder = Path(name)
        result = kill_often(url, folder, options.rows, options.kills)
        before = stored(folder)
        tear(folder)
        code = start(url, folder, options.rows).wait()
        books, after = market.ledger(url), stored(folder)
    torn = 1
    line = {
        **result,
        "exit_code": code,
        "rows": options.rows,
        "stored_before_the_last_run": len(before),
        "stored": len(after),
        "lost": options.rows - len(after) + sum(key not in after for key in before),
        "stored_twice": sum(count > 1 for count in after.values()),
        "server_calls": books["requests"],
        "calls_allowed": options.rows + result["in_flight_at_kills"] + torn,
    }
    with tempfile.TemporaryDirectory() as name, market.market() as url:
        line |= fill_disk(Path(name), 6000, url)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
