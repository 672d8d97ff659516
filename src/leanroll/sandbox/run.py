"""Run one program with its tests in a sandbox. The caller's side: limits, the child process, its output, and the verdict."""

from __future__ import annotations

import marshal
import math
import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from leanroll.errors import SandboxError

Mode = Literal["namespaces", "landlock"]
"""`namespaces`: namespaces of its own (files, network, processes), a filter of system calls, limits. `landlock`, for systems
that forbid namespaces: a stricter filter and Landlock, on the system's own files; no writing, no processes, no threads."""

Status = Literal["passed", "failed", "ended", "timeout", "output", "tampered"]
"""passed: the tests ran to their end and held. failed: an assert or another exception. ended: the process ended before its tests
did (os._exit, a crash, CPU time, out of memory). timeout: wall time. output: it printed too much. tampered: it wrote to the pipe of
verdicts."""

START_LIMIT_S = 4.0
"""Seconds that building the sandbox may take, besides the program's own limit."""

OUTPUT_TAIL_BYTES = 4096
_SOURCE = str(Path(__file__).parents[2])
_BOOT = f"import sys; sys.path.insert(0, {_SOURCE!r}); from leanroll.sandbox.launch import main; main()"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "HOME": "/scratch", "TMPDIR": "/scratch", "LC_CTYPE": "C.UTF-8"}
_MAX_VERDICT_BYTES = 1 << 20
_MAX_DIGITS = 9
_KILL_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    wall_s: seconds from its first line to the end of its tests.
    cpu_s: seconds of CPU time per process, rounded up.
    memory_mb: address space per process, in MB.
    scratch_mb: its folder, and each file in it, in MB; the folder is in memory.
    max_processes: processes and threads together (`landlock`: always 1).
    output_mb: what it may print, in MB; the end of it (4 kB) is kept.
    """

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    scratch_mb: int = 16
    max_processes: int = 8
    output_mb: float = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its tests.

    program: source, run as a module named `program`.
    tests: source, run after it with the program's names that are not names of builtins.
    entry_point: the function that the program must define. Empty: whatever the tests use.
    calls_check: the tests define check(candidate), which is then called with the entry point.
    """

    program: str
    tests: str
    entry_point: str = ""
    calls_check: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """How a program did.

    held: numbers of the asserts that held whenever they were reached; only of tests that record them, see
        `leanroll.tasks.code_tests`.
    output: the end of what it printed, tracebacks included.
    seconds: wall time with building the sandbox.
    """

    status: Status
    held: frozenset[int]
    output: str
    seconds: float


def run(job: Job, mode: Mode = "namespaces", limits: Limits | None = None) -> Result:
    """Run a program and its tests. Nothing of it is left when this returns.

    Raises:
        SandboxError: the sandbox could not be built, or something in it outlived it. Never because of what a program does.
    """
    if sys.platform != "linux":
        raise SandboxError(f"Sandboxed programs need Linux, got {sys.platform}; score code on a Linux machine.")
    began = time.monotonic()
    limits = limits or Limits()
    token = secrets.token_hex(16)
    verdicts, theirs = os.pipe()
    try:
        process = _start(job, mode, limits, token, theirs)
    finally:
        os.close(theirs)
    try:
        watch = _Watch(process, verdicts, token, limits)
        watch.until_end()
    finally:
        process.kill()
        process.wait()
        os.close(verdicts)
        assert process.stdout is not None
        process.stdout.close()
    status, held = watch.verdict()
    return Result(status, held, watch.output(), time.monotonic() - began)


