"""First code of a sandboxed process: builds the walls, then runs the program behind them.

Started by `leanroll.sandbox.run` as a fresh interpreter with an empty environment: the job is standard input, the pipe of
verdicts is a descriptor named in it. With namespaces there are three processes: this one, which waits; its child, number 1
of the new namespace of processes, at whose end the kernel kills all others in it; and its child, the program.
"""

from __future__ import annotations

import marshal
import os
import resource
import sys

from leanroll.sandbox import harness, landlock, linux, namespaces, seccomp

TYPE_CHECKING = False  # of `typing`, which takes longer to import than the rest together
if TYPE_CHECKING:
    from typing import Any

_SYSTEM_FOLDERS = (
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
_FREE_UIDS = 0x70000000  # a range that no distribution hands out
_MAX_PID = 1 << 22
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21
_MAX_DESCRIPTORS = 64
_OWN_PROCESSES = 2  # those that wait count where the user is the same


def main() -> None:
    """Run the job on standard input; never returns."""
    linux.die_with_parent()
    with os.fdopen(os.dup(0), "rb") as stream:
        job: dict[str, Any] = marshal.load(stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    fd, token = job.pop("verdicts"), job.pop("token")
    if os.getppid() != job["parent"]:
        os._exit(1)  # orphaned before die_with_parent

    def report(text: str, _write: Any = os.write) -> None:
        _write(fd, f"{token} {text}\n".encode(errors="replace"))

    try:
        _enter(job)
        report("ready")
    except BaseException as error:  # whatever it is, the caller has to hear of it: without walls nothing runs
        report(f"error {type(error).__name__}: {' '.join(str(error).split())[:500]}")
        os._exit(1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "leanroll"]:
        del sys.modules[name]
    harness.run(job, report)


def _enter(job: dict[str, Any]) -> None:
    """Returns in the process that is to run the program, behind all walls."""
    with open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("1000")  # when memory runs out, the program goes first
    sys.path[:] = [path for path in sys.path if path != job["source"]]
    readable = _readable()
    # Without CAP_SYS_ADMIN, namespaces come with one of users, in which there is no other user.
    user = _free_user(_CAP_SETGID, _CAP_SETUID, *([_CAP_SYS_ADMIN] if job["mode"] == "namespaces" else []))
    if job["mode"] == "namespaces":
        namespaces.enter(user, readable, job["scratch_mb"])
        _fork_and_wait()  # into the new namespace of processes
        _fork_and_wait()
        os.setsid()  # a signal to the own process group must not leave the namespace
    elif job["mode"] == "landlock":
        os.chdir("/")
    else:
        raise ValueError(f"no such sandbox: {job['mode']}")
    if user is not None:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
        linux.die_with_parent()  # forgotten when the user changes
    linux.drop_capabilities()
    linux.no_new_privileges()
    _limit(job, alone_in_user=user is not None)
    if job["mode"] == "landlock":
        landlock.restrict(readable)
    seccomp.install(alone=job["mode"] == "landlock")


def _fork_and_wait() -> None:
    """Returns in the child, which dies with its parent; the parent waits for it, collects orphans, and ends."""
    alive, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        linux.die_with_parent()
        os.set_blocking(alive, False)
        try:
            os._exit(len(os.read(alive, 1)))  # its end is closed: the parent was killed before die_with_parent
        except BlockingIOError:
            os.close(alive)
            return
    os.closerange(0, 3)
    while os.wait()[0] != child:
        pass
    os._exit(0)


def _readable() -> list[str]:
    """What the interpreter needs, parents before what is in them."""
    executable = os.path.realpath(sys.executable)
    own = [*sys.path, os.path.join(sys.base_prefix, "lib"), executable]
    return sorted({path for path in (*own, *_SYSTEM_FOLDERS) if os.path.isabs(path) and os.path.exists(path)})


def _free_user(*needed: int) -> tuple[int, int] | None:
    """An id for (uid, gid) that no other process has; None where this process lacks one of the capabilities needed, or ids."""
    with open("/proc/self/status") as stream:
        (effective,) = (int(line.split()[1], 16) for line in stream if line.startswith("CapEff:"))
    if not all(effective >> bit & 1 for bit in needed):
        return None
    ids = []
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as stream:
            start, count = max(
                ((int(line.split()[0]), int(line.split()[2])) for line in stream), key=lambda row: row[1]
            )
        if start + count > _FREE_UIDS + _MAX_PID:
            ids.append(_FREE_UIDS + os.getpid())
        elif count >= 1 << 16:
            ids.append(start + count // 2 + os.getpid() % (count // 4))
        else:
            return None  # root of a namespace with few users
    return ids[0], ids[1]


def _limit(job: dict[str, Any], *, alone_in_user: bool) -> None:
    processes = job["max_processes"] + (0 if alone_in_user else _OWN_PROCESSES)
    limits: dict[int, int | tuple[int, int]] = {
        resource.RLIMIT_CPU: (job["cpu_s"], job["cpu_s"] + 1),
        resource.RLIMIT_AS: job["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: job["scratch_mb"] << 20,
        resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if (
        job["mode"] == "namespaces"
    ):  # otherwise there are no processes, and threads of the same user elsewhere would count
        limits[resource.RLIMIT_NPROC] = processes
    for kind, value in limits.items():
        resource.setrlimit(kind, value if isinstance(value, tuple) else (value, value))
