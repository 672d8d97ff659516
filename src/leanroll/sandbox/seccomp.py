"""A filter of system calls (classic BPF), the second wall behind the namespaces and the first one without them.

What is denied fails with EPERM (clone3 with ENOSYS, so that the C library falls back to clone, whose flags a filter can read).
"""

from __future__ import annotations

import ctypes

from leanroll.sandbox import linux

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AF_UNIX = 1
_NEW_NAMESPACE = (
    linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID | linux.CLONE_NEWNET
)  # fmt: skip

# name → number on x86_64, on aarch64 (None: not there).
# Ways around the walls, and parts of the kernel that no program of a test needs.
_ALWAYS: dict[str, tuple[int, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "personality": (135, 92), "kexec_load": (246, 104),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180),
}  # fmt: skip
# Without namespaces: no other process or thread, no socket, no change to what Landlock leaves reachable.
_ALONE: dict[str, tuple[int, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "socket": (41, 198),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpgid": (109, 154), "setsid": (112, 157),
}  # fmt: skip
_SOCKET, _CLONE, _CLONE3, _PRLIMIT = (41, 198), (56, 220), (435, 435), (302, 261)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def install(*, alone: bool) -> None:
    """Filter the system calls of this process and all it starts, for good. Needs no_new_privs.

    Args:
        alone: also deny processes and threads, signals, sockets, and changes of modes, owners and times.

    Raises:
        OSError: the kernel has no such filters.
    """
    code = b"".join(_instruction(*line) for line in _filter(alone))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    linux.prctl("seccomp", linux.PR_SET_SECCOMP, 2, ctypes.addressof(program))


_Line = tuple[int, int, int, int]  # operation, lines to skip if true, if false, operand


def _filter(alone: bool) -> list[_Line]:
    arm = linux.MACHINE == "aarch64"
    lines: list[_Line] = [
        (_LOAD, 0, 0, 4),  # architecture: the numbers of another one mean other calls
        (_EQUAL, 1, 0, _AUDIT_ARCH[linux.MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # number
    ]
    if not arm:
        lines += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _EPERM)]
    for numbers in [*_ALWAYS.values(), *(_ALONE.values() if alone else ())]:
        number = numbers[arm]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    lines += [(_EQUAL, 0, 1, _CLONE3[arm]), (_RETURN, 0, 0, _ENOSYS)]
    if alone:
        lines += _if_argument(_PRLIMIT[arm], (_EQUAL, 1, 0, 0))  # the limits of this process only
    else:
        lines += _if_argument(_CLONE[arm], (_ANY_BIT, 0, 1, _NEW_NAMESPACE))
        lines += _if_argument(_SOCKET[arm], (_EQUAL, 1, 0, _AF_UNIX))
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _if_argument(number: int, test: _Line) -> list[_Line]:
    """Deny call `number` unless the test of its first argument's low 32 bits skips a line."""
    return [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16), test, (_RETURN, 0, 0, _EPERM), (_LOAD, 0, 0, 0)]


def _instruction(operation: int, if_true: int, if_false: int, operand: int) -> bytes:
    return operation.to_bytes(2, "little") + bytes((if_true, if_false)) + operand.to_bytes(4, "little")
