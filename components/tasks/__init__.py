"""Where prompts come from, their order, and how text becomes tokens. Loads nothing heavy."""

from .prompting import Prompter
from .taskset import TaskSet, build_taskset

__all__ = ["Prompter", "TaskSet", "build_taskset"]
