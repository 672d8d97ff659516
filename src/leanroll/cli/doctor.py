"""`leanroll doctor`: what this machine, this installation and this model offer."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leanroll import environment
from leanroll.cli.progress import status
from leanroll.config import AdapterConfig, DoctorConfig, load_config

if TYPE_CHECKING:
    from leanroll.errors import UserError
    from leanroll.models import Policy
    from leanroll.rollout.schedule import BudgetSchedule

HELP = (
    "Show the machine, versions, kernel backends (which one is used and why), the model (tokenizer, stop ids, chat template), "
    "and whether the schedule fits it."
)
SCHEMA = DoctorConfig

_EXAMPLE = [{"role": "user", "content": "Say hello."}]
_Rows = Iterable[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments besides the options of the recipe."""
    parser.add_argument("recipe", nargs="?", help="TOML file; only its model and rollout tables are looked at")
    parser.add_argument("--no-model", action="store_true", help="do not load the model")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    """Print the report; returns the exit code. A model that cannot be loaded, or that the schedule does not fit, is an error
    after the rest was shown."""
    config = load_config(DoctorConfig, arguments.recipe, overrides)
    console = Console(highlight=False)
    with status("Looking at the machine …"):
        machine = list(_machine())
        kernels = list(_kernels(config))
    _show(console, "machine", machine)
    _show(console, "versions", [(name, version or "not installed") for name, version in environment.versions().items()])
    _show(console, "kernels", kernels)
    if not arguments.no_model:
        from leanroll.train import setup

        schedule = setup.build_schedule(config.rollout)
        with status(f"Loading {config.model.name} …"):
            policy = setup.build_policy(config.model, AdapterConfig(type="none"), training=False)
        _show(console, "model", _model(policy, config))
        problem = None if schedule.is_dense else _misfit(policy, schedule, config)
        _show(console, "schedule", _schedule(policy, schedule, problem))
        if problem is not None:
            raise problem
    return 0


