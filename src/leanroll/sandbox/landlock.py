"""Landlock: this process may read some folders and write nowhere. Linux 6.2 or newer (version 3 of the interface)."""

from __future__ import annotations

import ctypes
import os

from leanroll.sandbox import linux

TYPE_CHECKING = False  # of `typing`, which takes longer to import than the rest together
if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_VERSION = 3
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_VERSION_FLAG = _RULE_PATH = 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def restrict(readable: Iterable[str]) -> None:
    """Deny this process and its children all files but `readable` (folders with all below, and files) and /dev/null, TCP where
    the kernel's version can (6.7), and signals and abstract sockets of others (6.12). Needs no_new_privs.

    Raises:
        OSError: no Landlock, or an older version than MIN_VERSION.
    """
    version = linux.syscall("landlock", _CREATE, None, 0, _VERSION_FLAG)
    if version < MIN_VERSION:
        raise OSError(
            38, f"landlock: the kernel has version {version} of the interface; version {MIN_VERSION} is needed"
        )
    rules = _Ruleset(
        files=(1 << (15 if version < 5 else 16)) - 1, network=3 if version >= 4 else 0, scoped=3 if version >= 6 else 0
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = linux.syscall("landlock_create_ruleset", _CREATE, linux.address(rules), size, 0)
    for path in readable:
        folder = os.path.isdir(path)
        _allow(ruleset, path, _EXECUTE | _READ_FILE | (_READ_DIR if folder else 0))
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    linux.syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathRule(allowed=access, folder=descriptor)
    linux.syscall(f"landlock_add_rule {path}", _ADD_RULE, ruleset, _RULE_PATH, linux.address(rule), 0)
    os.close(descriptor)
