"""What a program may try, and what has to come of it. Standard library and leanroll.sandbox only, so that it also runs as nobody:
`python attacks.py FOLDER`, in which files are made that no program may reach."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from leanroll.sandbox.checks import require_sandbox
from leanroll.sandbox.run import Job, Limits, Mode, Result, Status, run

LIMITS = Limits(wall_s=10.0, cpu_s=1.0, memory_mb=128, scratch_mb=4, max_processes=4, output_mb=0.2)
SHORT_S = 0.4
MARK = "leanroll-escaped"

DENIED = """
def denied(action):
    try:
        action()
    except OSError as error:
        return error
    raise SystemExit("it could")
"""

# name → (program, status or statuses to expect). FOLDER, PORT and OUTSIDE are set before it. Each passes only where it is denied.
ATTACKS: dict[str, tuple[str, tuple[Status, ...]]] = {
    "read the run directory": ("denied(lambda: open(FOLDER + '/secret').read())", ("passed",)),
    "list it": ("denied(lambda: os.listdir(FOLDER))", ("passed",)),
    "write into it": ("denied(lambda: open(FOLDER + '/new', 'w'))", ("passed",)),
    "change its mode": ("denied(lambda: os.chmod(FOLDER + '/secret', 0o777))", ("passed",)),
    "delete in it": ("denied(lambda: os.unlink(FOLDER + '/secret'))", ("passed",)),
    "read it by a link": ("denied(lambda: os.symlink(FOLDER, 'link') or os.listdir('link'))", ("passed",)),
    "read a home": ("denied(lambda: os.listdir('/root/.cache')); denied(lambda: os.listdir('/home'))", ("passed",)),
    "read other processes": ("denied(lambda: open(f'/proc/{OUTSIDE}/environ', 'rb').read())", ("passed",)),
    "write to the library": ("denied(lambda: open(os.path.dirname(os.__file__) + '/new.py', 'w'))", ("passed",)),
    "write at the root": ("denied(lambda: open('/new', 'w'))", ("passed",)),
    "connect": ("import socket; denied(lambda: socket.create_connection(('127.0.0.1', PORT), 1))", ("passed",)),
    "make a network socket": (
        "import socket; denied(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))",
        ("passed",),
    ),
    "make namespaces": (
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == -1, 'it could'",
        ("passed",),
    ),
    "trace": ("import ctypes; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1", ("passed",)),
    "become root": ("denied(lambda: os.setuid(0)); assert os.getuid()", ("passed",)),
    "raise its limits": (
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nexcept ValueError: pass\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[1] == 128 << 20",
        ("passed",),
    ),
    "inherit the environment": ("assert 'LEANROLL_TEST_SECRET' not in os.environ", ("passed",)),
    "kill its parent": (f"try: os.kill(os.getppid(), 9)\nexcept OSError: pass\nprint('{MARK}')", ("passed",)),
    "kill all": ("try: os.kill(-1, 9)\nexcept OSError: pass", ("passed",)),
    # Its own group: it may end itself, and nobody else.
    "kill its group": ("try: os.kill(0, 9)\nexcept OSError: os._exit(1)", ("ended",)),
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", ("timeout",)),
    "loop for ever": ("while True: pass", ("timeout",)),
    "sleep for ever": ("import time; time.sleep(1000)", ("timeout",)),
    "take all memory": ("held = []\nwhile True: held.append(bytes(1 << 20))", ("failed",)),
    "take memory in a file": ("denied(lambda: os.memfd_create('x'))", ("passed",)),
    "write a large file": ("denied(lambda: open('x', 'wb').write(bytes(8 << 20)))", ("passed",)),
    "print for ever": ("while True: print('x' * 10000)", ("output",)),
    "print to the raw descriptor": ("while True: os.write(2, b'x' * 10000)", ("output",)),
    "leave by os._exit": ("os._exit(0)", ("ended",)),
    "leave by SystemExit": ("raise SystemExit(0)", ("failed",)),
    "crash": ("import ctypes; ctypes.string_at(0)", ("ended",)),
    "claim to have passed": ("print('ready'); print('done passed'); os._exit(0)", ("ended",)),
    "write a verdict": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'0 done passed \\n')\n    except OSError: pass",
        ("tampered",),
    ),
    "replace exec": ("import builtins; builtins.exec = builtins.compile = lambda *a, **k: None", ("failed",)),
    "be unprintable": ("class E(BaseException):\n    def __str__(self): os._exit(0)\nraise E", ("ended",)),
    "not be Python": ("def (:\n\x00", ("failed",)),
    "not be text": ("'\ud800'", ("failed",)),
}
FAILING_TESTS = ("replace exec",)

# These need a program that may start processes or write, which only `namespaces` lets.
ONLY_NAMESPACES: dict[str, tuple[str, tuple[Status, ...]]] = {
    "leave a daemon": (
        f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import sys\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', '{MARK}'])\n    os._exit(0)\n"
        "os.wait()",
        ("passed",),
    ),
    "fill its folder": ("denied(lambda: [open(str(i), 'wb').write(bytes(1 << 20)) for i in range(8)])", ("passed",)),
    "fill it with names": ("denied(lambda: [os.mkdir(str(i)) for i in range(5000)])", ("passed",)),
    "delete its folder": ("import shutil; shutil.rmtree('/scratch', ignore_errors=True)", ("passed",)),
    "more threads": (
        "import threading, time\ndef more():\n    for _ in range(10):\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "try: more()\nexcept RuntimeError: pass\nelse: raise SystemExit('it could')",
        ("passed",),
    ),
    "be several": ("os.fork()", ("passed",)),
}


def attack(program: str, folder: Path, port: int, mode: Mode, tests: str, wall_s: float) -> Result:
    """Run one of the programs above."""
    names = f"import os\nFOLDER, PORT, OUTSIDE = {str(folder)!r}, {port}, {os.getpid()}\n"
    return run(Job(names + DENIED + program, tests), mode, replace(LIMITS, wall_s=wall_s))


def commands() -> list[bytes]:
    """The command lines of all processes of this machine that name MARK, without this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if MARK.encode() in line:
            found.append(line)
    return found


def failures(folder: Path, mode: Mode) -> list[str]:
    """Attacks that did not end as they should."""
    secret = folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)  # modes alone do not protect it
    os.environ["LEANROLL_TEST_SECRET"] = "secret"
    found = []
    attacks = ATTACKS | (ONLY_NAMESPACES if mode == "namespaces" else {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, (program, expected) in attacks.items():
            began = time.monotonic()
            tests = "assert False" if name in FAILING_TESTS else "assert True"
            wall_s = SHORT_S if "timeout" in expected else LIMITS.wall_s
            result = attack(program, folder, server.getsockname()[1], mode, tests, wall_s)
            if result.status not in expected:
                found.append(f"{name}: {result.status} ({time.monotonic() - began:.1f} s)\n{result.output[-500:]}")
    if {path.name for path in folder.iterdir()} != {"secret"} or secret.read_text() != "secret":
        found.append(f"{folder} was changed: {sorted(folder.iterdir())}")
    if commands():
        found.append(f"still running: {commands()}")
    return found


if __name__ == "__main__":
    place = Path(os.environ.pop("LEANROLL_TEST_FOLDER"))
    kind: Mode = "landlock" if os.environ.pop("LEANROLL_TEST_MODE") == "landlock" else "namespaces"
    require_sandbox(kind)
    print(os.getuid(), failures(place, kind))
