"""What the benchmark scripts share: turn-taking, waiting for an idle machine, and the JSON line at the end.

Scripts run from the repository root as modules, `python -m benchmarks.NAME`; the last line they print is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leanroll import environment


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
