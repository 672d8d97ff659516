"""What the search over budgets saves against measuring every budget at every length, and whether it finds the same schedule.

    python -m benchmarks.calibration_cost --texts FILES [--max-tokens 2048] [--targets 0.86 0.9] [--work-dir DIR]
    [--plot FILE]

The exhaustive way: every rung of the ladder, constant over all lengths, on all trajectories; per bin the smallest rung whose lower
bound reaches the target. The search: `leanroll calibrate`'s, from nothing, per target. Both on the same trajectories; results are
kept in the work directory, so a broken-off run goes on. `--plot` draws the sweep: mean and 5th percentile of alpha by length at
constant budgets, the figure of the paper that says why budgets grow and why the mean does not show it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import print_result, progress
from leanroll.calibrate.fit import Search
from leanroll.calibrate.passes import PassRunner, SchedulePass
from leanroll.calibrate.search import Ladder, default_budgets
from leanroll.calibrate.trajectories import from_texts
from leanroll.kernels.dispatch import get_backend
from leanroll.models import load_policy
from leanroll.report.plots import new_figure, shade
from leanroll.rollout.schedule import BudgetSchedule

PLOTTED_EVERY = 4
"""Rungs between two curves: a doubling of the budget."""


def plot_sweep(sweep: Sequence[SchedulePass], path: Path) -> None:
    """Mean and tail of alpha by length, one line per constant budget, both on one scale."""
    shown = sweep[::PLOTTED_EVERY]
    figure = new_figure(9.0, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, statistic, title in zip(panels, ("mean", "tail"), ("mean", "5th percentile"), strict=True):
        for i, measured in enumerate(shown):
            points = [((b.low + b.high) / 2, getattr(b, statistic)) for b in measured.bins[:-1] if b is not None]
            label = f"{measured.schedule.pages[0] * measured.schedule.page_size} tokens read"
            axes.plot(*zip(*points, strict=True), marker=".", color=shade(i, len(shown)), label=label)
        axes.set_title(f"{title} of the acceptance rate", fontsize=10)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.25)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False
    )
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--bin-pages", type=int, default=32)
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.86, 0.9])
    parser.add_argument("--scorer", default="peak4-int4")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/calibration_cost"))
    parser.add_argument("--plot", type=Path, help="SVG or PNG file of the sweep")
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
    template = BudgetSchedule("cost", options.page_size, bin_pages=options.bin_pages, scorer=options.scorer)
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
    if options.plot is not None:
        plot_sweep(sweep.history, options.plot)
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
