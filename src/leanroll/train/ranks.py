"""Several processes that train one policy: who does which share of a step, and how they tell each other.

Every process (rank) runs the whole policy, whose modules its engine uses; `train.sharding` splits what an update keeps beside it.
Rollouts, rewards, scoring and backward passes are split by groups; rollouts and rewards are then known to all, so that whatever
is decided or normalised over a step is computed from the same numbers everywhere. Gradients are summed once per update. With one
process everything here is the identity.

Every exchange starts with a message of each rank. A rank that fails sends its error instead, wherever the others are, so
all of them stop; a message also says what it is for, so that ranks that went apart stop with an error too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from leanroll.errors import ConfigError, LeanrollError, RankError
from leanroll.models import Policy

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others before it gives up; a rank that dies is noticed at once."""

_BUCKET_ELEMENTS = 2**24
"""Elements of gradients that are copied and summed at once (64 MiB)."""

_FSDP = "ACCELERATE_USE_FSDP"
_REFUSED = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_WITHOUT_EFFECT = {
    "FSDP_OFFLOAD_PARAMS": "shards stay on the device",
    "FSDP_ACTIVATION_CHECKPOINTING": "that is train.gradient_checkpointing in the recipe",
}
"""Options of accelerate's FSDP that a user would miss, and why they do nothing here."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank brings to an exchange. error: its type and text, in place of a value."""

    what: str
    value: Any = None
    error: tuple[type[LeanrollError], str] | None = None