def _machine() -> _Rows:
    import torch

    cpu = environment.cpu()
    yield "cpu", f"{cpu['model']} ({cpu['architecture']})"
    yield "vector extensions", " ".join(cpu["flags"]) or "none that the kernels use"
    yield "cores", f"{cpu['cores']} usable"
    memory = environment.memory_gib()
    yield "memory", "unknown" if memory is None else f"{memory:g} GiB"
    set_by = os.environ.get("OMP_NUM_THREADS")
    yield "torch threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS {'not set' if set_by is None else set_by})"
    waiting = [f"{name} {os.environ.get(name, 'not set')}" for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")]
    yield "waiting threads", ", ".join(waiting)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    else:
        yield "gpu", "none that this build of torch can use"


def _kernels(config: DoctorConfig) -> _Rows:
    import torch

    from leanroll.errors import BackendUnavailable
    from leanroll.kernels.dispatch import backend_report, get_backend

    for name, available, reason in backend_report():
        yield name, f"{'available' if available else 'not available'}: {reason}"
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        used = get_backend(config.rollout.kernel, device).name
    except BackendUnavailable as error:
        used = f"none: {error}"
    yield "used", f"{used} (rollout.kernel = {config.rollout.kernel}, device {device})"


def _model(policy: Policy, config: DoctorConfig) -> _Rows:
    spec, tokenizer = policy.spec, policy.tokenizer
    yield "name", policy.name
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    yield (
        "family",
        f"{spec.family}, {parameters / 1e6:,.1f} M parameters, {str(policy.dtype).removeprefix('torch.')} on {policy.device}",
    )
    yield (
        "layers",
        f"{spec.num_layers} × {spec.num_heads} query heads, {spec.num_kv_heads} KV heads, head dim {spec.head_dim}",
    )
    windows = Counter(spec.windows)
    yield (
        "attention",
        ", ".join(
            f"{count} layers {'full' if window == 0 else f'within {window} tokens'}"
            for window, count in sorted(windows.items())
        ),
    )
    yield "context", f"{spec.max_position:,} tokens"
    from leanroll.train.setup import DTYPES

    kv_dtype = DTYPES[config.rollout.kv_dtype] if config.rollout.kv_dtype is not None else policy.dtype
    per_token = spec.kv_bytes_per_token(kv_dtype)
    tokens = int(config.rollout.kv_memory_gib * 2**30 / per_token)
    yield (
        "KV cache",
        f"{per_token / 1024:,.1f} KiB per token; rollout.kv_memory_gib = {config.rollout.kv_memory_gib:g} holds {tokens:,} tokens",
    )
    yield "tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens (model: {spec.vocab_size:,})"
    stops = [f"{index} {tokenizer.convert_ids_to_tokens(index)!r}" for index in spec.stop_token_ids]
    yield "stop ids", ", ".join(stops)
    if tokenizer.chat_template is None:
        yield "chat template", "none: chat prompts need one; set model.chat_template"
        return
    ids = policy.encode_chat(_EXAMPLE)
    yield "chat example", policy.decode(ids, skip_special_tokens=False).rstrip("\n")
    yield "", f"{len(ids)} tokens: {ids[:12]}{' …' if len(ids) > 12 else ''}"


def _schedule(policy: Policy, schedule: BudgetSchedule, problem: UserError | None) -> _Rows:
    pages = "all" if schedule.is_dense else f"{schedule.pages[0]} … {schedule.pages[-1]}"
    yield "name", schedule.name
    yield "pages read", f"{pages}, of {schedule.page_size} tokens; scorer {schedule.scorer}"
    yield "dense layers", ", ".join(map(str, schedule.dense_layers)) or ("all" if schedule.is_dense else "none")
    if schedule.is_dense:
        return
    windows = policy.spec.windows
    sparse = sum(window == 0 and layer not in schedule.dense_layers for layer, window in enumerate(windows))
    yield "sparse layers", f"{sparse} of {len(windows)}"
    yield "usable", "yes, one step of a layer was tried" if problem is None else f"no: {problem}"


def _misfit(policy: Policy, schedule: BudgetSchedule, config: DoctorConfig) -> UserError | None:
    """Why a sparse schedule cannot be used with this model and these kernels: layers, page size and scorer are tried out."""
    import torch

    from leanroll.errors import UserError
    from leanroll.kernels.dispatch import get_backend
    from leanroll.kernels.layout import DecodeBatch, PagedLayer
    from leanroll.kernels.scorers import get_scorer
    from leanroll.train.setup import DTYPES

    spec, size, device = policy.spec, schedule.page_size, policy.device
    dtype = policy.dtype if config.rollout.kv_dtype is None else DTYPES[config.rollout.kv_dtype]
    try:
        schedule.sparse_layers(spec.windows)
        backend, scorer = get_backend(config.rollout.kernel, device), get_scorer(schedule.scorer)
        kv = torch.zeros(5, spec.num_kv_heads, size, spec.head_dim, dtype=dtype, device=device)
        landmarks = scorer.allocate(5, spec.num_kv_heads, spec.head_dim, size, dtype, device)
        layer = PagedLayer(kv, kv.clone(), landmarks)
        pages = torch.arange(5, dtype=torch.int32, device=device)
        backend.update_landmarks(layer, pages, scorer)
        # Five pages of which four are read: one of the two between the reserved ones has to be chosen.
        length, budget = (torch.tensor([n], dtype=torch.int32, device=device) for n in (5 * size, 4))
        q = torch.zeros(1, spec.num_heads, spec.head_dim, dtype=policy.dtype, device=device)
        new = q[:, : spec.num_kv_heads]
        backend.decode_layer(q, new, new, layer, DecodeBatch(pages[None], length, budget), scorer, scale=1.0)
    except UserError as error:
        return error
    return None


def _show(console: Console, title: str, rows: _Rows) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print()
