"""The process that reward functions run in, and the call itself. Imports the standard library only.

A worker starts with a clean interpreter (no fork of a process that holds torch, locks and threads), reads messages from
one socket and answers each. Standard output and error are a pipe that the parent drains, so nothing a reward prints can
reach the parent's terminal or the protocol; standard input is empty.

    parent → worker   [pickled function, ...] once, then Call, Call, ...
    worker → parent   Ready | LoadFailure once, then Values | CallFailure per Call
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

FailureKind = Literal["exception", "timeout", "died", "bad_return", "bad_value"]

_MAX_DETAIL = 2000
_PARENT_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call. All lists have one entry per sample; prompts and completions are in the spec's format."""

    function: int
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Ready:
    """All functions are loaded."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Function number `function` cannot be loaded."""

    function: int
    detail: str


@dataclass(frozen=True, slots=True)
class Values:
    """One float per sample; NaN where `bad` (position → what came instead) has an entry."""

    values: list[float]
    bad: dict[int, str]


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The call gave no usable list."""

    kind: FailureKind
    detail: str


def call_reward(function: Any, call: Call) -> Values | CallFailure:
    """Call a reward function and check what it returns. Exceptions other than of class Exception pass through."""
    try:
        returned = function(
            prompts=call.prompts, completions=call.completions, completion_ids=call.completion_ids, **call.columns
        )
        # Arrays and tensors, without importing their libraries.
        returned = returned.tolist() if hasattr(returned, "tolist") else returned
    except Exception as error:  # the boundary to user code: whatever it raises is reported with the sample
        return CallFailure("exception", describe(error))
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
        return CallFailure("bad_return", f"returned {_short(returned)}; expected a list of {len(call.prompts)} floats")
    if len(returned) != len(call.prompts):
        return CallFailure(
            "bad_return", f"returned {len(returned)} values for {len(call.prompts)} samples; expected one per sample"
        )
    values, bad = [], {}
    for position, value in enumerate(returned):
        number = _as_float(value)
        if not math.isfinite(number):
            bad[position] = f"returned {_short(value)}; expected a finite number"
        values.append(number if position not in bad else math.nan)
    return Values(values, bad)


def describe(error: BaseException) -> str:
    """The end of the traceback, at most 2,000 characters."""
    return "".join(traceback.format_exception(error)).strip()[-_MAX_DETAIL:]


def main(fd: int, parent: int) -> None:
    """Serve calls on socket `fd` until it is closed or process `parent` is gone."""
    connection: Connection[Any, Any] = Connection(fd)
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    try:
        functions = _load(connection)
        while functions is not None:
            call: Call = connection.recv()
            try:
                reply = call_reward(functions[call.function], call)
            except (SystemExit, KeyboardInterrupt) as error:
                reply = CallFailure("exception", describe(error))
            _flush()
            connection.send(reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # closed by the parent


def _load(connection: Connection[Any, Any]) -> list[Any] | None:
    functions = []
    for number, pickled in enumerate(connection.recv()):
        try:
            function = pickle.loads(pickled)
            if hasattr(function, "load"):
                function.load()
        except BaseException as error:  # importing user code can raise anything, SystemExit too; all of it is reported
            _flush()
            connection.send(LoadFailure(number, describe(error)))
            return None
        functions.append(function)
    connection.send(Ready())
    return functions


def _as_float(value: Any) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '…'}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The reward may have closed it: then its own output is lost, the reward is not.
        with contextlib.suppress(ValueError, OSError):
            stream.flush()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)
