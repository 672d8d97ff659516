"""One tree of errors.

Every error a user can cause says three things: what was given, what was expected, and what to do.
The command line turns `UserError` into exit code 2 and anything else into exit code 1.
"""

from __future__ import annotations


class LeanrollError(Exception):
    """Base of every error raised on purpose by leanroll."""


class UserError(LeanrollError, ValueError):
    """The caller can fix this: a wrong option, file, model or budget (exit code 2)."""


class ConfigError(UserError):
    """A recipe, override, schedule or task definition is wrong."""


class MissingExtra(ConfigError):
    """Something was asked for that needs a package of an extra, which is not installed."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, or is of a kind that is not supported."""


class BackendUnavailable(UserError):
    """A kernel backend was asked for that this machine or build does not have."""


class RolloutError(LeanrollError):
    """Generation cannot go on: stale weights, a prompt that does not fit, an exhausted pool."""


class SandboxUnavailable(UserError):
    """Programs were to be run, and this machine cannot keep them in the sandbox that was asked for."""


class SandboxError(LeanrollError):
    """A sandbox could not be built for one program, though this machine can build them."""


class RewardError(LeanrollError):
    """A reward function failed or timed out and the policy for that is `fail`."""


class ResumeError(UserError):
    """A run directory cannot be continued as asked."""


class RunDirInUse(UserError):
    """Another process writes to the run directory."""


class StorageError(LeanrollError):
    """The disk refused a write during a run: full, over quota, read-only, or broken."""


class TeacherError(LeanrollError):
    """A student cannot learn from this teacher: it is not better, or the two do not fit together."""


class OutOfMemory(LeanrollError):
    """A step does not fit in memory, however small its micro-batches."""


class TrainingDiverged(LeanrollError):
    """A loss or gradient is not finite; the diagnosis is in the run directory."""


class RankError(LeanrollError):
    """The processes of a distributed run cannot go on together: one is gone, failed by a bug, or differs from the others."""
