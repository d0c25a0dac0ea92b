"""Serve the market of a simulation file in this process.

Reads: conf/simulation/*.yaml. Run: eyas serve --simulate conf/simulation/default.yaml.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

import yaml

from eyas.desk.local_endpoint import bind
from eyas.desk.params import fill
from eyas.errors import EyasError
from eyas.generation.shop import ROOT
from eyas.generation.simulation import Simulation, check_simulation


def read_simulation(path: Path) -> Simulation:
    """Read and check a simulation.

    Raises: EyasError naming the key that is unknown, missing or impossible.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EyasError(f"{path}: {error}", hint="see conf/simulation/default.yaml") from None
    simulation: Simulation = fill(Simulation, value, path.name)
    try:
        check_simulation(simulation)
    except ValueError as error:
        raise EyasError(f"{path}: {error}") from None
    return simulation


def serve_simulation(path: Path, *, port: int) -> None:
    """Serve on 127.0.0.1:`port` until Ctrl-C; port 0 takes a free one."""
    from eyas.generation.simulator import serve_simulation as serve

    simulation = read_simulation(path)
    with bind(port) as listener, contextlib.suppress(KeyboardInterrupt):
        number = listener.getsockname()[1]
        sys.stdout.write(f"{simulation.model} (simulated): http://127.0.0.1:{number}{ROOT}\n")
        sys.stdout.flush()
        asyncio.run(serve(simulation, listener))
