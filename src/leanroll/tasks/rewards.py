"""Reward functions over a batch of completions: in worker processes, with time limits, and nothing failing silently.

A call covers all samples of a step (or `RewardSpec.batch_size` of them), as in TRL. When a call raises, hangs or kills
its worker, its samples are called again one by one, so that the failure is pinned to a sample and the others keep their
values; the time limit is one completion's, so a batch that is merely slow ends well that way (and is warned about). With
h hanging samples a step therefore takes about (1 + h / num_workers) time limits.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from leanroll.errors import ConfigError, RewardError
from leanroll.tasks.base import RewardSpec, TaskItem
from leanroll.tasks.reward_pool import Outcome, RewardPool
from leanroll.tasks.reward_worker import Call, CallFailure, FailureKind, call_reward, describe
from leanroll.tasks.user_rewards import UserReward

_LOG = logging.getLogger(__name__)
_MAX_TEXT = 600
_MAX_WARNINGS = 5

_SLOW_CALL = (
    "Reward %r took longer than %g s for %d samples in one call, though not for any one of them; set its batch_size "
    "lower or the time limit higher."
)

OnError = Literal["fail", "zero", "drop"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """One failure.

    sample: position in the batch; None when it concerns a whole call (a wrong length, or an exception that no sample
        raises alone).
    detail: traceback or what was returned. output: the end of what the worker printed.
    """

    reward: str
    kind: FailureKind
    detail: str
    sample: int | None = None
    prompt: str = ""
    completion: str = ""
    columns: Mapping[str, Any] | None = None
    output: str = ""

    def __str__(self) -> str:
        lines = [f"Reward {self.reward!r} failed ({self.kind}): {self.detail}"]
        if self.sample is not None:
            lines.append(f"  sample {self.sample}, prompt: {_cut(self.prompt)!r}")
            lines.append(f"  completion: {_cut(self.completion)!r}")
            lines.append(f"  columns: {_cut(repr(dict(self.columns or {})))}")
        if self.output:
            lines.append(f"  output: {_cut(self.output)!r}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Rewards of N samples.

    values: reward name → float64 [N]; a failed one is 0 (`zero`) or NaN (`drop`).
    total: float64 [N], the weighted sum; NaN for a dropped sample.
    kept: bool [N], False for a dropped sample.
    failures: all of them, in no particular order.
    num_slow_calls: batches that overran the time limit though each sample alone did not.
    seconds: wall time.
    """

    values: Mapping[str, np.ndarray]
    total: np.ndarray
    kept: np.ndarray
    failures: tuple[RewardFailure, ...]
    num_slow_calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Failed:
    reply: CallFailure
    output: str


