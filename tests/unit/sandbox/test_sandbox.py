"""Programs behind walls: every attack of attacks.py, as this user and as nobody, in both kinds of sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leanroll.errors import SandboxError, SandboxUnavailable
from leanroll.sandbox import checks
from leanroll.sandbox.run import Job, Limits, Mode, run
from tests.unit.sandbox import attacks, nobody

HERE = Path(__file__).parent
SOURCE = Path(checks.__file__).parents[1]
MODES: tuple[Mode, ...] = ("namespaces", "landlock")


def available() -> list[Mode]:
    found: list[Mode] = []
    for mode in MODES:
        with contextlib.suppress(SandboxUnavailable):
            checks.require_sandbox(mode)
            found.append(mode)
    return found


@pytest.fixture(autouse=True)
def _found_out_anew() -> Iterator[None]:
    """What one test made of this machine is not what the next one gets."""
    yield
    checks.require_sandbox.cache_clear()


@pytest.fixture
def mode() -> Mode:
    """The first sandbox that works here."""
    modes = available()
    if not modes:
        pytest.skip("this machine allows neither namespaces nor Landlock")
    return modes[0]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone may write to; pytest's own lie in one that only its user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.mark.parametrize("kind", MODES)
def test_a_sandbox_holds_or_says_why_it_cannot_be_had(kind: Mode) -> None:
    if kind in available():
        assert run(Job("x = 1", "assert x == 1"), kind).status == "passed"
        return
    expected = (
        f"The sandbox '{kind}' does not work on this machine. A sandbox could not be built: error (?s:.*)It needs"
    )
    with pytest.raises(SandboxUnavailable, match=expected):
        checks.require_sandbox(kind)


@pytest.mark.parametrize("kind", MODES)
def test_attacks(kind: Mode, open_folder: Path) -> None:
    if kind not in available():
        pytest.skip(f"no sandbox {kind!r} here")
    assert attacks.failures(open_folder, kind) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody; for another user test_attacks is this test")
@pytest.mark.parametrize("kind", MODES)
def test_attacks_of_nobody(kind: Mode, open_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "nobody.py"), str(HERE / "attacks.py")],
        env={
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "LEANROLL_TEST_FOLDER": str(open_folder),
            "LEANROLL_TEST_MODE": kind,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == nobody.NOT_POSSIBLE:
        pytest.skip(f"root cannot become nobody here: {done.stdout.strip()}")
    if "SandboxUnavailable: " in done.stderr and "does not work on this machine" in done.stderr:
        pytest.skip(f"nobody cannot have {kind!r} here")
    assert done.stdout.strip() == "65534 []", done.stderr


def test_a_leak_is_found(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check runs a program that reports what it can do; a wall that is missing must show."""
    monkeypatch.setattr(checks, "_ATTEMPTS", checks._ATTEMPTS.replace("assert not", "leaks.append('fly')\nassert not"))
    checks.require_sandbox.cache_clear()
    with pytest.raises(SandboxUnavailable, match=r"(?s)does not hold on this machine.*a program in it could: fly"):
        checks.require_sandbox(mode)