def _start(job: Job, mode: Mode, limits: Limits, token: str, verdicts: int) -> subprocess.Popen[bytes]:
    message = {
        "program": job.program,
        "tests": job.tests,
        "entry_point": job.entry_point,
        "calls_check": job.calls_check,
        "mode": mode,
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_mb": limits.memory_mb,
        "scratch_mb": limits.scratch_mb,
        "max_processes": limits.max_processes,
        "verdicts": verdicts,
        "token": token,
        "parent": os.getpid(),
        "source": _SOURCE,
    }
    # The interpreter without the virtual environment's paths: a program gets the standard library and nothing else.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    try:
        stdin = os.memfd_create("job")  # not a pipe: a child that does not read cannot block us
        try:
            with os.fdopen(os.dup(stdin), "wb") as stream:
                marshal.dump(message, stream)
            os.lseek(stdin, 0, os.SEEK_SET)
            return subprocess.Popen(
                [python, "-s", "-S", "-P", "-c", _BOOT],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(verdicts,),
                env=_ENVIRONMENT,
                cwd="/",
            )
        finally:
            os.close(stdin)
    except OSError as error:
        raise SandboxError(f"A sandboxed interpreter cannot be started: {error}.") from error


class _Watch:
    """Reads a sandboxed process's output and verdicts until it ends or has to be killed."""

    def __init__(self, process: subprocess.Popen[bytes], verdicts: int, token: str, limits: Limits) -> None:
        assert process.stdout is not None
        self._process, self._verdicts, self._limits = process, verdicts, limits
        self._stdout = process.stdout.fileno()
        self._mark = f"{token} ".encode()
        self._said = b""
        self._tail = b""
        self._printed = 0
        self._stopped: Literal["timeout", "output"] | None = None
        self._deadline = time.monotonic() + START_LIMIT_S
        self._ready = False

    def until_end(self) -> None:
        """Returns when no process of the sandbox holds its pipes any more."""
        poll = select.poll()
        open_pipes = {self._verdicts, self._stdout}
        for pipe in open_pipes:
            poll.register(pipe, select.POLLIN)
        while open_pipes:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._overdue()
                continue
            for pipe, _ in poll.poll(math.ceil(left * 1000)):
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    poll.unregister(pipe)
                    open_pipes.discard(pipe)
                elif pipe == self._verdicts:
                    self._hear(chunk)
                else:
                    self._printed += len(chunk)
                    self._tail = (self._tail + chunk)[-OUTPUT_TAIL_BYTES:]
                    if self._printed > self._limits.output_mb * 1e6:
                        self._stop("output")

    def verdict(self) -> tuple[Status, frozenset[int]]:
        """What became of the program.

        Raises:
            SandboxError: it was never started.
        """
        said = [line.removeprefix(self._mark).decode(errors="replace") for line in self._said.splitlines()]
        genuine = all(line.startswith(self._mark) for line in self._said.splitlines())
        if not said or said[0] != "ready":
            raise SandboxError(
                f"A sandbox could not be built: {said[0] if said else f'nothing was heard for {START_LIMIT_S:g} s'}.\n"
                f"{self.output()}".strip()
            )
        if self._stopped is not None:
            return self._stopped, frozenset()
        if len(said) == 1:
            return "ended", frozenset()
        word, _, rest = said[1].partition(" ")
        status, _, held = rest.partition(" ")
        if not genuine or len(said) > 2 or word != "done" or status not in ("passed", "failed"):
            return "tampered", frozenset()
        return ("passed" if status == "passed" else "failed"), frozenset(
            map(int, filter(str.isdecimal, held.split(",")))
        )

    def output(self) -> str:
        """The end of what was printed."""
        return self._tail.decode(errors="replace").strip()

    def _hear(self, chunk: bytes) -> None:
        self._said = (self._said + chunk)[:_MAX_VERDICT_BYTES]
        if not self._ready:
            self._ready = True
            self._deadline = time.monotonic() + self._limits.wall_s

    def _overdue(self) -> None:
        if self._stopped is not None:
            raise SandboxError(
                f"A sandboxed process still held its pipes {_KILL_LIMIT_S:g} s after it was killed; look at the machine before "
                "going on."
            )
        self._stop("timeout")

    def _stop(self, reason: Literal["timeout", "output"]) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._deadline = time.monotonic() + _KILL_LIMIT_S
            self._process.kill()  # the kernel kills what it has started