class RewardRunner:
    """Scores completions with one or more weighted rewards. Use as a context manager, or call `close`.

    Args:
        specs: names must differ. Functions must be importable in a fresh process (not lambdas or closures), unless
            num_workers is 0.
        num_workers: processes; 0 runs in this process, without time limits, for debugging.
        time_limit_s: seconds per completion.
        on_error: `fail` raises RewardError; `zero` gives the failed reward the value 0; `drop` takes the sample out.

    Raises:
        ConfigError: no reward, two of one name, a function that cannot travel to a worker, or a time limit that is not longer
            than a reward's own.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        num_workers: int = 1,
        time_limit_s: float = 10.0,
        on_error: OnError = "fail",
    ) -> None:
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"Rewards are named {names}; expected at least one, each with a name of its own.")
        if on_error not in ("fail", "zero", "drop"):
            raise ConfigError(f"on_error is {on_error!r}; expected fail, zero or drop.")
        if num_workers < 0 or not time_limit_s > 0:
            raise ConfigError(
                f"num_workers={num_workers}, time_limit_s={time_limit_s}; expected num_workers >= 0, time_limit_s > 0."
            )
        for spec in specs:
            if num_workers and spec.own_limit_s is not None and time_limit_s <= spec.own_limit_s:
                raise ConfigError(
                    f"Reward {spec.name!r} may take {spec.own_limit_s:g} s for a completion before it ends by itself, but its time "
                    f"limit is {time_limit_s:g} s; raise task.reward_timeout_s, or lower the reward's own limit."
                )
        self._specs = tuple(specs)
        self._time_limit_s = time_limit_s
        self._on_error = on_error
        self._pool = RewardPool([_pickled(spec) for spec in specs], names, num_workers) if num_workers else None

    def start(self) -> None:
        """Load the functions, or wait until the workers have (`score` does it otherwise).

        Raises:
            ConfigError: a function cannot be loaded.
        """
        if self._pool is not None:
            self._pool.start()
            return
        for spec in self._specs:
            if hasattr(spec.function, "load"):
                try:
                    spec.function.load()
                except Exception as error:  # importing user code can raise anything
                    raise ConfigError(f"Reward {spec.name!r} cannot be loaded:\n{describe(error)}") from error

    def score(
        self,
        items: Sequence[TaskItem],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> RewardResult:
        """Rewards of N completions.

        Args:
            items: [N], the item each completion answers (the same one several times for a group).
            completions: [N], decoded without special tokens.
            completion_ids: [N] token ids; None passes empty lists.

        Raises:
            RewardError: a reward failed and on_error is `fail`, or a worker cannot be started.
            ConfigError: a function cannot be loaded.
        """
        began = time.perf_counter()
        n = len(items)
        ids = [[] for _ in items] if completion_ids is None else [list(row) for row in completion_ids]
        if len(completions) != n or len(ids) != n:
            raise ValueError(f"{n} items, {len(completions)} completions, {len(ids)} completion_ids; expected equal.")
        batch = _Batch(items, completions, ids, self._specs)
        parts = [(s, part) for s, spec in enumerate(self._specs) for part in _chunks(n, spec.batch_size)]
        raw = np.full((len(self._specs), n), np.nan)
        failures, again = self._collect(batch, parts, self._run(batch, parts, False), raw)
        num_slow = 0
        if again:
            singles = [(s, [i]) for s, part, _ in again for i in part]
            stop = self._on_error == "fail"
            found, _ = self._collect(batch, singles, self._run(batch, singles, stop), raw)
            failures += found
            guilty = {(failure.reward, failure.sample) for failure in found}
            for s, part, outcome in again:
                name = self._specs[s].name
                if (stop and found) or any((name, i) in guilty for i in part):
                    continue
                if outcome.reply.kind == "timeout":
                    num_slow += 1
                    _LOG.warning(_SLOW_CALL, name, self._time_limit_s, len(part))
                else:
                    detail = f"{outcome.reply.detail}\n(each of its {len(part)} samples alone succeeds)"
                    failures.append(RewardFailure(name, outcome.reply.kind, detail, output=outcome.output))
        self._report(failures)
        return self._result(raw, failures, num_slow, time.perf_counter() - began)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, batch: _Batch, parts: Sequence[tuple[int, list[int]]], stop: bool) -> dict[int, Outcome]:
        calls = [batch.call(s, part) for s, part in parts]
        if self._pool is not None:
            return self._pool.run(calls, self._time_limit_s, stop)
        return {p: Outcome(call_reward(self._specs[call.function].function, call)) for p, call in enumerate(calls)}

    def _collect(
        self, batch: _Batch, parts: Sequence[tuple[int, list[int]]], outcomes: Mapping[int, Outcome], raw: np.ndarray
    ) -> tuple[list[RewardFailure], list[tuple[int, list[int], _Failed]]]:
        """Write values into raw [rewards, N]; return the failures and the calls to repeat one by one."""
        failures: list[RewardFailure] = []
        again: list[tuple[int, list[int], _Failed]] = []
        for position, outcome in outcomes.items():
            s, part = parts[position]
            reply = outcome.reply
            if not isinstance(reply, CallFailure):
                raw[s, part] = reply.values
                failures += [batch.failure(s, part[p], "bad_value", text, "") for p, text in reply.bad.items()]
            elif len(part) == 1:
                failures.append(batch.failure(s, part[0], reply.kind, reply.detail, outcome.output))
            elif reply.kind == "bad_return":
                # One by one, a function of the wrong length could look right: the whole call fails.
                failures.append(RewardFailure(self._specs[s].name, reply.kind, reply.detail, output=outcome.output))
            else:
                again.append((s, part, _Failed(reply, outcome.output)))
        return failures, again

    def _report(self, failures: Sequence[RewardFailure]) -> None:
        if failures and self._on_error == "fail":
            raise RewardError(
                f"{failures[0]}\nFix the reward, or set on_reward_error to 'zero' or 'drop' to go on without it."
            )
        for failure in failures[:_MAX_WARNINGS]:
            _LOG.warning("%s\n  on_error=%s", failure, self._on_error)
        if len(failures) > _MAX_WARNINGS:
            _LOG.warning("%d more reward failures in this batch.", len(failures) - _MAX_WARNINGS)

    def _result(
        self, raw: np.ndarray, failures: Sequence[RewardFailure], num_slow: int, seconds: float
    ) -> RewardResult:
        failed = np.isnan(raw)
        if self._on_error == "zero":
            raw = np.where(failed, 0.0, raw)
            failed = np.zeros_like(failed)
        weights = np.array([spec.weight for spec in self._specs])
        return RewardResult(
            values={spec.name: raw[s] for s, spec in enumerate(self._specs)},
            total=weights @ raw,
            kept=~failed.any(axis=0),
            failures=tuple(failures),
            num_slow_calls=num_slow,
            seconds=seconds,
        )


class _Batch:
    """The samples of one `score`, sliced into calls."""

    def __init__(
        self,
        items: Sequence[TaskItem],
        completions: Sequence[str],
        completion_ids: list[list[int]],
        specs: Sequence[RewardSpec],
    ) -> None:
        self._items, self._completions, self._ids, self._specs = items, completions, completion_ids, specs
        self._names = list(dict.fromkeys(name for item in items for name in item.columns))

    def call(self, s: int, part: Sequence[int]) -> Call:
        items = [self._items[i] for i in part]
        texts = [self._completions[i] for i in part]
        chat = self._specs[s].format == "conversational"
        return Call(
            function=s,
            prompts=[list(item.messages) if chat else item.prompt for item in items],
            completions=[[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
            completion_ids=[self._ids[i] for i in part],
            columns={name: [item.columns.get(name) for item in items] for name in self._names},
        )

    def failure(self, s: int, i: int, kind: FailureKind, detail: str, output: str) -> RewardFailure:
        item = self._items[i]
        return RewardFailure(
            self._specs[s].name, kind, detail, i, item.prompt, self._completions[i], dict(item.columns), output
        )


def _chunks(n: int, size: int | None) -> list[list[int]]:
    size = max(n, 1) if size is None else size
    return [list(range(start, min(start + size, n))) for start in range(0, n, size)]


def _pickled(spec: RewardSpec) -> bytes:
    function = spec.function
    if getattr(function, "__module__", None) == "__main__":
        # A worker's __main__ is another module: load the script as a file there.
        script = getattr(sys.modules["__main__"], "__file__", None)
        name = getattr(function, "__qualname__", "")
        if script is None or not script.endswith(".py") or not name.isidentifier():
            raise ConfigError(
                f"Reward {spec.name!r} is not a top-level function of a .py script (a notebook or shell?), so a worker "
                "process cannot find it; move it to a .py file, or run rewards with num_workers=0."
            )
        function = UserReward(script, name)
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Reward {spec.name!r} cannot be sent to a worker process ({error}); define it at the top level of a module "
            "(no lambda or nested function), or run rewards with num_workers=0."
        ) from None


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text)} characters)"
