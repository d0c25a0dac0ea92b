"""Tell the world how a long stage goes: one small file, replaced every two seconds.

Writes: var/status/<stage>[-<data set>].json. Read by `eyas status` (desk/status.py), from anywhere:
a file can be fetched over ssh, where a log would have to be followed.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from eyas.files import write_swiftly

FOLDER = Path("var/status")
SCHEMA = 1
EVERY_S = 2.0
_HEARD = {"heartbeat_s", "state", "reason"}


class Status:
    """The status file of one stage at work; a failure to write it never fails the stage."""

    def __init__(self, stage: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"{stage.replace('@', '-')}.json"
        name, _, dataset = stage.partition("@")
        self._head = {
            "schema": SCHEMA,
            "stage": name,
            "dataset": dataset or None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_s": round(time.time(), 3),
        }
        self._due_s = -EVERY_S

    def due(self, now_s: float) -> bool:
        """Tell whether two seconds have passed since this was last true; `now_s` is monotonic."""
        if now_s - self._due_s < EVERY_S:
            return False
        self._due_s = now_s
        return True

    def tell(self, state: str, facts: Mapping[str, Any], *, reason: str = "") -> None:
        """Replace the file. `state`: ramp | run | draining | paused | done | failed.

        Every stage gives `done`, `total`, `unit` and `eta_s` (None: unknown) among its facts.
        """
        heard = {"heartbeat_s": round(time.time(), 3), "state": state, "reason": reason}
        write_swiftly(self._path, orjson.dumps(self._head | heard | dict(facts)))

    def end(self, state: str, reason: str) -> None:
        """Write the last word over what this process told before."""
        try:
            last = orjson.loads(self._path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            last = {}
        same = last.get("pid") == self._head["pid"]
        self.tell(state, {k: v for k, v in last.items() if same and k not in _HEARD}, reason=reason)
