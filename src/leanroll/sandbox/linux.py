"""System calls that Python does not offer, by ctypes. Numbers are those of x86_64 and aarch64."""

from __future__ import annotations

import ctypes
import os

MACHINE = os.uname().machine
MACHINES = ("x86_64", "aarch64")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def check(result: int, what: str) -> int:
    """The result of a C function.

    Raises:
        OSError: it is negative; the message starts with `what`.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(
    what: str, number: int, *arguments: ctypes.c_void_p | ctypes.Array[ctypes.c_char] | int | bytes | None
) -> int:
    """System call `number`; integers are passed as 64 bits. Raises OSError as `check`."""
    passed = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return check(int(_LIBC.syscall(ctypes.c_long(number), *passed)), what)


def address(value: ctypes.Structure | ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
    """What `syscall` passes for a structure; keep the structure alive during the call."""
    return ctypes.c_void_p(ctypes.addressof(value))


def prctl(what: str, option: int, *arguments: int) -> None:
    """Set a property of this process. Raises OSError as `check`."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    check(int(_LIBC.prctl(option, *(ctypes.c_ulong(argument) for argument in padded))), what)


def unshare(flags: int) -> None:
    """New namespaces for this process (CLONE_NEWPID: for its children). Raises OSError."""
    check(int(_LIBC.unshare(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2). Raises OSError."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    check(
        int(_LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)),
        f"mount {kind or 'bind'} on {target}",
    )


def mount_read_only(target: str) -> None:
    """Take writing, devices and set-user-id from the mount at `target` and those below (Linux 5.12). Raises OSError."""
    attributes = _MountAttr(attr_set=MS_RDONLY | MS_NOSUID | MS_NODEV)  # MOUNT_ATTR_* have the same values
    size = ctypes.sizeof(attributes)
    syscall(
        f"mount_setattr {target}", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, address(attributes), size
    )


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root; the root so far is then at `old`, a folder in it. Raises OSError."""
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], new.encode(), old.encode())


def unmount(target: str) -> None:
    """Take a mount and all below out of this mount namespace. Raises OSError."""
    check(int(_LIBC.umount2(target.encode(), MNT_DETACH)), f"umount {target}")


def drop_capabilities() -> None:
    """Give up every capability of this process. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    syscall(
        "capset", _CAPSET[MACHINE], ctypes.c_void_p(ctypes.addressof(header)), ctypes.c_void_p(ctypes.addressof(data))
    )


def no_new_privileges() -> None:
    """No program that this process or its children start can gain privileges. Raises OSError."""
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends. Raises OSError."""
    prctl("pdeathsig", PR_SET_PDEATHSIG, 9)
