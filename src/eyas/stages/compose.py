"""Write params.yaml from conf/, unless DVC has composed it already for an experiment.

Reads: conf/. Writes: params.yaml. Run: python -m eyas.stages.compose.
Source: `dvc exp run -S` writes its overrides into params.yaml before the stages start and exports
DVC_EXP_NAME; composing again would silently lose them. Plain `dvc repro` never composes, so
this does (https://github.com/iterative/dvc/issues/10750).
"""

import os
import sys

from eyas.desk.params import PARAMS_FILE, check, compose
from eyas.errors import EyasError
from eyas.files import write_text


def main() -> None:
    """Compose, check every key, and write only when something differs."""
    try:
        if os.environ.get("DVC_EXP_NAME"):
            check(PARAMS_FILE.read_text(encoding="utf-8"))
            return
        text = compose()
        check(text)
        if not PARAMS_FILE.is_file() or PARAMS_FILE.read_text(encoding="utf-8") != text:
            write_text(PARAMS_FILE, text)
    except (EyasError, OSError) as error:
        sys.exit(f"compose: error: {error}")


if __name__ == "__main__":
    main()
