"""One rank of the train stage, as torchrun starts it, in the folder of test_train.py's `home`.

Arguments: the parameters as JSON; a rank and a step, at which that rank is killed (-1: none).
"""

import os
import signal
import sys
from types import SimpleNamespace

from omegaconf import OmegaConf

from eyas.drafter.training import Run
from eyas.stages import train

codec = SimpleNamespace(special_ids=frozenset({96}), stop_ids=(95,), markup_ids=frozenset())
train.load_codec = lambda name, folder: codec
victim, at_step = sys.argv[2:]
advance = Run.advance


def dying(self: Run, step: int):
    if os.environ.get("RANK") == victim and step == int(at_step):
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self, step)


Run.advance = dying
if __name__ == "__main__":  # processes that capture import this file
    train.main(OmegaConf.create(sys.argv[1]))
