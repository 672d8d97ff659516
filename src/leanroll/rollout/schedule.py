"""How many KV pages a token may read, as a step function of total length.

Source: Sparrow, arXiv 2606.08446. A schedule is data: a JSON file, a preset name, or built in code. Never imports
torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from leanroll.errors import ConfigError

UNLIMITED = 2**30
"""Budget that no sequence reaches: reads every page."""

MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 128


@dataclass(frozen=True, slots=True)
class BudgetSchedule:
    """Pages by total length.

    page_size: tokens per page, a power of two from 8 to 128.
    first_pages, last_pages: always read; last_pages >= 1, since a partial page has no landmark.
    dense_layers: layers that read everything.
    bin_pages: width of a length bin, in pages.
    pages: budget per bin, reserved pages included, non-decreasing; the last bin is open.
    scorer: name of the page scorer the budgets were measured with.
    target, quantile: the acceptance rate aimed at and its quantile over tokens (None: not calibrated).
    provenance: where the numbers come from.
    """

    name: str
    page_size: int = 16
    first_pages: int = 1
    last_pages: int = 2
    dense_layers: tuple[int, ...] = (0, 1)
    bin_pages: int = 125
    pages: tuple[int, ...] = (UNLIMITED,)
    scorer: str = "mean"
    target: float | None = None
    quantile: float | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"schedule {self.name!r}"
        self._check_types(where)
        size = self.page_size
        if size & (size - 1) or not MIN_PAGE_SIZE <= size <= MAX_PAGE_SIZE:
            raise ConfigError(f"{where}: page_size is {size}; expected a power of two from 8 to 128.")
        if self.first_pages < 0 or self.last_pages < 1:
            raise ConfigError(
                f"{where}: first_pages={self.first_pages}, last_pages={self.last_pages}; expected first_pages >= 0 and "
                "last_pages >= 1 (the page being written has no landmark and must be read)."
            )
        if self.bin_pages < 1:
            raise ConfigError(f"{where}: bin_pages is {self.bin_pages}; expected at least 1.")
        if not self.pages:
            raise ConfigError(f"{where}: pages is empty; give at least one budget.")
        reserved = self.first_pages + self.last_pages
        if min(self.pages) < reserved:
            raise ConfigError(
                f"{where}: the smallest budget is {min(self.pages)} pages, fewer than the {reserved} reserved pages "
                f"(first {self.first_pages} + last {self.last_pages}); raise it or reserve fewer."
            )
        for i in range(1, len(self.pages)):
            if self.pages[i] < self.pages[i - 1]:
                raise ConfigError(
                    f"{where}: budgets must not decrease with length, but bin {i} has {self.pages[i]} pages after "
                    f"{self.pages[i - 1]}; sort them, or raise bin {i}."
                )

    def _check_types(self, where: str) -> None:
        for key in ("page_size", "first_pages", "last_pages", "bin_pages"):
            if type(getattr(self, key)) is not int:
                raise ConfigError(f"{where}: {key} is {getattr(self, key)!r}; page counts and sizes are integers.")
        for key in ("name", "scorer"):
            if not isinstance(getattr(self, key), str):
                raise ConfigError(f"{where}: {key} is {getattr(self, key)!r}; expected a text.")
        for key in ("target", "quantile"):
            value = getattr(self, key)
            if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
                raise ConfigError(f"{where}: {key} is {value!r}; expected a number from 0 to 1, or null.")
        if not isinstance(self.provenance, dict):
            raise ConfigError(f"{where}: provenance is {self.provenance!r}; expected an object.")
        negative = [layer for layer in self.dense_layers if layer < 0]
        if negative:
            raise ConfigError(f"{where}: dense_layers holds {negative}; layers count from 0, from the input on.")
        largest = max((*self.pages, self.bin_pages, self.first_pages, self.last_pages))
        if largest > UNLIMITED:
            raise ConfigError(
                f"{where}: {largest} pages are more than {UNLIMITED}, which already stands for all of them."
            )

    @property
    def is_dense(self) -> bool:
        """True when no length is ever sparse."""
        return self.pages[0] >= UNLIMITED

    def sparse_layers(self, windows: Sequence[int]) -> tuple[int, ...]:
        """Layers of a model that select pages, ascending: those with full attention that are not kept dense.

        windows: sliding window per layer, 0 = full attention.

        Raises:
            ConfigError: the schedule keeps a layer dense that the model does not have, or, though it is sparse, every layer.
        """
        beyond = [i for i in self.dense_layers if i >= len(windows)]
        if beyond:
            raise ConfigError(
                f"schedule {self.name!r} keeps layers {beyond} dense; the model has layers 0 to {len(windows) - 1}. "
                "Use a schedule made for a model of this depth."
            )
        layers = tuple(i for i, window in enumerate(windows) if window == 0 and i not in self.dense_layers)
        if not layers and not self.is_dense:
            raise ConfigError(
                f"schedule {self.name!r} leaves no layer of the model sparse: every one is among its dense layers or has "
                "a sliding window. Use a schedule with fewer dense_layers, or 'dense'."
            )
        return layers

    def budget(self, length: int) -> int:
        """Budget in pages for a sequence of `length` tokens, the current one included."""
        return self.pages[min(-(-length // self.page_size) // self.bin_pages, len(self.pages) - 1)]

    def budgets(self, lengths: np.ndarray) -> np.ndarray:
        """`budget` for an integer array of lengths; int32, same shape."""
        return np.asarray(self.pages, dtype=np.int32)[self.bins(lengths)]

    def reads_part(self, lengths: np.ndarray) -> np.ndarray:
        """Where a sequence of so many tokens does not read every page: bool, same shape."""
        return np.asarray(-(-lengths // self.page_size) > self.budgets(lengths))

    def bins(self, lengths: np.ndarray) -> np.ndarray:
        """Index of the length bin, and so of the budget in `pages`, for an integer array of lengths; same shape."""
        return np.minimum(-(-lengths // self.page_size) // self.bin_pages, len(self.pages) - 1)

    def same_reading(self, other: BudgetSchedule) -> bool:
        """Whether both read the same pages, whatever they are called and wherever they come from."""
        return replace(self, name=other.name, provenance=other.provenance) == other

    def to_json(self) -> str:
        """The JSON text that `load` reads back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def dense(cls, page_size: int = 16) -> BudgetSchedule:
        """The schedule that reads every page: ordinary attention."""
        return cls(name="dense", page_size=page_size, dense_layers=())

    @classmethod
    def load(cls, name_or_path: str | Path) -> BudgetSchedule:
        """A preset by name, `dense`, or a JSON file.

        Raises:
            ConfigError: no such preset or file, or its content is not a valid schedule.
        """
        name = str(name_or_path)
        if name == "dense":
            return cls.dense()
        presets = _presets()
        if name in presets:
            return cls.from_dict(presets[name], name)
        path = Path(name)
        if not path.is_file():
            names = ", ".join(["dense", *sorted(presets)])
            raise ConfigError(f"No schedule {name!r}: it is neither a file nor a preset. Presets: {names}.")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Schedule file {name!r} cannot be read: {error}.") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"Schedule file {name!r} is not JSON: {error}.") from error
        return cls.from_dict(data, name)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> BudgetSchedule:
        """Build from parsed JSON; `where` names the source in errors."""
        if not isinstance(data, dict):
            raise ConfigError(f"Schedule {where!r}: expected a JSON object, got {type(data).__name__}.")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"Schedule {where!r}: unknown keys {unknown}; expected a subset of {sorted(known)}.")
        values = {"name": where, **data}
        for key in ("pages", "dense_layers"):
            if key in values:
                numbers = values[key]
                if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
                    raise ConfigError(f"Schedule {where!r}: {key} is {numbers!r}; expected a list of integers.")
                values[key] = tuple(numbers)
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"Schedule {where!r}: {error}; page counts and sizes are integers.") from error


def preset_names() -> list[str]:
    """Names of the schedules that ship with the package, `dense` first."""
    return ["dense", *sorted(_presets())]


def _presets() -> dict[str, dict[str, Any]]:
    """The published ones, and those in files of their own, as `leanroll calibrate` wrote them."""
    folder = resources.files("leanroll.rollout").joinpath("presets")
    file = json.loads(folder.joinpath("published.json").read_text(encoding="utf-8"))
    common = {"scorer": "mean", "provenance": {"source": file["source"]}}
    found = {
        entry["name"]: {**common, **{k: v for k, v in entry.items() if k != "model"}}
        | {"provenance": {"source": file["source"], "model": entry["model"]}}
        for entry in file["schedules"]
    }
    for path in folder.iterdir():
        if path.name.endswith(".json") and path.name != "published.json":
            found[path.name.removesuffix(".json")] = json.loads(path.read_text(encoding="utf-8"))
    return found
