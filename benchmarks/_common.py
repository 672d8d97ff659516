"""What the benchmark scripts share: facts about the machine, medians, turn-taking, texts, and the JSON line at the end.

Scripts run from the repository root as modules, `python -m benchmarks.NAME`; the last line they print is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from leanroll import environment


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def __call__(self, text: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of repeated measurements, in the unit of what was measured."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """At least one value."""
        low, high = values[0], values[0]
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}] of {self.count}"

    def as_dict(self, digits: int = 4) -> dict[str, float]:
        """JSON-ready."""
        rounded = {"median": self.median, "q25": self.low, "q75": self.high}
        return {key: round(value, digits) for key, value in rounded.items()} | {"count": self.count}


def interleaved(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure A B C A B C …: a slow moment of the machine then hits all variants, not one."""
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, measure in variants.items():
            measured[name].append(measure())
    return measured


class Turns:
    """Lets several long calls, each in a thread of its own, take turns: only one runs at any moment.

    Args:
        names: the calls, in the order in which they take turns.
        turn: steps per turn. The first step of a turn warms the caches and the thread pool and is not timed.
    """

    def __init__(self, names: Sequence[str], turn: int) -> None:
        self._waiting = list(names)
        self._turn = turn
        self._condition = threading.Condition()
        self._steps = dict.fromkeys(names, 0)
        self._last: dict[str, float | None] = dict.fromkeys(names, None)
        self.seconds: dict[str, list[float]] = {name: [] for name in names}

    def wait(self, name: str) -> None:
        """Until it is this call's turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting[0] == name)

    def step(self, name: str) -> None:
        """To be called after every step of a call; hands over at the end of a turn."""
        now = time.perf_counter()
        last = self._last[name]
        if last is not None:
            self.seconds[name].append(now - last)
        self._last[name] = now
        self._steps[name] += 1
        if self._steps[name] % self._turn == 0 and len(self._waiting) > 1:
            with self._condition:
                self._waiting.append(self._waiting.pop(0))
                self._condition.notify_all()
            self.wait(name)
            self._last[name] = None

    def finish(self, name: str) -> None:
        """The call is over, or failed."""
        with self._condition:
            self._waiting.remove(name)
            self._condition.notify_all()

    def run(self, calls: Mapping[str, Callable[[], None]]) -> None:
        """Run all calls to their ends; the first error is raised after all have ended."""
        errors: list[BaseException] = []

        def body(name: str, call: Callable[[], None]) -> None:
            self.wait(name)
            try:
                call()
            except BaseException as error:  # carried to the caller's thread, where it is raised
                errors.append(error)
            finally:
                self.finish(name)

        threads = [threading.Thread(target=body, args=item, name=item[0]) for item in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def text_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` different prompts of `length` tokens each: stretches of Python's own standard library, in a fixed order.

    Different texts, so that prefix sharing cannot make several sequences read the same memory.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    prompts: list[list[int]] = []
    pending: list[int] = []
    for path in sorted(library.glob("*.py")):
        pending += tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"]
        while len(pending) >= length:
            prompts.append(pending[:length])
            pending = pending[length:]
            if len(prompts) == count:
                return prompts
    raise ValueError(f"the standard library gives {len(prompts)} prompts of {length} tokens; expected {count}.")


def wait_for_idle(most_load: float, seconds: float) -> float:
    """Wait until the one-minute load average is at most `most_load`, `seconds` at the longest; returns the load found."""
    deadline = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) > most_load and time.monotonic() < deadline:
        time.sleep(5)
    return load


def progress(text: str) -> None:
    """A line on stderr, with the time."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def print_result(name: str, result: Mapping[str, Any]) -> None:
    """The last line of a benchmark: one JSON object with what was measured, where, and with which versions."""
    print(json.dumps({"benchmark": name, **result, "environment": environment.describe()}), flush=True)