class Ranks:
    """The processes of this run, as seen by one of them. rank: from 0; 0 is the main one, the only one that writes.

    sharded: whether each keeps a shard of what is trained (`train.sharding`), not all of it.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, sharded: bool = False) -> None:
        """Make it with `join`; without arguments, a process alone. Collective when size > 1."""
        self.rank, self.size, self.sharded = rank, size, sharded
        # Of its own, on the CPU: messages need no GPU, and may be as far apart as a step of the slowest rank.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if size > 1 else None
        self._stopped = False

    @classmethod
    def join(cls, device: str, sharding: Literal["none", "fsdp2"] = "none") -> Ranks:
        """Meet the processes that a launcher (`accelerate launch`, torchrun) started beside this one.

        device: torch device of the policy. sharding: `train.sharding`; a launcher set up for FSDP2 turns it on too.

        Raises:
            ConfigError: a launcher configured to shard the model in another way than FSDP2, sharding over one process, or a device
                that all processes would share.
        """
        sharded = _launcher_shards() or sharding == "fsdp2"
        state = PartialState(cpu=torch.device(device).type == "cpu")
        if state.num_processes > 1 and torch.device(device).index is not None:
            raise ConfigError(
                f"model.device is {device!r}, with {state.num_processes} processes; expected a device without a number, each "
                "process then takes one of its own. Set model.device = 'cuda', or start one process."
            )
        if sharded and state.num_processes == 1:
            raise ConfigError(
                "FSDP2 is on (train.sharding, or the launcher's configuration), but there is one process, so nothing can be split. "
                "Start several (docs/distributed.md), or leave it out."
            )
        return cls(state.process_index, state.num_processes, sharded=sharded)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # -- shares -------------------------------------------------------------------------------------------------------

    def share(self, count: int) -> range:
        """Which of `count` things in order are this rank's: contiguous, sizes differ by one at most, the first ranks have more."""
        small, more = divmod(count, self.size)
        first = self.rank * small + min(self.rank, more)
        return range(first, first + small + (self.rank < more))

    def split(self, things: Sequence[T], work: Callable[[Sequence[T]], Iterable[R]], what: str) -> list[R]:
        """Let each rank do its share; the results of all, in order. work: any number of results for a share, which may be empty."""
        own = self.share(len(things))
        return self.join_lists(list(work(things[own.start : own.stop])), what)

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def gather(self, value: T, what: str) -> list[T]:
        """The value of every rank, by rank. value: anything that can be pickled. what: named in errors.

        Raises:
            LeanrollError: another rank failed; of the same type as there.
            RankError: another rank is gone, or went another way.
        """
        return [value] if self.size == 1 else self._exchange(_Message(what, value))

    def join_lists(self, values: list[T], what: str) -> list[T]:
        """The lists of all ranks, one behind the other."""
        return [value for part in self.gather(values, what) for value in part]

    def from_main(self, value: T, what: str) -> T:
        """The main rank's value."""
        return self.gather(value if self.is_main else None, what)[0]  # type: ignore[return-value]

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag, what))

    def check_equal(self, value: str | float, what: str) -> None:
        """Raise RankError, on all ranks, unless all have the same value."""
        values = self.gather(value, what)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(
                    f"{what.capitalize()} of process {rank} are not those of process 0; expected the same on all of them. "
                    "Start every process with the same command, files, versions of packages, and kind of device."
                )

    def sum_gradients(self, masters: Sequence[Tensor]) -> None:
        """Sum `.grad` of fp32 tensors over the ranks, in place. One that no rank has stays None."""
        if self.size == 1:
            return
        present = self.gather([m.grad is not None for m in masters], "gradients")
        wanted = [m for m, *flags in zip(masters, *present, strict=True) if any(flags)]
        for bucket in _buckets(wanted):
            grads = [torch.zeros_like(m) if m.grad is None else m.grad for m in bucket]
            flat = torch.cat([g.reshape(-1) for g in grads])
            with peers():
                dist.all_reduce(flat)
            parts = flat.split([g.numel() for g in grads])
            for master, grad, part in zip(bucket, grads, parts, strict=True):
                master.grad = grad.copy_(part.view_as(grad))

    # -- failure ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around all that the ranks do together: an exception of one stops all, and none leaves before the last one is done
        (launchers kill the others once one has failed, and the main rank may be saving)."""
        if self.size == 1:
            yield
            return
        try:
            with _fsdp_is_ours():
                yield
            self.gather(None, "end")
        except Exception as error:
            self._tell(error)
            self._leave()
            raise
        finally:
            dist.destroy_process_group(self._group)

    def meet_after(self, error: Exception, state: tuple[int, ...]) -> bool:
        """After an error, inside of `session`: whether all ranks come here, with the same state.

        The others may be elsewhere for good, with an error that leads past here, or gone.
        """
        self._tell(error)
        try:
            messages = self._send(_Message("rescue", state))
        except RankError:
            return False
        return all((m.what, m.value) == ("rescue", state) for m in messages)

    def _tell(self, error: Exception) -> None:
        if self._stopped:
            return
        kind = type(error) if isinstance(error, LeanrollError) else RankError
        text = str(error) if isinstance(error, LeanrollError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(LeanrollError):
            self._exchange(_Message("error", error=(kind, text)))

    def _leave(self) -> None:
        """Wait until all ranks are here."""
        with contextlib.suppress(RankError):  # they are gone
            while any(m.what != "leave" for m in self._send(_Message("leave"))):
                pass

    def _send(self, message: _Message) -> list[_Message]:
        messages: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(messages, message, group=self._group)
        return messages

    def _exchange(self, message: _Message) -> list[Any]:
        messages = self._send(message)
        failed = [(rank, m.error) for rank, m in enumerate(messages) if m.error is not None]
        if failed:
            self._stopped = True
            rank, (kind, text) = failed[0]
            raise kind(f"Process {rank} of {self.size}: {text}")
        if len({m.what for m in messages}) > 1:
            self._stopped = True
            places = ", ".join(f"{rank} is at {m.what!r}" for rank, m in enumerate(messages))
            raise RankError(
                f"The processes went apart: {places}. Expected the same order of work in all; please report this."
            )
        return [m.value for m in messages]


ALONE = Ranks()
"""One process."""


def fingerprint(policy: Policy) -> str:
    """Hash of all of a policy's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in policy.model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _launcher_shards() -> bool:
    """Whether the launcher is set up for FSDP2. Raises ConfigError for other ways to shard, and options without effect."""
    refused = [name for name in _REFUSED if _is_set(name)]
    if _is_set(_FSDP) and os.environ.get("FSDP_VERSION", "1") != "2":
        refused.append(_FSDP)
    if refused:
        raise ConfigError(
            f"{refused[0]} is set: the launcher is configured to shard the model; expected plain data parallelism (--multi_gpu) or "
            "FSDP2 (--use_fsdp --fsdp_version 2), since every process samples with the whole model."
        )
    if not _is_set(_FSDP):
        return False
    for name, why in _WITHOUT_EFFECT.items():
        if _is_set(name):
            raise ConfigError(f"{name} is set, but has no effect: {why}. Turn it off in the launcher's configuration.")
    return True


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


@contextlib.contextmanager
def _fsdp_is_ours() -> Iterator[None]:
    """Inside, accelerate and transformers do not see the launcher's FSDP2: the one would refuse models that it did not wrap
    itself, the other load the weights on the first process of a machine alone."""
    before = os.environ.pop(_FSDP, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_FSDP] = before


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Turn a broken connection into a RankError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RankError(
            f"Another process of this run is gone, or did not answer within {TIMEOUT}; its own output says why ({error})."
        ) from error


def _buckets(masters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for master in masters:
        if bucket and size + master.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(master)
        size += master.numel()
    if bucket:
        yield bucket
