"""Prompts and verifiable rewards. Imports neither torch nor transformers."""

from leanroll.tasks.base import RewardSpec, Task, TaskItem
from leanroll.tasks.registry import load_task, task_names

__all__ = ["RewardSpec", "Task", "TaskItem", "load_task", "task_names"]
