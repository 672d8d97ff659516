"""What the search over budgets saves against measuring every budget at every length, and whether it finds the same schedule.

    python -m benchmarks.calibration_cost --texts FILES [--max-tokens 2048] [--targets 0.86 0.9] [--work-dir DIR]

The exhaustive way: every rung of the ladder, constant over all lengths, on all trajectories; per bin the smallest rung whose lower
bound reaches the target. The search: `leanroll calibrate`'s, from nothing, per target. Both on the same trajectories; results are
kept in the work directory, so a broken-off run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import print_result, progress
from leanroll.calibrate.fit import Search
from leanroll.calibrate.passes import PassRunner
from leanroll.calibrate.search import Ladder, default_budgets
from leanroll.calibrate.trajectories import from_texts
from leanroll.kernels.dispatch import get_backend
from leanroll.models import load_policy
from leanroll.rollout.schedule import BudgetSchedule


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--bin-pages", type=int, default=16)
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.86, 0.9])
    parser.add_argument("--scorer", default="softmax")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/calibration_cost"))
    options = parser.parse_args(arguments)

    policy = load_policy("smollm2-135m")
    trajectories = from_texts(
        options.texts,
        policy.tokenizer,
        max_tokens=options.max_tokens,
        min_tokens=options.max_tokens,
        per_file=2,
        seed=0,
    )[: options.trajectories]
    template = BudgetSchedule("cost", bin_pages=options.bin_pages, scorer=options.scorer)
    num_bins = options.max_tokens // (options.bin_pages * template.page_size)
    ladder = Ladder.of(
        default_budgets(num_bins * options.bin_pages, template.first_pages + template.last_pages),
        num_bins=num_bins,
        bin_pages=options.bin_pages,
        coverage=[len(trajectories)] * num_bins,
        min_trajectories=4,
    )

    def search(name: str) -> Search:
        runner = PassRunner(policy, policy.spec, get_backend(), options.work_dir / name, kv_dtype=policy.dtype)
        return Search(runner, template, ladder, trajectories, say=progress)

    sweep = search("sweep")
    sweep.sweep(range(len(ladder.pages) - 1))
    guess = [
        next(r for r, p in enumerate(ladder.pages) if 6 * p >= (i + 1) * options.bin_pages) for i in range(num_bins)
    ]
    results = []
    for target in options.targets:
        fit = search(f"search-{target:g}").fit(target, guess)  # each from nothing
        found = [ladder.pages.index(p) for p in fit.schedule.pages[:-1]]
        wanted = ladder.conclude(sweep.passes, target)
        results.append(
            {
                "target": target,
                "pages": list(fit.schedule.pages[:-1]),
                "exhaustive_pages": [ladder.pages[r] for r in wanted],
                "largest_difference_rungs": max(abs(a - b) for a, b in zip(found, wanted, strict=True)),
                "passes": fit.num_passes,
                "seconds": round(fit.seconds, 1),
                "exhaustive_passes": len(sweep.passes),
                "exhaustive_seconds": round(sweep.runner.seconds, 1),
                "saved": round(sweep.runner.seconds / fit.seconds, 2),
            }
        )
    print_result(
        "calibration_cost", {"max_tokens": options.max_tokens, "trajectories": len(trajectories), "targets": results}
    )


if __name__ == "__main__":
    main()
