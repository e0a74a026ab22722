"""The one training loop: Accelerate, checkpoints, resume, logging, schedules. Imports nothing of the tasks.

A task says what is trained, on which batches and by which losses (`Task`); `fit` does the rest.
"""

from tokensieve.training.distributed import gather_with_gradient
from tokensieve.training.loop import FitConfig, FitResult, fit
from tokensieve.training.schedule import warmup_cosine
from tokensieve.training.task import Step, Task, Validation

__all__ = ["FitConfig", "FitResult", "Step", "Task", "Validation", "fit", "gather_with_gradient", "warmup_cosine"]