@pytest.mark.parametrize(
    ("module", "wall", "leak"),
    [
        ("seccomp", "install", "connect to this machine|start more than 0"),
        ("landlock", "restrict", "read a file of the system"),
        ("namespaces", "enter", "read a file of the system|No module named"),  # where only root can read the library
    ],
)
def test_the_self_check_sees_a_missing_wall(module: str, wall: str, leak: str, tmp_path: Path) -> None:
    """Each wall in turn is taken out of a copy of the sources, and the self-check has to notice."""
    kind: Mode = "namespaces" if module == "namespaces" else "landlock"
    if kind not in available():
        pytest.skip(f"no sandbox {kind!r} here")
    shutil.copytree(SOURCE, tmp_path / "leanroll", ignore=shutil.ignore_patterns("__pycache__", "*.so", "csrc"))
    file = tmp_path / "leanroll" / "sandbox" / f"{module}.py"
    file.write_text(file.read_text() + f"\n\ndef {wall}(*arguments, **options): pass\n")
    code = (
        "import sys; from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder; "
        "sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]; "  # an editable install would lead past the copy
        f"sys.path[:] = {[str(tmp_path), *sys.path]!r}; from leanroll.sandbox import checks; "
        f"assert checks.__file__.startswith({str(tmp_path)!r}), checks.__file__; checks.require_sandbox({kind!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(f"(?s)does not hold on this machine.*({leak})", done.stderr), done.stderr


def test_what_a_program_gets(mode: Mode) -> None:
    program = (
        "import os, sys, asyncio, dataclasses, decimal, json, random, re, sqlite3, tempfile\n"
        "@dataclasses.dataclass\nclass Point:\n    x: 'int' = 1\n"
        "async def one(): return 1\nassert asyncio.run(one()) == 1\n"
        "assert sys.stdin.read() == '' and __name__ != '__main__' and not {'leanroll', 'torch'} & set(sys.modules)\n"
        "print('printed', Point())\n"
    )
    result = run(Job(program, "assert Point().x == 1"), mode)
    assert (result.status, result.output) == ("passed", "printed Point(x=1)")
    assert hash_of("x", mode) == hash_of("x", mode)


def hash_of(text: str, mode: Mode) -> str:
    return run(Job(f"print(hash({text!r}))", ""), mode).output


def test_scratch_is_empty_and_forgotten() -> None:
    if "namespaces" not in available():
        pytest.skip("Landlock lets nothing be written")
    program = "import os, tempfile\nassert os.listdir('.') == [] and os.listdir('/tmp') == []\n"
    write = "open('x', 'w').write('1'); open('/tmp/y', 'w').write('2'); tempfile.mkstemp(); assert os.path.exists('y')"
    for _ in range(2):
        assert run(Job(program + write, "")).status == "passed"


@pytest.mark.parametrize(
    ("program", "tests", "entry_point", "status"),
    [
        ("def f(x): return x", "def check(c):\n    assert c(1) == 1", "f", "passed"),
        ("def f(x): return 0", "def check(c):\n    assert c(1) == 1", "f", "failed"),
        ("def g(x): return x", "def check(c):\n    assert c(1) == 1", "f", "failed"),
        ("def f(x): return 0\ndef check(c): pass", "def check(c):\n    assert c(1) == 1", "f", "failed"),
        ("def f(x): return 0\ndef abs(x): return 0", "def check(c):\n    assert abs(c(1) - 1) < 1e-6", "f", "failed"),
        ("def sum(x): return 7", "def check(c):\n    assert c(1) == sum(1) == 7", "sum", "passed"),
        ("def f(x): raise SystemExit(0)", "def check(c):\n    assert c(1) == 1", "f", "failed"),
        ("def f(x): import os; os._exit(0)", "def check(c):\n    assert c(1) == 1", "f", "ended"),
    ],
)
def test_check_is_called_with_the_entry_point(
    program: str, tests: str, entry_point: str, status: str, mode: Mode
) -> None:
    assert run(Job(program, tests, entry_point, calls_check=True), mode).status == status


def test_the_limit_starts_with_the_program_and_kills_it(mode: Mode) -> None:
    began = time.monotonic()
    result = run(Job("while True: pass", ""), mode, Limits(wall_s=0.2))
    assert result.status == "timeout"
    assert 0.2 <= result.seconds <= time.monotonic() - began < 6


def test_cpu_time_is_limited_even_for_a_program_that_ignores_the_warning(mode: Mode) -> None:
    program = "import signal; signal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    assert run(Job(program, ""), mode, Limits(wall_s=60.0, cpu_s=0.5)).status == "ended"


def test_nothing_stays_open(mode: Mode) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    run(Job("pass", ""), mode)
    before = descriptors()
    for program in ("pass", "import os; os._exit(3)", "while True: print('x' * 10000)"):
        run(Job(program, ""), mode)
    assert len(descriptors()) == len(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_killed_caller_leaves_nothing(mode: Mode) -> None:
    mark = f"leanroll-orphan-{os.getpid()}"
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from leanroll.sandbox.run import *; print('up', flush=True); "
        f"run(Job('import time; time.sleep(100)', {mark!r}), {mode!r}, Limits(wall_s=100.0))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 20
        while not (started := children(caller.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        started |= {inner for child in started for inner in children(child)}
        caller.kill()
    while any(alive(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started
    assert not [pid for pid in started if alive(pid)]


def children(parent: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_several_at_once(mode: Mode) -> None:
    statuses = {}

    def score(number: int) -> None:
        statuses[number] = run(Job(f"x = {number}", f"assert x % 2 == 0, {number}"), mode).status

    threads = [threading.Thread(target=score, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {number: "failed" if number % 2 else "passed" for number in range(6)}


def test_what_cannot_be_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="no such sandbox"):
        run(Job("pass", ""), "none")  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "_base_executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="cannot be started"):
        run(Job("pass", ""))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="need Linux, got darwin"):
        run(Job("pass", ""))
    checks.require_sandbox.cache_clear()
    with pytest.raises(SandboxUnavailable, match="need Linux"):
        checks.require_sandbox("namespaces")


def test_the_network_namespace_by_itself() -> None:
    """Without the filter of system calls: the namespace alone has no interface that is up."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from leanroll.sandbox import linux; import socket\n"
        "try: linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUSER)\nexcept OSError: sys.exit(3)\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 1)\nexcept OSError: sys.exit(0)\nsys.exit(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", code, port], check=False)
    if done.returncode == 3:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0
