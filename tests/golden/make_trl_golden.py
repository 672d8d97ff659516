"""What TRL's GRPOTrainer computes for handcrafted rollouts: loss, advantages and the gradient of every parameter.

    python tests/golden/make_trl_golden.py        # needs trl==1.16.*; writes trl_grpo.safetensors beside this file

Each case runs TRL's own code from rewards to loss: `_generate_and_score_completions`, with only the sampling replaced, on the
old weights, then `_compute_loss` on the new ones. `tests/invariants/test_trl_parity.py` compares our losses with the stored
numbers, and with fresh ones where trl is installed. Imports nothing of leanroll.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

GOLDEN = Path(__file__).with_name("trl_grpo.safetensors")
NUM_GENERATIONS, MAX_COMPLETION_LENGTH, EOS, PAD = 3, 7, 2, 0

PROMPTS = ((5, 9, 11), (4, 6, 8, 10, 12))
# The second completion of each prompt is cut: it does not end in EOS.
COMPLETIONS = (
    ((13, 14, 15, 2), (16, 17, 18, 19, 20, 21, 22), (23, 2)),
    ((24, 25, 26, 27, 2), (28, 29, 30, 31, 7, 9, 11), (13, 15, 17, 19, 21, 2)),
)
REWARDS = ((1.0, 0.0, 0.5), (0.2, 0.9, 0.1))


@dataclass(frozen=True)
class Case:
    """Settings in TRL's names. importance_sampling_mode None: no correction."""

    name: str
    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    scale_rewards: str = "group"
    temperature: float = 1.0
    mask_truncated_completions: bool = False
    importance_sampling_mode: str | None = None
    importance_sampling_cap: float = 1.15
    importance_sampling_floor: float | None = None


