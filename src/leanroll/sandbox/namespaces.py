"""Namespaces of its own for a program: no network, no other processes, and a root folder that holds the interpreter only."""

from __future__ import annotations

import os

from leanroll.sandbox import linux

SCRATCH = "/scratch"
"""The program's folder, a file system in memory that ends with it. /tmp leads there too."""

_SPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")
_OLD = "/.old"
_MAX_INODES = 1024


def enter(user: tuple[int, int] | None, readable: list[str], scratch_mb: int) -> None:
    """Move this process into new namespaces; processes that it forks from now on are in the new one of processes.

    Args:
        user: (uid, gid) that will own the scratch folder; None: this user, which needs a namespace of users.
        readable: absolute paths of folders and files that stay visible, read-only.
        scratch_mb: size of the scratch folder, in MB.

    Raises:
        OSError: the system does not allow it.
    """
    if user is None:
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(_SPACES | linux.CLONE_NEWUSER)
        # Not root inside either, so that nothing is regained by starting a program.
        user = uid or 1000, gid or 1000
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user[0]} {uid} 1"), ("gid_map", f"{user[1]} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(text)
    else:
        linux.unshare(_SPACES)
    _change_root(user, readable, scratch_mb)


def _change_root(user: tuple[int, int], readable: list[str], scratch_mb: int) -> None:
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)  # nothing of this reaches the system
    new = "/tmp"
    linux.mount("tmpfs", new, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    os.mkdir(new + _OLD)
    linux.pivot_root(new, new + _OLD)
    os.chdir("/")
    for path in readable:
        _show(path)
    os.mkdir("/dev")
    for name in _DEVICES:
        _bind(f"/dev/{name}")
    os.mkdir(SCRATCH)
    options = f"size={scratch_mb}m,nr_inodes={_MAX_INODES},mode=700,uid={user[0]},gid={user[1]}"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    if not os.path.lexists("/tmp"):  # else the interpreter lies there
        os.symlink(SCRATCH, "/tmp")
    linux.unmount(_OLD)
    os.rmdir(_OLD)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("", "/", "", flags)
    os.chdir(SCRATCH)


def _show(path: str) -> None:
    if os.path.lexists(path):
        return  # within one that is shown already
    if os.path.islink(_OLD + path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(_OLD + path), path)  # /lib → usr/lib
        return
    _bind(path)
    linux.mount_read_only(path)


def _bind(path: str) -> None:
    if os.path.isdir(_OLD + path):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    linux.mount(_OLD + path, path, "", linux.MS_BIND | linux.MS_REC)
