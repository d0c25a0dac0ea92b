"""Where the team's data lies: DVC's default remote, and beside it the hidden states.

Reads: .dvc/config, .dvc/config.local (through `dvc config`).
"""

import subprocess

from eyas.errors import EyasError

_OPTIONS = {"endpointurl": "endpoint_url", "profile": "profile"}  # DVC's name -> s3fs's


def states_remote(url: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the address of the shared hidden states and what fsspec is told to reach it.

    None: the folder `states` in DVC's default remote.

    Raises: EyasError if there is no such remote.
    """
    listed = subprocess.run(
        ["dvc", "config", "--list"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise EyasError(f"`dvc config --list`: {listed.stderr.strip()}")
    config = dict(line.split("=", 1) for line in listed.stdout.splitlines() if "=" in line)
    head = f"remote.{config.get('core.remote')}"
    if url is None and f"{head}.url" not in config:
        raise EyasError(
            "DVC has no default remote", hint="make remote TO=FOLDER_OR_S3_URL, or name an address"
        )
    address = url or f"{config[f'{head}.url'].rstrip('/')}/states"
    named = {key: config.get(f"{head}.{name}") for name, key in _OPTIONS.items()}
    is_s3 = address.startswith("s3://")
    return address, {key: value for key, value in named.items() if value and is_s3}
