"""`tokensieve ARGUMENTS` whose second process is killed in step 7 of a ReID training, by nobody's fault."""

import os
import signal
import sys

from tokensieve.cli.main import main
from tokensieve.tasks.reid.train import ReidTask
from tokensieve.training.distributed import rank

learn = ReidTask.step


def step(self, batch, number):
    if number == 7 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(self, batch, number)


ReidTask.step = step
sys.exit(main(sys.argv[1:]))
