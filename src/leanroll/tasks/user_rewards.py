"""Reward functions of the user: `path/to/file.py:function` or `package.module:function`, in TRL's signature."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanroll.errors import ConfigError
from leanroll.tasks.base import RewardFormat, RewardSpec


@dataclass(frozen=True)
class UserReward:
    """A function by file (a path that ends in .py) or module name, loaded where it is first called."""

    source: str
    name: str

    def load(self) -> Any:
        """The function itself.

        Raises:
            ConfigError: it does not exist or is not callable; what the user's module raises passes through.
        """
        return _load(self.source, self.name)

    def __call__(self, **arguments: Any) -> Sequence[float]:
        returned: Sequence[float] = self.load()(**arguments)
        return returned


def load_reward(
    reference: str,
    *,
    name: str | None = None,
    weight: float = 1.0,
    format: RewardFormat = "text",
    batch_size: int | None = None,
) -> RewardSpec:
    """A reward from "file.py:function" or "package.module:function".

    The user's code is not run here but in the reward workers; a file is only searched for the name.

    Args:
        reference: where the function is; a relative path counts from the working directory.
        name: in metrics; None means the function's name.
        format: see `leanroll.tasks.base`.

    Raises:
        ConfigError: malformed reference, no such file, module or name in the file.
    """
    source, _, function = reference.rpartition(":")
    if not source or not function.isidentifier():
        raise ConfigError(f"Reward {reference!r}: expected 'file.py:function' or 'package.module:function'.")
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        _check_file(path, function, reference)
        source = str(path)
    else:
        _check_module(source, reference)
    return RewardSpec(name or function, weight, UserReward(source, function), format, batch_size)


def _check_file(path: Path, function: str, reference: str) -> None:
    if not path.is_file():
        raise ConfigError(f"Reward {reference!r}: there is no file {path}.")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"Reward {reference!r}: {path} is not valid Python: {error}.") from None
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assigned = [ast.unparse(t) for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    imported = [a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    if function not in (*defined, *assigned, *imported):
        raise ConfigError(f"Reward {reference!r}: {path} defines no {function!r}; it defines {defined or 'nothing'}.")


def _check_module(module: str, reference: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"Reward {reference!r}: no module {module!r} can be imported; install it, or give a path that ends in .py."
        )


@functools.cache
def _load(source: str, name: str) -> Any:
    module = _module_from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"Reward '{source}:{name}': {name!r} is {type(function).__name__}; expected a function.")
    return function


def _module_from_file(path: Path) -> Any:
    # Named by its path: two files of one name in different folders are different modules.
    name = f"leanroll_user_reward_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as a Python module.")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # modules beside it can be imported, without hiding installed ones
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
