"""Whether this machine's sandbox holds: tried out with a program that attempts what it must not be able to do."""

from __future__ import annotations

import functools
import os
import socket
import sys
import tempfile
from pathlib import Path

from leanroll.errors import SandboxError, SandboxUnavailable
from leanroll.sandbox.run import Job, Limits, Mode, run

_LIMITS = Limits(wall_s=10.0, cpu_s=10.0)


# Run inside; raises with the list of what it could do. The address space comes last: it is what every later line needs.
_ATTEMPTS = """
import os, socket, time
leaks = []
def attempt(what, action):
    try:
        action()
    except OSError:
        return
    leaks.append(what)
attempt("read a file of the system", lambda: open(SECRET).read())
attempt("write next to it", lambda: open(SECRET + ".new", "w"))
attempt("change its mode", lambda: os.chmod(SECRET, 0o666))
attempt("list the folder of leanroll", lambda: os.listdir(SOURCE))
attempt("write next to the interpreter", lambda: open(os.path.join(os.path.dirname(os.__file__), "leak"), "w"))
attempt("connect to this machine", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
attempt("signal a process outside", lambda: os.kill(OUTSIDE, 0)) if OUTSIDE > 1000 else None
started = []
try:
    while len(started) <= MOST:
        started.append(os.fork())
        if started[-1] == 0:
            time.sleep(5)  # longer than this takes, and not for ever where nothing kills it
            os._exit(0)
except OSError:
    pass
for process in started:
    os.kill(process, 9)
if len(started) > MOST:
    leaks.append(f"start more than {MOST} processes")
try:
    block = bytes(MEMORY)
    leaks.append("take more memory than its limit")
except MemoryError:
    pass
if os.getuid() == 0:
    leaks.append("run as root")
assert not leaks, "a program in it could: " + ", ".join(leaks)
"""


@functools.cache
def require_sandbox(mode: Mode) -> None:
    """Make sure that programs can be run in that sandbox here. Tried once per process, in about a tenth of a second.

    Raises:
        SandboxUnavailable: another system than Linux, something the system does not allow, or a wall that does not hold.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"Code rewards need Linux for their sandbox, got {sys.platform}; score code on Linux.")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder, "secret")
        secret.write_text("not for programs")
        for path in (folder, secret):
            os.chmod(path, 0o777)  # so that modes alone do not protect them
        names = {
            "SECRET": str(secret),
            "SOURCE": os.path.dirname(__file__),
            "PORT": server.getsockname()[1],
            "OUTSIDE": os.getpid(),
            "MOST": 0 if mode == "landlock" else _LIMITS.max_processes,
            "MEMORY": (_LIMITS.memory_mb + 64) << 20,
        }
        settings = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        try:
            result = run(Job(settings + _ATTEMPTS, ""), mode, _LIMITS)
        except SandboxError as error:
            raise SandboxUnavailable(
                f"The sandbox {mode!r} does not work on this machine. {error}\n{_advice(mode)}"
            ) from error
    if result.status != "passed":
        raise SandboxUnavailable(
            f"The sandbox {mode!r} does not hold on this machine ({result.status}): {result.output}\n{_advice(mode)}"
        )


def _advice(mode: Mode) -> str:
    if mode == "namespaces":
        return (
            "It needs namespaces: root with CAP_SYS_ADMIN, or a system where users may make them (in a container: "
            "--security-opt seccomp=unconfined, or --cap-add SYS_ADMIN). Where that cannot be had, the weaker "
            "task.params.sandbox = 'landlock' needs Linux 6.2 (docs/code-rewards.md says what it does not protect from)."
        )
    return (
        "It needs Linux 6.2 with Landlock, and as root an interpreter that other users can read; or use "
        "task.params.sandbox = 'namespaces'."
    )
