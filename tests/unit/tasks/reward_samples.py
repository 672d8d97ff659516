"""Reward functions, good and bad, that the tests run in worker processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def columns(completions: list[str], answer: list[str], bonus: list[float | None], **_: Any) -> list[float]:
    return [float(text == a) + (b or 0.0) for text, a, b in zip(completions, answer, bonus, strict=True)]


def num_ids(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[int]:
    return [len(ids) for ids in completion_ids]


def conversational(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    assert prompts[0][-1]["role"] == "user"
    assert completions[0][0]["role"] == "assistant"
    return [float(len(c[0]["content"])) for c in completions]


def loads_nothing_heavy(completions: list[str], **_: Any) -> list[float]:
    return [float(not {"torch", "transformers", "numpy"} & set(sys.modules))] * len(completions)


def process_id(completions: list[str], **_: Any) -> list[float]:
    return [float(os.getpid())] * len(completions)


def misbehaves(completions: list[str], **_: Any) -> list[Any]:
    """Does what a completion says; otherwise 1."""
    values: list[Any] = []
    for text in completions:
        value: Any = 1.0
        if text == "raise":
            print("about to raise")
            raise KeyError("no such thing")
        if text == "sys.exit":
            sys.exit(3)
        if text == "hang":
            print("about to hang", flush=True)
            time.sleep(600)
        if text == "spin":
            while True:
                pass
        if text == "os._exit":
            print("about to exit", flush=True)
            os._exit(7)
        if text == "segfault":
            ctypes.string_at(0)
        if text == "nan":
            value = float("nan")
        if text == "huge":
            value = 10**400
        if text == "none":
            value = None
        if text == "string":
            value = "1.0"
        if text == "read input":
            value = float(len(sys.stdin.read()))
        values.append(value)
    return values


def kills_itself(completions: list[str], mark: list[str], **_: Any) -> list[float]:
    """SIGKILL as from outside, as many times as the first column says it has left."""
    path = mark[0]
    with open(path, encoding="ascii") as file:
        left = int(file.read())
    if left:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)


def floods(completions: list[str], **_: Any) -> list[float]:
    for _i in range(200):
        print("x" * 20_000)
        os.write(2, b"y" * 20_000)
    return [1.0] * len(completions)


def slow_each(completions: list[str], **_: Any) -> list[float]:
    time.sleep(0.15 * len(completions))
    return [1.0] * len(completions)


def fails_in_batches(completions: list[str], **_: Any) -> list[float]:
    if len(completions) > 1:
        raise ValueError("only one at a time")
    return [2.0]


def one_value(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


def a_dict(completions: list[str], **_: Any) -> dict[str, float]:
    return {text: 1.0 for text in completions}


def an_array(completions: list[str], **_: Any) -> Any:
    import numpy as np

    return np.arange(len(completions), dtype=np.float32)
