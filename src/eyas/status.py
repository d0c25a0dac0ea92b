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
        self._told_s = -EVERY_S
        self.last: dict[str, Any] = {}

    def due(self) -> bool:
        """Tell whether the last file is two seconds old."""
        return time.monotonic() - self._told_s >= EVERY_S

    def tell(self, state: str, facts: Mapping[str, Any], *, reason: str = "") -> None:
        """Replace the file. `state`: ramp | run | draining | paused | done | failed.

        Every stage gives `done`, `total`, `unit` and `eta_s` (None: unknown) among its facts.
        """
        self._told_s = time.monotonic()
        self.last = dict(facts)
        heard = {"heartbeat_s": round(time.time(), 3), "state": state, "reason": reason}
        write_swiftly(self._path, orjson.dumps(self._head | heard | self.last))

    def end(self, state: str, reason: str) -> None:
        """Write the last word, under what was told before."""
        self.tell(state, self.last, reason=reason)