CASES = (
    *(Case(kind, loss_type=kind) for kind in ("grpo", "bnpo", "dapo", "dr_grpo")),
    *(Case(f"{kind}-masked", loss_type=kind, mask_truncated_completions=True) for kind in ("grpo", "dapo", "dr_grpo")),
    Case("narrow-clip", epsilon=0.05, epsilon_high=0.1),
    Case("dual-clip", delta=1.4),
    Case("kl", beta=0.2, loss_type="grpo"),
    Case("plain-kl", beta=0.2, loss_type="grpo", use_bias_correction_kl=False),
    Case("no-std", scale_rewards="none"),
    Case("batch-std", scale_rewards="batch"),
    Case("temperature", temperature=0.7),
    *(
        Case(mode, importance_sampling_mode=mode)
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    Case("floor", importance_sampling_mode="token_mask", importance_sampling_floor=0.9),
    Case("truncate-floor", importance_sampling_mode="token_truncate", importance_sampling_floor=0.9),
    Case(
        "everything",
        loss_type="grpo",
        delta=1.4,
        beta=0.2,
        temperature=0.7,
        mask_truncated_completions=True,
        importance_sampling_mode="sequence_truncate",
        importance_sampling_cap=1.5,
    ),
)


def tiny_model(weights: Tensor | None = None) -> LlamaForCausalLM:
    """A Llama of about 4,000 parameters; `weights` are its parameters, flat."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    if weights is not None:
        load_flat(model, weights)
    return model.train()


def load_flat(model: torch.nn.Module, weights: Tensor) -> None:
    """Set all parameters from one flat tensor."""
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())


def make_inputs() -> dict[str, Tensor]:
    """Weights of the old, new and reference policy, and the sampler's log-probs [6, 7] of the completions (0 padded)."""
    torch.manual_seed(0)
    old = torch.nn.utils.parameters_to_vector(tiny_model().parameters()).detach()
    new, ref = (old + 0.04 * torch.randn_like(old) for _ in range(2))
    sampler = torch.zeros(len(PROMPTS) * NUM_GENERATIONS, MAX_COMPLETION_LENGTH)
    model = tiny_model(old)
    for row, (prompt, completion) in enumerate(
        (p, c) for p, group in zip(PROMPTS, COMPLETIONS, strict=True) for c in group
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        drawn = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        sampler[row, : len(completion)] = drawn + 0.15 * torch.randn(len(completion))
    return {"old": old, "new": new, "ref": ref, "sampler": sampler}


def tokenizer() -> Any:
    """One word per token id, so that nothing has to be downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32)}, unk_token="t3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=f"t{PAD}", bos_token="t1", eos_token=f"t{EOS}")


def run_trl(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """loss [], advantages [6] and gradient [num parameters] of one case, as TRL computes them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    flat_rewards = [r for group in REWARDS for r in group]
    rows = [{"prompt": " ".join(f"t{i}" for i in p)} for p in PROMPTS for _ in range(NUM_GENERATIONS)]
    correcting = case.importance_sampling_mode is not None
    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=len(rows),
            gradient_accumulation_steps=1,
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            num_iterations=2,  # so that old log-probs are computed
            loss_type=case.loss_type,
            epsilon=case.epsilon,
            epsilon_high=case.epsilon_high,
            delta=case.delta,
            use_bias_correction_kl=case.use_bias_correction_kl,
            scale_rewards=case.scale_rewards,
            temperature=case.temperature,
            mask_truncated_completions=case.mask_truncated_completions,
            vllm_importance_sampling_correction=correcting,
            vllm_importance_sampling_mode=case.importance_sampling_mode or "token_truncate",
            vllm_importance_sampling_clip_max=case.importance_sampling_cap,
            vllm_importance_sampling_clip_min=case.importance_sampling_floor,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=tiny_model(inputs["old"]),
            reward_funcs=lambda completions, **_: flat_rewards,
            args=args,
            train_dataset=Dataset.from_list(rows[::NUM_GENERATIONS]),
            processing_class=tokenizer(),
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = correcting  # the rollouts count as vLLM's, without vLLM
        if case.beta:
            trainer.beta = case.beta
            # TRL gives the reference its fused head when it makes it itself.
            reference = GRPOTrainer(
                model=tiny_model(inputs["ref"]),
                reward_funcs=lambda completions, **_: flat_rewards,
                args=args,
                train_dataset=Dataset.from_list(rows[::NUM_GENERATIONS]),
                processing_class=tokenizer(),
            )
            trainer.ref_model = reference.model
        lengths = [len(c) for group in COMPLETIONS for c in group]
        sampled = (
            [list(p) for p in PROMPTS for _ in range(NUM_GENERATIONS)],
            [list(c) for group in COMPLETIONS for c in group],
            None,
            [" ".join(f"t{i}" for i in c) for group in COMPLETIONS for c in group],
            [row[:n].tolist() for row, n in zip(inputs["sampler"], lengths, strict=True)] if correcting else None,
            {},
            None,
            None,
        )
        trainer._generate = lambda prompts: sampled
        batch = trainer._generate_and_score_completions(rows)
        load_flat(trainer.model, inputs["new"])
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return {"loss": loss.detach(), "advantages": batch["advantages"], "gradient": gradient.clone()}


def main() -> None:
    """Write the golden file."""
    import trl
    from safetensors.torch import save_file

    inputs = make_inputs()
    tensors = {f"input.{name}": value for name, value in inputs.items()}
    for case in CASES:
        result = run_trl(case, inputs)
        tensors |= {f"{case.name}.{name}": value.contiguous() for name, value in result.items()}
        print(f"{case.name}: loss {float(result['loss']):+.6f}, |gradient| {float(result['gradient'].norm()):.6f}")
    metadata = {"trl": trl.__version__, "torch": torch.__version__, "cases": json.dumps([asdict(c) for c in CASES])}
    save_file(tensors, GOLDEN, metadata=metadata)
    print(f"wrote {GOLDEN} ({GOLDEN.stat().st_size // 1024} KiB)")


if __name__ == "__main__":
    main()
