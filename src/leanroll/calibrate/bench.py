"""Dense against sparse decode steps over lengths, integrated over a trajectory, beside the cost model and other engines.

    table = measure_speed(policy, schedule, batch=8, lengths=(512, 2048, 8192), num_steps=12, rounds=3)
    table.trajectory.speedup.median

Correctness comes first; nothing is timed when it fails. Then dense and sparse steps of one length follow each other, in several
rounds, so that a slow moment of the machine hits both: a ratio is taken within a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from leanroll.calibrate.agreement import NUM_PROMPTS, check_decoding, greedy_regret
from leanroll.calibrate.cost import step_cost, trajectory
from leanroll.calibrate.devices import Device, named_device
from leanroll.calibrate.peers.engines import Peer
from leanroll.calibrate.probe import measure_cpu, measure_overheads, shape_of
from leanroll.calibrate.speed import (
    decode_seconds,
    pool_gib,
    require_memory,
    shortest_context,
    text_prompts,
    typical_length,
)
from leanroll.calibrate.speed_table import PeerSpeed, SpeedRow, SpeedTable, TrajectorySpeed
from leanroll.calibrate.summary import Summary
from leanroll.errors import BackendUnavailable, ConfigError, RolloutError
from leanroll.kernels.dispatch import get_backend
from leanroll.models.policy import Policy
from leanroll.rollout.schedule import BudgetSchedule

Progress = Callable[[int, int, str], None]
"""Called with measurements done, all of them, and what comes next."""

REGRET_ROUNDING = 4.0
"""A peer's greedy token may fall short of our likeliest by this many times what rounding does to a log-prob here."""
OTHER_WEIGHTS = 1.0
"""The same in nats, for a peer whose weights are quantised: a wrong model or tokenizer is off by several."""
_PEER_CHECK_LENGTH, _PEER_CHECK_TOKENS = 256, 12


