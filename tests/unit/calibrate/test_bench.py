"""Measuring speed: what is refused, what is checked first, how ratios and trajectories come about, and other engines."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leanroll.calibrate import agreement, bench, speed
from leanroll.calibrate.agreement import Agreement, check_decoding, greedy_regret
from leanroll.calibrate.bench import check_work, integrate, largest_batch, measure_speed, prediction_device, with_jumps
from leanroll.calibrate.devices import Device
from leanroll.calibrate.peers import run_transformers
from leanroll.calibrate.peers.engines import SCRIPTS, ProcessPeer, TransformersPeer, run_job, vllm_variables
from leanroll.calibrate.speed import decode_seconds, pool_gib, random_prefill, text_prompts
from leanroll.calibrate.speed_table import SpeedTable
from leanroll.errors import BackendUnavailable, ConfigError, RolloutError
from leanroll.models import Policy
from leanroll.rollout.engine import RolloutEngine
from leanroll.rollout.schedule import UNLIMITED, BudgetSchedule
from leanroll.types import SamplingParams
from tests.tiny import tiny_model, tiny_policy, tiny_tokenizer

SCHEDULE = BudgetSchedule("four", page_size=8, pages=(4,), dense_layers=(0,), scorer="softmax")
WORK: dict[str, Any] = {"batch": 2, "lengths": (48, 96, 160), "num_steps": 2, "rounds": 2, "kernel": "reference"}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("llama")


class OwnPeer:
    """Our own model as another engine; fails at the length it is told to."""

    name, note, same_weights = "own", "the same model", True

    def __init__(self, policy: Policy, shift: int = 0, fails_at: int = 0) -> None:
        self.policy, self.shift, self.fails_at = policy, shift, fails_at
        self.jobs: list[Mapping[str, Any]] = []

    def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self.jobs.append(job)
        length, num_tokens = len(job["prompts"][0]), job["num_tokens"]
        if length + num_tokens == self.fails_at:
            raise BackendUnavailable("out of memory")
        ids = [[0] * num_tokens for _ in job["prompts"]]
        if job["temperature"] == 0:
            engine = RolloutEngine(self.policy, BudgetSchedule.dense(8), kernel="reference", kv_memory_gib=0.1)
            sampling = SamplingParams(temperature=0.0, max_completion_length=num_tokens, ignore_stop=True)
            groups = engine.generate(agreement.as_prompts(job["prompts"]), sampling, 1)
            ids = [[(t + self.shift) % 259 for t in g.rollouts[0].token_ids] for g in groups]
        return {"step_seconds": [9.0] + [0.5] * (num_tokens - 2), "token_ids": ids, "versions": {"own": "1"}}


@pytest.fixture(scope="module")
def table(policy: Policy) -> SpeedTable:
    peers = [OwnPeer(policy), OwnPeer(policy, fails_at=96)]
    return measure_speed(
        policy, SCHEDULE, **WORK, device=Device("slow", 1e8, 1e10), peers=peers, peer_steps=3, prompt_length=64, seed=1
    )


def test_every_length_is_timed_in_every_round(table: SpeedTable) -> None:
    assert [(row.length, row.num_pages, row.budget) for row in table.rows] == [(48, 6, 4), (96, 12, 4), (160, 20, 4)]
    for row in table.rows:
        assert row.dense.count == row.sparse.count == 4, "two rounds of two steps"
        assert row.speedup.count == 2
        assert 0 < row.dense.low <= row.dense.median <= row.dense.high
        assert row.tokens == row.length - 3
        assert row.predicted_dense is not None
        assert row.predicted_sparse is not None
        assert row.predicted_dense > row.predicted_sparse > 0


def test_the_trajectory_is_the_sum_of_its_steps(table: SpeedTable) -> None:
    t = table.trajectory
    tokens, dense = [row.tokens for row in table.rows], [row.dense.median for row in table.rows]
    assert (t.prompt_length, t.max_length, t.num_tokens) == (64, 160, 2 * 96)
    assert t.dense_seconds == pytest.approx(integrate(tokens, dense, 64, 160))
    assert 96 * min(dense) <= t.dense_seconds <= 96 * max(dense)
    assert t.speedup.count == 2
    # A straight line is summed exactly; outside the measured lengths the nearest one counts.
    assert integrate([10, 20], [1.0, 2.0], 10, 20) == pytest.approx(sum(1 + i / 10 for i in range(1, 11)))
    assert integrate([10, 20], [1.0, 2.0], 18, 22) == pytest.approx(1.9 + 3 * 2.0)


def test_the_result_is_json(table: SpeedTable) -> None:
    data = json.loads(json.dumps(table.as_dict(), allow_nan=False))
    assert data["schedule"]["pages"] == [4]
    assert data["rows"][1]["predicted_speedup"] > 1
    assert data["trajectory"]["predicted_speedup"] > 1
    assert data["checks"]["same_tokens"] == 1.0
    assert data["checks"]["sparse_rescored"] < data["checks"]["tolerance"] == 2e-4


def test_peers_do_the_same_work(table: SpeedTable, policy: Policy) -> None:
    whole, broken = table.peers
    assert whole.regret < 1e-4
    # The first step of a peer is not counted, and one round is enough.
    assert {length: (s.median, s.count) for length, s in whole.steps.items()} == {n: (0.5, 3) for n in WORK["lengths"]}
    assert whole.trajectory_seconds == pytest.approx(0.5 * 96)
    # One that fails keeps what it has.
    assert broken.error == "out of memory"
    assert list(broken.steps) == [48]
    assert broken.trajectory_seconds is None
    peer = OwnPeer(policy)
    run = bench.PeerSpeed("own", "", 0.0, {})
    bench._time_peer(policy, peer, run, 3, 100, 4, 0.5)
    (job,) = peer.jobs
    assert job["prompts"] == text_prompts(policy.tokenizer, 3, 94)
    assert (job["num_tokens"], job["random_cache"], job["dtype"]) == (6, True, "float32")


def test_a_peer_without_step_times_keeps_its_error_and_spoils_nothing(policy: Policy) -> None:
    class Hasty(OwnPeer):
        def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
            result = super().decode(job)
            return result | {"step_seconds": result["step_seconds"][:1]} if "kv_gib" in job else result

    table = measure_speed(policy, SCHEDULE, **WORK, peers=[Hasty(policy)], peer_steps=3, prompt_length=64, seed=1)
    (run,) = table.peers
    assert run.error is not None
    assert "no step times at" in run.error
    assert run.measured == {}
    assert table.trajectory.speedup.median > 0


def test_nothing_is_timed_when_something_is_wrong(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "decode_seconds", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(RolloutError, match="peer own decodes something else"):
        measure_speed(policy, SCHEDULE, **WORK, peers=[OwnPeer(policy, shift=1)])
    shifted = torch.full((48,), 1e-4)  # below the tolerance of each token, but everywhere
    monkeypatch.setattr(
        agreement, "rescoring_differences", lambda _policy, _groups, plan, _most: shifted * (plan is not None)
    )
    with pytest.raises(RolloutError, match=r"at most 0\.0002, 2e-05 in the mean"):
        measure_speed(policy, SCHEDULE, **WORK)


@pytest.mark.parametrize(
    ("changed", "right"),
    [
        ({}, True),
        ({"same_tokens": 0.5}, False),
        ({"full_against_dense": 0.1}, False),
        ({"sparse_rescored": 0.3}, False),
        ({"sparse_rescored": 0.3, "dense_rescored": 0.2}, True),
        ({"sparse_mean": 0.006}, False),
        ({"sparse_mean": 0.006, "dense_mean": 0.004}, True),
    ],
)
def test_what_is_rounding(changed: dict[str, float], right: bool) -> None:
    found = Agreement(1.0, 0.01, 0.01, 0.01, 0.001, 0.001, tolerance=0.05, prompt_length=384, pages=8)
    assert replace(found, **changed).is_right(exact=True) == right
    assert replace(found, same_tokens=0.5).is_right(exact=False)


def test_regret_is_that_of_the_chosen_token(policy: Policy) -> None:
    (prompt,) = text_prompts(policy.tokenizer, 1, 20)
    model = tiny_model("llama")
    logits = model(torch.tensor([prompt])).logits[0, -1].detach()
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert greedy_regret(policy, [prompt], [[best]]) == pytest.approx(0.0, abs=1e-4)
    assert greedy_regret(policy, [prompt], [[worst]]) == pytest.approx(float(logits.max() - logits.min()), abs=1e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedule": BudgetSchedule.dense(8)}, "nothing to compare"),
        ({"schedule": BudgetSchedule("all", 8, pages=(4,), dense_layers=(0, 1, 2, 3))}, "every layer"),
        ({"schedule": BudgetSchedule("wide", 8, pages=(20,))}, r"reads every page of \[48, 96, 160\] tokens"),
        ({"lengths": (48, 96, 513)}, "513 is beyond the model's context of 512"),
        ({"lengths": (7, 96)}, "7 is too short for 2 timed steps; expected 8"),
        ({"lengths": (96,)}, "two at least"),
        ({"lengths": (96, 48)}, "ascend"),
        ({"prompt_length": 20}, "expected from 48 to 159"),
        ({"batch": 0}, "at least 1 of each"),
    ],
)
def test_work_that_makes_no_sense(policy: Policy, changed: dict[str, Any], message: str) -> None:
    work = {k: v for k, v in WORK.items() if k != "kernel"} | {"schedule": SCHEDULE, "prompt_length": 48} | changed
    with pytest.raises(ConfigError, match=message):
        check_work(policy, work.pop("schedule"), **work)


def test_step_times_are_not_interpolated_across_the_end_of_a_schedule() -> None:
    fitted = BudgetSchedule("to 2,040", page_size=8, bin_pages=128, pages=(29, 48, UNLIMITED))
    lengths = with_jumps(fitted, [256, 1024, 4096], 8)
    assert lengths == (256, 1024, 2040, 2051, 4096)
    # Steps that take one second where they are sparse and nine where they read everything: 784 + 2,056 of them.
    middles = [speed.typical_length(n, 8) for n in lengths]
    seconds = [1.0 if n <= 2040 else 9.0 for n in middles]
    assert integrate(middles, seconds, 1256, 4096) == pytest.approx(784 + 9 * 2056, rel=0.003)
    assert with_jumps(fitted, [256, 1024, 2040], 8) == (256, 1024, 2040)
    assert with_jumps(fitted, [1024, 2040, 2044], 8) == (1024, 2040, 2044), "too near to time another"
    assert with_jumps(fitted, [100, 200], 8) == (100, 200), "every page throughout"
    assert with_jumps(fitted, [4000, 5000], 8) == (4000, 5000)
    assert with_jumps(SCHEDULE, [16, 64, 4096], 8) == (16, 64, 4096)
    assert with_jumps(SCHEDULE, [16], 8) == (16,)


def test_memory(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = pool_gib(policy, SCHEDULE, 2, 160)
    assert (
        needed > pool_gib(policy, BudgetSchedule.dense(8), 2, 160) > pool_gib(policy, SCHEDULE, 2, 160, torch.bfloat16)
    )
    with pytest.raises(ConfigError, match=r"kv_memory_gib is 0\.0001; raise it"):
        measure_speed(policy, SCHEDULE, **WORK, kv_memory_gib=0.0001)
    assert largest_batch(policy, SCHEDULE, 160, 3.5 * needed) == 7
    with pytest.raises(ConfigError, match="one sequence of 160 tokens"):
        largest_batch(policy, SCHEDULE, 160, needed / 4)
    monkeypatch.setattr(speed, "available_gib", lambda _device="cpu": 0.05)
    with pytest.raises(ConfigError, match=r"0\.05 GiB are free"):
        decode_seconds(policy, SCHEDULE, batch=2, context=160, num_steps=2)
    with pytest.raises(ConfigError, match="too short"):
        decode_seconds(policy, SCHEDULE, batch=2, context=7, num_steps=2)


def test_memory_at_hand_is_told() -> None:
    assert 0.01 < speed.available_gib() < 1e6


def test_random_prefill_leaves_no_trace(policy: Policy) -> None:
    engine = RolloutEngine(policy, SCHEDULE, kernel="reference", kv_memory_gib=0.01)
    before = policy.hidden
    with random_prefill(policy, engine):
        outer = policy.hidden
        with pytest.raises(RuntimeError, match="inside"), random_prefill(policy, engine):
            raise RuntimeError("inside")
        assert policy.hidden is outer
    assert policy.hidden == before
    assert "hidden" not in vars(policy)


def test_the_check_needs_a_choice_of_pages() -> None:
    short = tiny_policy("llama", max_position_embeddings=64)
    with pytest.raises(ConfigError, match="leaves none to choose from"):
        check_decoding(short, BudgetSchedule("large", 16, pages=(4,), dense_layers=()), kernel="reference")


def test_devices_to_predict_for(policy: Policy) -> None:
    assert prediction_device(policy, SCHEDULE, "none") == (None, "not asked for")
    device, note = prediction_device(policy, SCHEDULE, "auto", kernel="reference")
    assert (device, note) == (None, "the CPU is measured with the cpu kernels, not with reference")
    device, note = prediction_device(policy, SCHEDULE, "auto", kv_dtype=torch.bfloat16)
    assert device is None
    assert "one dtype" in note
    with pytest.raises(ConfigError, match="'h100' is a GPU"):
        prediction_device(policy, SCHEDULE, "h100")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_transformers_decodes_behind_a_cache_that_nothing_computed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(family)
    tiny_model(family).save_pretrained(tmp_path)
    peer = TransformersPeer(str(tmp_path), dtype=torch.float32)
    prompts = text_prompts(tiny_tokenizer(), 2, 40)
    job = {"prompts": prompts, "num_tokens": 6, "threads": 1, "dtype": "float32", "temperature": 0.0}
    computed = peer.decode(job)
    assert len(computed["step_seconds"]) == 5
    assert greedy_regret(policy, prompts, computed["token_ids"]) < 1e-3

    def own_cache(model: Any, batch: int, length: int) -> Any:
        assert (batch, length) == (2, 39)
        return model(torch.tensor(prompts)[:, :-1], use_cache=True).past_key_values

    # With the right numbers in the cache the tokens are the same; with random ones the work is.
    with monkeypatch.context() as patched:
        patched.setattr(run_transformers, "random_cache", own_cache)
        assert peer.decode(job | {"random_cache": True})["token_ids"] == computed["token_ids"]
    found = peer.decode(job | {"random_cache": True, "temperature": 1.0})
    assert [len(ids) for ids in found["token_ids"]] == [6, 6]
    with pytest.raises(BackendUnavailable, match="needs 1300000"):
        peer.decode(job | {"kv_gib": 1e6})


def test_peers_in_their_own_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such program"):
        ProcessPeer("vllm", str(tmp_path / "python"), "model", note="", same_weights=True)
    job = {"prompts": [[1, 2]], "num_tokens": 2, "threads": 1}
    script = tmp_path / "peer.py"
    result = '{"step_seconds": [1], **json.load(open(sys.argv[1]))}'
    script.write_text(f'import json, sys\nprint("loading")\nprint(json.dumps({result}))')
    assert run_job("any", [sys.executable, str(script)], job) == {"step_seconds": [1], **job}
    script.write_text('import sys\nsys.exit("no such module")')
    with pytest.raises(BackendUnavailable, match=r"any \(.*\) ended with code 1.*no such module"):
        run_job("any", [sys.executable, str(script)], job)
    script.write_text('print("nothing")')
    with pytest.raises(BackendUnavailable, match="printed no result"):
        run_job("any", [sys.executable, str(script)], job)
    python = tmp_path / "bin" / "python"
    assert vllm_variables(python)["PATH"].startswith(str(tmp_path / "bin") + os.pathsep)
    assert "LD_PRELOAD" not in vllm_variables(python)


FAKE_LLAMA_CPP = '''
"""The part of llama_cpp's low-level interface that the peer uses; a token's successor is (3 * token + position + sequence) % 97."""
from types import SimpleNamespace

__version__ = "fake"
cache = {}


def llama_backend_init(): pass
def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_model_load_from_file(path, params): return path == b"model.gguf"


def llama_init_from_model(model, params):
    assert params.n_ctx == 3 * 768 and params.n_seq_max == 3, vars(params)
    return SimpleNamespace(outputs={})


def llama_batch_init(num_tokens, embd, num_seqs):
    assert embd == 0 and num_seqs == 1
    rows = lambda: [0] * num_tokens
    return SimpleNamespace(n_tokens=0, token=rows(), pos=rows(), n_seq_id=rows(), seq_id=[[0] for _ in rows()], logits=rows())


def llama_decode(context, batch):
    context.outputs = {}
    for i in range(batch.n_tokens):
        (sequence,) = batch.seq_id[i]
        seen = cache.setdefault(sequence, [])
        assert batch.pos[i] == len(seen) and batch.n_seq_id[i] == 1
        seen.append(batch.token[i])
        if batch.logits[i]:
            context.outputs[i] = (3 * batch.token[i] + batch.pos[i] + sequence) % 97
    return 0


def llama_sampler_chain_default_params(): pass
def llama_sampler_chain_init(params): return []
def llama_sampler_chain_add(chain, sampler): chain.append(sampler)
def llama_sampler_init_greedy(): return "greedy"
def llama_sampler_init_temp(temperature): return temperature
def llama_sampler_init_dist(seed): return seed


def llama_sampler_sample(chain, context, row):
    assert chain == ["greedy"]
    return context.outputs[row]
'''


def test_llama_cpp_decodes_all_sequences_together(tmp_path: Path) -> None:
    # llama.cpp itself is not installed here: this tests what the script asks of it.
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA_CPP)
    prompts = [[(7 * i + j) % 97 for i in range(600)] for j in range(3)]
    job = {
        "model": "model.gguf",
        "prompts": prompts,
        "num_tokens": 5,
        "threads": 2,
        "dtype": "bfloat16",
        "temperature": 0.0,
    }
    command, variables = [sys.executable, str(SCRIPTS["llama_cpp"])], {"PYTHONPATH": str(tmp_path)}
    result = run_job("llama_cpp", command, job, variables)
    for sequence, ids in enumerate(result["token_ids"]):
        last = prompts[sequence][-1]
        for step, token in enumerate(ids):
            assert token == (3 * last + 599 + step + sequence) % 97
            last = token
    assert len(result["step_seconds"]) == 4
    with pytest.raises(BackendUnavailable, match="cannot load other"):
        run_job("llama_cpp", command, job | {"model": "other.gguf"}, variables)


def test_scripts_of_other_environments_import_nothing_of_ours() -> None:
    for script in SCRIPTS.values():
        assert "import leanroll" not in script.read_text()
        assert "from leanroll" not in script.read_text()
    code = "import sys, leanroll.calibrate.speed_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
