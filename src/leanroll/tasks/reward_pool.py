"""A persistent pool of reward workers: start, time limits, kill, restart."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from leanroll.errors import ConfigError, RewardError
from leanroll.tasks.reward_worker import Call, CallFailure, LoadFailure, Ready, Values

_LOG = logging.getLogger(__name__)
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from leanroll.tasks.reward_worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
START_LIMIT_S = 120.0
OUTPUT_TAIL_BYTES = 4096
_STOP_LIMIT_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call; `output` is the end of what the worker printed."""

    reply: Values | CallFailure
    output: str = ""

    @property
    def failed(self) -> bool:
        """Whether any sample of the call has no value."""
        return isinstance(self.reply, CallFailure) or bool(self.reply.bad)


class _Worker:
    """One process. `connection` speaks the protocol of `reward_worker`."""

    def __init__(self, functions: Sequence[bytes], names: Sequence[str]) -> None:
        self._names = names
        ours, theirs = Pipe()
        self.connection: Connection[Any, Any] = ours
        search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, search_path, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is ours; and a kill takes along what the reward has started
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._tail = b""
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()
        self._ready = False
        self._pending = False
        # A process that is dead already is reported by ensure_ready, with its output.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(list(functions))

    def ensure_ready(self) -> None:
        """Wait until the functions are loaded.

        Raises:
            ConfigError: a function cannot be loaded.
            RewardError: the process died or takes longer than START_LIMIT_S.
        """
        if self._ready:
            return
        try:
            reply = self.connection.recv() if self.connection.poll(START_LIMIT_S) else None
        except (EOFError, OSError):
            self.kill()
            raise RewardError(
                f"A reward worker died while loading {', '.join(self._names)} ({self._exit()}). Its output:\n"
                f"{self.output()}"
            ) from None
        if isinstance(reply, LoadFailure):
            self.kill()
            raise ConfigError(
                f"Reward {self._names[reply.function]!r} cannot be loaded in a worker process; it must be importable "
                f"there, outside `if __name__ == '__main__'`.\n{reply.detail}"
            )
        if not isinstance(reply, Ready):
            self.kill()
            raise RewardError(
                f"A reward worker did not load {', '.join(self._names)} within {START_LIMIT_S:g} s; make the import "
                f"of the reward's module faster. Its output:\n{self.output()}"
            )
        self._ready = True

    def send(self, call: Call) -> None:
        self._tail = b""
        self._pending = True
        self.connection.send(call)

    def receive(self) -> Outcome:
        """The reply that is waiting, or the worker's death."""
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):  # at its end, reset, or cut in the middle of a reply
            self.kill()
            return Outcome(CallFailure("died", f"the worker process died ({self._exit()})"), self.output())
        self._pending = False
        return Outcome(reply, self.output())

    def output(self) -> str:
        """The end of what the worker printed since the last `send`."""
        return self._tail.decode(errors="replace").strip()

    @property
    def was_killed(self) -> bool:
        """Ended by SIGKILL, which is how the system and users end a process; valid after `receive` said that it died."""
        return self.process.returncode == -signal.SIGKILL

    @property
    def usable(self) -> bool:
        """Running, and not owing the reply of an abandoned call (Ctrl-C may fall between any two lines)."""
        return not self.connection.closed and not self._pending and self.process.poll() is None

    def stop(self) -> None:
        """End the process: a closed socket makes an idle one return; one that does not is killed."""
        self.connection.close()
        try:
            self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process and all it has started, and collect the rest of its output."""
        # Before the process is reaped its id cannot be another's; the group may be gone already.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._drain.join(_STOP_LIMIT_S)

    def _exit(self) -> str:
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _read_output(self) -> None:
        # Always drained, however much comes: a full pipe would block the reward.
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-OUTPUT_TAIL_BYTES:]


class RewardPool:
    """Workers that live as long as the pool. Not thread-safe.

    Args:
        functions: pickled reward functions; a `Call` names one by position.
        names: their names, for messages.
        num_workers: processes, at least 1; they start at once and load in the background.
    """

    def __init__(self, functions: Sequence[bytes], names: Sequence[str], num_workers: int) -> None:
        self._functions, self._names = tuple(functions), tuple(names)
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._workers, os.getpid())
        self._workers.extend(self._spawn() for _ in range(num_workers))

    def start(self) -> None:
        """Wait until every worker has loaded the functions; raises as `_Worker.ensure_ready`."""
        self._check_open()
        for number in range(len(self._workers)):
            self._ready_worker(number)

    def run(self, calls: Sequence[Call], limit_s: float, stop_at_failure: bool = False) -> dict[int, Outcome]:
        """Run the calls, each within `limit_s` seconds; a late worker is killed and replaced.

        A call whose worker somebody else killed (SIGKILL: a user, or the system when memory runs out) is made once more before
        that counts as its outcome.

        Returns:
            position in `calls` → outcome; with `stop_at_failure`, only what was known when the first failure came.
        """
        self._check_open()
        waiting = deque(range(len(calls)))
        busy: dict[int, tuple[int, float]] = {}  # worker → (call, deadline)
        done: dict[int, Outcome] = {}
        repeated: set[int] = set()
        try:
            while waiting or busy:
                for number in range(len(self._workers)):
                    if waiting and number not in busy:
                        self._begin(number, calls[waiting[0]])
                        busy[number] = (waiting.popleft(), time.monotonic() + limit_s)
                for number, outcome in self._finished(busy, limit_s):
                    call, _ = busy.pop(number)
                    if self._lost(number, outcome) and call not in repeated:
                        _LOG.warning("A reward worker was killed during a call; the call is made once more.")
                        repeated.add(call)
                        waiting.append(call)
                        continue
                    done[call] = outcome
                    if outcome.failed and stop_at_failure:
                        return done
            return done
        finally:
            # Reached with busy workers on an early return, Ctrl-C, or a load error: their replies would come too late.
            for number in busy:
                self._workers[number].kill()

    def close(self) -> None:
        """End all workers; the pool cannot be used afterwards. Also happens at interpreter exit."""
        self._finalizer()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RewardError("The reward runner is closed; make a new one.")

    def _spawn(self) -> _Worker:
        return _Worker(self._functions, self._names)

    def _ready_worker(self, number: int) -> _Worker:
        if not self._workers[number].usable:
            self._workers[number].kill()
            self._workers[number] = self._spawn()
        self._workers[number].ensure_ready()
        return self._workers[number]

    def _begin(self, number: int, call: Call) -> None:
        try:
            self._ready_worker(number).send(call)
        except (BrokenPipeError, ConnectionResetError):
            _LOG.warning("A reward worker died while idle and is replaced.")
            self._ready_worker(number).send(call)  # the failed send has made it unusable

    def _lost(self, number: int, outcome: Outcome) -> bool:
        reply = outcome.reply
        return isinstance(reply, CallFailure) and reply.kind == "died" and self._workers[number].was_killed

    def _finished(self, busy: dict[int, tuple[int, float]], limit_s: float) -> list[tuple[int, Outcome]]:
        connections = {self._workers[number].connection: number for number in busy}
        first_deadline = min(deadline for _, deadline in busy.values())
        ready = [connections[c] for c in wait(list(connections), max(0.0, first_deadline - time.monotonic()))]  # type: ignore[index]
        finished = [(number, self._workers[number].receive()) for number in ready]
        now = time.monotonic()
        for number, (_, deadline) in busy.items():
            if number not in ready and deadline <= now:
                worker = self._workers[number]
                worker.kill()
                failure = CallFailure("timeout", f"took longer than {limit_s:g} s and was killed")
                finished.append((number, Outcome(failure, worker.output())))
        return finished


def _stop_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child holds a copy of the pool; the workers are not its own
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.stop()
    workers.clear()
