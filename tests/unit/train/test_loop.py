"""The step loop: order of events, Ctrl-C, divergence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import pytest

from leanroll.errors import LeanrollError, RewardError, StorageError, TrainingDiverged
from leanroll.train.loop import Halt, LoopPlan, LoopResult, run_loop
from leanroll.train.progress import RunDisplay


class Recorder:
    """An algorithm that only writes down what happens to it."""

    def __init__(self, on_update: Callable[[int], None] | None = None) -> None:
        self.num_updates = 0
        self.halt: Halt | None = None
        self.events: list[str] = []
        self.logged: dict[int, Mapping[str, float]] = {}
        self.on_summary: Callable[[int], None] = lambda step: None
        self._on_update = on_update

    def collect(self, step: int) -> int:
        return step * 10

    def update(self, step: int, batch: int) -> dict[str, float]:
        assert batch == step * 10
        self.events.append(f"update {step}")
        if self._on_update is not None:
            self._on_update(step)
        self.num_updates += 1
        return {"loss": float(step)}

    def evaluate(self, step: int) -> dict[str, float]:
        self.events.append(f"eval {step}")
        return {"eval/reward": 1.0}

    def run(self, plan: LoopPlan, rescue: Callable[[int, LeanrollError], None] | None = None) -> LoopResult:
        def log(step: int, metrics: Mapping[str, float]) -> None:
            self.events.append(f"log {step}")
            self.logged[step] = metrics

        display = RunDisplay(plan.num_steps, plan.first_step, quiet=True)
        save = lambda step: self.events.append(f"save {step}")  # noqa: E731

        def summarise(step: int, metrics: Mapping[str, float]) -> str:
            self.on_summary(step)
            return ""

        with display:
            forget = lambda step: self.events.append(f"forget {step}")  # noqa: E731
            return run_loop(self, plan, display, log=log, save=save, forget=forget, summarise=summarise, rescue=rescue)


@pytest.mark.parametrize(("roll_back_to", "event"), [(None, "save 2"), (1, "forget 1")])
def test_a_halt_saves_or_rolls_back(roll_back_to: int | None, event: str) -> None:
    def halt(step: int) -> None:
        if step == 2:
            recorder.halt = Halt("it collapsed", roll_back_to)

    recorder = Recorder(halt)
    result = recorder.run(LoopPlan(first_step=1, num_steps=5, eval_every=0, save_every=0))
    assert result == LoopResult(last_step=2, interrupted=False, halted="it collapsed")
    assert recorder.events == ["update 1", "log 1", "update 2", "log 2", event]


def test_a_rescue_of_its_own_knows_why() -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise RewardError("broken")

    recorder = Recorder(fail)
    with pytest.raises(RewardError):
        recorder.run(LoopPlan(1, 5, 0, 0), lambda step, error: recorder.events.append(f"rescue {step}: {error}"))
    assert recorder.events[-2:] == ["update 3", "rescue 2: broken"]
    assert not any(event.startswith("save") for event in recorder.events)


def test_order_of_events() -> None:
    recorder = Recorder()
    result = recorder.run(LoopPlan(first_step=2, num_steps=5, eval_every=2, save_every=3))
    assert result == LoopResult(last_step=5, interrupted=False)
    assert " ".join(recorder.events) == (
        "update 2 eval 2 log 2 update 3 log 3 save 3 update 4 eval 4 log 4 update 5 eval 5 log 5 save 5"
    )
    assert recorder.logged[4].keys() == {"loss", "eval/reward", "time/step_s"}


def test_zero_means_only_at_the_end() -> None:
    recorder = Recorder()
    recorder.run(LoopPlan(first_step=1, num_steps=2, eval_every=0, save_every=0))
    assert recorder.events == ["update 1", "log 1", "update 2", "eval 2", "log 2", "save 2"]


def test_nothing_left_to_do() -> None:
    recorder = Recorder()
    assert recorder.run(LoopPlan(3, 2, 1, 1)) == LoopResult(last_step=2, interrupted=False)
    assert recorder.events == []


def test_ctrl_c_finishes_the_step_and_saves() -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder(interrupt)
    before = signal.getsignal(signal.SIGINT)
    assert recorder.run(LoopPlan(1, 5, 0, 0)) == LoopResult(last_step=2, interrupted=True)
    assert recorder.events[-2:] == ["log 2", "save 2"], "no evaluation, or the resumed run would differ"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_too_late_to_save_a_step_saves_the_next() -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder()
    recorder.on_summary = interrupt
    result = recorder.run(LoopPlan(1, 5, 0, 0))
    assert result.interrupted
    assert recorder.events[-1] == f"save {result.last_step}"


def test_second_ctrl_c_aborts() -> None:
    def interrupt(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder(interrupt)
    with pytest.raises(KeyboardInterrupt):
        recorder.run(LoopPlan(1, 5, 0, 0))
    assert recorder.events == ["update 1"]


@pytest.mark.parametrize("error", [TrainingDiverged("loss is nan"), RewardError("no answer")])
def test_an_error_keeps_the_last_intact_state(error: LeanrollError) -> None:
    def diverge(step: int) -> None:
        if step == 3:
            raise error

    recorder = Recorder(diverge)
    with pytest.raises(type(error)):
        recorder.run(LoopPlan(1, 5, 0, 0))
    assert recorder.events[-1] == "save 2"

    def diverge_halfway(step: int) -> None:
        if step == 3:
            recorder.num_updates += 1
            raise TrainingDiverged("loss is nan")

    recorder = Recorder(diverge_halfway)
    with pytest.raises(TrainingDiverged):
        recorder.run(LoopPlan(1, 5, 0, 0))
    assert "save 2" not in recorder.events, "the parameters are no longer those of step 2"


def test_a_disk_that_refuses_is_not_asked_for_more() -> None:
    def refuse(step: int) -> None:
        if step == 3:
            raise StorageError("full")

    recorder = Recorder(refuse)
    with pytest.raises(StorageError):
        recorder.run(LoopPlan(1, 5, 0, 0))
    assert recorder.events[-2:] == ["log 2", "update 3"]