def measure_speed(
    policy: Policy,
    schedule: BudgetSchedule,
    *,
    batch: int,
    lengths: Sequence[int],
    num_steps: int = 12,
    rounds: int = 3,
    prompt_length: int | None = None,
    kernel: str = "auto",
    kv_dtype: torch.dtype | None = None,
    kv_memory_gib: float | None = None,
    device: Device | None = None,
    peers: Sequence[Peer] = (),
    peer_steps: int = 6,
    peer_rounds: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> SpeedTable:
    """Time decode steps dense and under a schedule, after checking that both are right.

    Args:
        batch: sequences decoded together. lengths: tokens that they end with, ascending; two at least.
        num_steps: timed per length, round and kind. rounds: of dense and sparse in turn; their order alternates.
        prompt_length: where the trajectory begins; None: at the first length.
        kv_memory_gib: what keys and values may take; None: what is free.
        device: for predictions; None: none are made. See `prediction_device`.
        peers: other engines. They take part in the first `peer_rounds` rounds, with `peer_steps` timed steps each; one that fails
            there keeps what it has, and its error.
        seed: of random keys and values, and of draws.

    Raises:
        ConfigError: nothing to compare, lengths that do not fit the model or the steps, or too little memory.
        RolloutError: decoding is not right, or a peer runs another model.
        BackendUnavailable: a kernel or a peer does not work here.
    """
    cached = kv_dtype or policy.dtype
    dense = BudgetSchedule.dense(schedule.page_size)
    start = lengths[0] if prompt_length is None and lengths else prompt_length or 0
    check_work(
        policy,
        schedule,
        batch=batch,
        lengths=lengths,
        num_steps=max(num_steps, peer_steps) if peers else num_steps,
        rounds=rounds,
        prompt_length=start,
        kv_dtype=cached,
        kv_memory_gib=kv_memory_gib,
    )
    checks = check_decoding(policy, schedule, kernel=kernel, kv_dtype=cached, seed=seed)
    runs = [_checked(policy, peer, max(checks.tolerance, checks.dense_rescored)) for peer in peers]

    total = 2 * rounds * len(lengths) + min(peer_rounds, rounds) * len(runs) * len(lengths)
    done = 0

    def report(what: str) -> None:
        if progress is not None:
            progress(done, total, what)

    seconds: dict[tuple[str, int], list[list[float]]] = {}
    for number in range(rounds):
        kinds = {"dense": dense, "sparse": schedule}
        for length in lengths:
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                report(f"round {number + 1}, {length} tokens, {kind}")
                steps = decode_seconds(
                    policy, kinds[kind], batch=batch, context=length, num_steps=num_steps, kernel=kernel, kv_dtype=cached,
                    seed=seed,
                )  # fmt: skip
                seconds.setdefault((kind, length), []).append(steps)
                done += 1
            for peer, run in zip(peers, runs, strict=True) if number < peer_rounds else ():
                report(f"round {number + 1}, {length} tokens, {peer.name}")
                _time_peer(policy, peer, run, batch, length, peer_steps, pool_gib(policy, dense, batch, length, cached))
                done += 1
    report("done")

    rows = tuple(_row(policy, schedule, batch, n, num_steps, seconds, device) for n in lengths)
    for run in runs:
        if run.error is None:
            medians = [run.steps[n].median for n in lengths]
            middles = [typical_length(n, peer_steps) for n in lengths]
            run.trajectory_seconds = integrate(middles, medians, start, lengths[-1])
    return SpeedTable(
        model=policy.name,
        schedule=schedule,
        batch=batch,
        device_name=torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else str(policy.device),
        kernel=get_backend(kernel, policy.device).name,
        dtype=str(policy.dtype).removeprefix("torch."),
        kv_dtype=str(cached).removeprefix("torch."),
        threads=torch.get_num_threads(),
        checks=checks,
        rows=rows,
        trajectory=_trajectory(policy, schedule, batch, rows, seconds, start, device),
        device=device,
        peers=tuple(runs),
    )


def check_work(
    policy: Policy,
    schedule: BudgetSchedule,
    *,
    batch: int,
    lengths: Sequence[int],
    num_steps: int,
    rounds: int,
    prompt_length: int,
    kv_dtype: torch.dtype | None = None,
    kv_memory_gib: float | None = None,
) -> None:
    """Raise ConfigError for what cannot be measured, before anything is computed. Arguments as for `measure_speed`."""
    if batch < 1 or num_steps < 1 or rounds < 1:
        raise ConfigError(f"batch is {batch}, num_steps {num_steps} and rounds {rounds}; expected at least 1 of each.")
    if schedule.is_dense:
        raise ConfigError(
            f"schedule {schedule.name!r} reads every page, so there is nothing to compare; give a preset or a JSON file that "
            "does not (`leanroll calibrate` makes one)."
        )
    if len(lengths) < 2 or list(lengths) != sorted(set(lengths)):
        raise ConfigError(f"lengths {list(lengths)} must ascend, and be two at least: a trajectory runs between them.")
    most, least = policy.spec.max_position, shortest_context(num_steps)
    if lengths[-1] > most:
        raise ConfigError(f"length {lengths[-1]} is beyond the model's context of {most} tokens; lower it.")
    if lengths[0] < least:
        raise ConfigError(
            f"length {lengths[0]} is too short for {num_steps} timed steps; expected {least} tokens at least."
        )
    if not lengths[0] <= prompt_length < lengths[-1]:
        raise ConfigError(
            f"prompt_length is {prompt_length}; expected from {lengths[0]} to {lengths[-1] - 1}, between the first and the last "
            "length, since step times are interpolated and not guessed beyond."
        )
    full = [i for i, window in enumerate(policy.spec.windows) if window == 0]
    if not set(full) - set(schedule.dense_layers):
        raise ConfigError(
            f"schedule {schedule.name!r} keeps every layer with full attention dense (layers {full}), so there is nothing to "
            "compare."
        )
    size = schedule.page_size
    if all(-(-n // size) <= schedule.budget(n) for n in (typical_length(n, num_steps) for n in lengths)):
        raise ConfigError(
            f"schedule {schedule.name!r} reads every page of {list(lengths)} tokens, so there is nothing to compare; measure "
            f"longer ones than its budget of {schedule.budget(lengths[-1])} pages of {size} tokens."
        )
    needed = pool_gib(policy, schedule, batch, lengths[-1], kv_dtype)
    if kv_memory_gib is not None and needed > kv_memory_gib:
        raise ConfigError(
            f"{batch} sequences of {lengths[-1]} tokens need {needed:.2f} GiB of keys and values, but kv_memory_gib is "
            f"{kv_memory_gib:g}; raise it, or use a smaller batch or shorter lengths."
        )
    require_memory(policy, schedule, batch=batch, context=lengths[-1], kv_dtype=kv_dtype)


def with_jumps(schedule: BudgetSchedule, lengths: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """The lengths, and two more wherever a schedule goes over to reading every page between two of them, as it does beyond what it
    was fitted for: the last sparse one, and the next whose `num_steps` timed steps all read everything. A step's time jumps
    there, and would be interpolated across."""
    found: list[int] = []
    for before, after in itertools.pairwise(lengths):
        found.append(before)
        between = np.arange(before, after + 1)
        reads_all = -(-between // schedule.page_size) <= schedule.budgets(between)
        last_sparse = int(between[~reads_all].max(initial=0))
        if reads_all[-1] and before <= last_sparse < after:
            edges = (last_sparse, last_sparse + num_steps + 3)
            found += [edge for edge in edges if before < edge < after]
    return (*found, *lengths[-1:])


def largest_batch(
    policy: Policy, schedule: BudgetSchedule, length: int, kv_memory_gib: float, kv_dtype: torch.dtype | None = None
) -> int:
    """Sequences of `length` tokens whose keys, values and landmarks fit in `kv_memory_gib`.

    Raises:
        ConfigError: not one.
    """
    one = pool_gib(policy, schedule, 1, length, kv_dtype)
    if one > kv_memory_gib:
        raise ConfigError(
            f"one sequence of {length} tokens needs {one:.2f} GiB of keys and values, but kv_memory_gib is {kv_memory_gib:g}; "
            "raise it or shorten the length."
        )
    return int(kv_memory_gib / one)


def prediction_device(
    policy: Policy, schedule: BudgetSchedule, name: str, *, kernel: str = "auto", kv_dtype: torch.dtype | None = None
) -> tuple[Device | None, str]:
    """The device that the cost model predicts for, and a sentence about it.

    name: "auto" measures the CPU at hand and predicts nothing on other devices, "none" nothing; otherwise a `named_device`.

    Raises:
        ConfigError: a named device for a policy on the CPU, or an unknown name.
    """
    if name == "none":
        return None, "not asked for"
    if policy.sampler is not None:
        return None, "the cost model knows no sampler adapter"
    on_cpu = policy.device.type == "cpu"
    if name != "auto" and on_cpu:
        raise ConfigError(
            f"device {name!r} is a GPU, but the model runs on the CPU; its times would stand beside those of another machine. "
            "Use 'auto' or 'none'."
        )
    if name == "auto" and not on_cpu:
        return (
            None,
            f"a device of type {policy.device.type} is not measured; `leanroll bench` predicts for one that bench.device names",
        )
    if kv_dtype not in (None, policy.dtype):
        return None, "the cost model has one dtype for weights and cache"
    backend = get_backend(kernel, policy.device).name
    if on_cpu and backend != "cpu":
        return None, f"the CPU is measured with the cpu kernels, not with {backend}"
    try:
        shape = shape_of(policy)
        if not on_cpu:
            return named_device(name), f"{name} at its datasheet's rates, which is a bound"
        device = measure_cpu(shape, scorer=schedule.scorer, page_size=schedule.page_size)
    except (ConfigError, BackendUnavailable) as error:
        # Experts, fp16, or a scorer without a kernel: there is something to measure all the same.
        return None, str(error)
    return measure_overheads(policy, device), "the CPU at hand, measured kernel by kernel"


def integrate(tokens: Sequence[int], seconds: Sequence[float], prompt_length: int, max_length: int) -> float:
    """Sum of the step times from prompt_length + 1 to max_length tokens, interpolated between those measured at `tokens`."""
    steps = np.arange(prompt_length + 1, max_length + 1)
    return float(np.interp(steps, tokens, seconds).sum())


def _checked(policy: Policy, peer: Peer, rounding: float) -> PeerSpeed:
    """Run a peer on short prompts and judge its tokens by our policy; `rounding` is what a log-prob differs by anyway."""
    length = min(_PEER_CHECK_LENGTH, policy.spec.max_position - _PEER_CHECK_TOKENS)
    prompts = text_prompts(policy.tokenizer, NUM_PROMPTS, length)
    job = _job(policy, prompts, _PEER_CHECK_TOKENS) | {"temperature": 0.0}
    result = peer.decode(job)
    regret = greedy_regret(policy, prompts, result["token_ids"])
    limit = REGRET_ROUNDING * rounding if peer.same_weights else max(OTHER_WEIGHTS, REGRET_ROUNDING * rounding)
    if regret > limit:
        raise RolloutError(
            f"peer {peer.name} decodes something else: a token it picks greedily is {regret:.3g} nats less likely here than the "
            f"likeliest; expected {limit:g} at most. Nothing was timed. Does it run the same model?"
        )
    return PeerSpeed(peer.name, peer.note, regret, result["versions"])


def _job(policy: Policy, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    return {
        "prompts": [list(p) for p in prompts],
        "num_tokens": num_tokens,
        "threads": torch.get_num_threads(),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "temperature": 1.0,
    }


def _time_peer(
    policy: Policy, peer: Peer, run: PeerSpeed, batch: int, length: int, num_steps: int, cache_gib: float
) -> None:
    """Steps of a peer that end with `length` tokens; the first one warms up."""
    if run.error is not None:
        return
    prompts = text_prompts(policy.tokenizer, batch, length - num_steps - 2)
    job = _job(policy, prompts, num_steps + 2) | {"random_cache": True, "kv_gib": cache_gib}
    try:
        steps = run.measured.setdefault(length, [])
        steps += peer.decode(job)["step_seconds"][1:]
        if not steps:
            raise BackendUnavailable(f"The peer {peer.name} returned no step times at {length} tokens.")
    except BackendUnavailable as error:
        del run.measured[length]
        run.error = str(error)


def _row(
    policy: Policy,
    schedule: BudgetSchedule,
    batch: int,
    length: int,
    num_steps: int,
    seconds: dict[tuple[str, int], list[list[float]]],
    device: Device | None,
) -> SpeedRow:
    tokens = typical_length(length, num_steps)
    dense, sparse = (seconds[kind, length] for kind in ("dense", "sparse"))
    predicted: list[float | None] = [None, None]
    if device is not None:
        shape = shape_of(policy)
        predicted = [
            float(step_cost(shape, s, [tokens] * batch).step_seconds(device))
            for s in (BudgetSchedule.dense(schedule.page_size), schedule)
        ]
    num_pages = -(-tokens // schedule.page_size)
    return SpeedRow(
        length=length,
        tokens=tokens,
        num_pages=num_pages,
        budget=min(num_pages, schedule.budget(tokens)),
        dense=Summary.of([x for steps in dense for x in steps]),
        sparse=Summary.of([x for steps in sparse for x in steps]),
        speedup=Summary.of([_median(d) / _median(s) for d, s in zip(dense, sparse, strict=True)]),
        predicted_dense=predicted[0],
        predicted_sparse=predicted[1],
    )


def _median(values: Sequence[float]) -> float:
    return Summary.of(values).median


def _trajectory(
    policy: Policy,
    schedule: BudgetSchedule,
    batch: int,
    rows: Sequence[SpeedRow],
    seconds: dict[tuple[str, int], list[list[float]]],
    start: int,
    device: Device | None,
) -> TrajectorySpeed:
    tokens, lengths = [row.tokens for row in rows], [row.length for row in rows]
    end = lengths[-1]
    # Per round, from that round's own steps.
    ratios = []
    for number in range(len(seconds["dense", end])):
        dense, sparse = (
            integrate(tokens, [_median(seconds[kind, n][number]) for n in lengths], start, end)
            for kind in ("dense", "sparse")
        )
        ratios.append(dense / sparse)
    predicted = None
    if device is not None:
        predicted = trajectory(
            shape_of(policy), schedule, device, prompt_length=start, completion_lengths=[end - start + 1] * batch
        )
    return TrajectorySpeed(
        prompt_length=start,
        max_length=end,
        num_tokens=batch * (end - start),
        dense_seconds=integrate(tokens, [row.dense.median for row in rows], start, end),
        sparse_seconds=integrate(tokens, [row.sparse.median for row in rows], start, end),
        speedup=Summary.of(ratios),
        predicted_dense_seconds=None if predicted is None else predicted.dense_seconds,
        predicted_sparse_seconds=None if predicted is None else predicted.sparse_seconds,
    )
