"""The one training loop: Accelerate, checkpoints, resume, logging, schedules. Imports nothing of the tasks."""
