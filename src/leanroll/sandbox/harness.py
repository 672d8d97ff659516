"""Runs a program and its tests in this interpreter, and says how it went in a way that only the end of the tests reaches.

Whatever ends the process before that (os._exit, a signal, a limit) leaves no verdict. A program that wants to can still
tamper with its tests, since both share one interpreter (docs/code-rewards.md).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # of `typing`, which takes longer to import than the rest together
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RECORD = "__leanroll_record__"
"""Name of the function that instrumented tests call with (number of the assert, whether it held)."""
_DONE = "__leanroll_done__"
_MODULE = "program"


def run(job: dict[str, Any], report: Callable[[str], None]) -> None:
    """Run `job` ("program", "tests", "entry_point", "calls_check", see `leanroll.sandbox.run`), report "done <status>
    <held>" with the comma-separated numbers of the asserts that held, and end the process."""
    # Taken before the program can replace them.
    execute, translate, leave, excepthook = exec, compile, os._exit, sys.__excepthook__
    process, this_process = os.getpid(), os.getpid
    held: dict[int, bool] = {}
    status = "failed"
    try:
        module = type(sys)(_MODULE)  # dataclasses and pickle look their classes' module up
        sys.modules[_MODULE] = module
        names = module.__dict__
        builtin = names["__builtins__"] = sys.modules["builtins"]
        execute(translate(job["program"], "<program>", "exec", dont_inherit=True), names)
        # Names of its own, so that a program cannot replace `abs` or `len` in the tests by defining them.
        own = vars(builtin)
        entry = job["entry_point"]
        tests = {name: value for name, value in names.items() if name not in own or name == entry}
        tests = {name: value for name, value in tests.items() if not name.startswith("__")}
        if entry and entry not in names:
            raise NameError(f"the program defines no {entry!r}")

        def record(number: int, held_now: bool) -> None:
            held[number] = held.get(number, True) and held_now

        tests |= {"__name__": "tests", "__builtins__": builtin, RECORD: record}
        source = job["tests"] + (f"\n\ncheck({entry})" if job["calls_check"] else "") + f"\n{_DONE} = True\n"
        execute(translate(source, "<tests>", "exec", dont_inherit=True), tests)
        if tests.get(_DONE) is True:
            status = "passed" if all(held.values()) else "failed"
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the program too
        try:
            trace = error.__traceback__
            excepthook(type(error), error.with_traceback(trace and trace.tb_next), None)  # without our own frame
        except BaseException:
            status = "failed"  # an exception that cannot even be printed
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = "failed"  # it has replaced or closed them in a way that cannot be used
    if this_process() != process:
        leave(1)  # a copy that the program made by os.fork
    try:
        report(f"done {status} {','.join(str(number) for number, ok in held.items() if ok)}")
    finally:
        leave(0)
