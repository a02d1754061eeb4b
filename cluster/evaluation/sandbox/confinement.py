"""The kernel's means of confinement: namespaces, a root of our own, limits, and the surrender of all rights.

Only the standard library: this runs in the jailer. Everything here raises ``OSError`` where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

import forbidden_calls

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_CLONE_REST = 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # host name, IPC, processes, network
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 32, 4096
_MS_REC, _MS_PRIVATE, _MS_RELATIME = 1 << 14, 1 << 18, 1 << 21
_ST_RELATIME = 4096
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: the same numbers in statvfs and mount."""
_MNT_DETACH = 2
_SECCOMP_FILTER = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41  # 41: all newer architectures
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534
_FILES_PER_LIMIT = 4
_DEVICES = ("null", "zero", "random", "urandom")
_LIBC = ctypes.CDLL(None, use_errno=True)


def leave_namespaces() -> int:
    """New namespaces for all but files (children get them); returns the user that the program shall run as."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _call("unshare", _CLONE_REST)
        return _unused_user()
    # Not root: a user namespace, in which an unprivileged user stands for this one, and rights end with the namespace.
    _call("unshare", _CLONE_NEWUSER | _CLONE_REST)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return _NOBODY


def _unused_user() -> int:
    """A user for this jail alone, since the limit on processes counts all those of a user, in whatever jail."""
    with open("/proc/self/uid_map") as file:
        top = max(sum(map(int, line.split()[::2])) for line in file)
    if top < 1 << 16:
        return _NOBODY
    top = min(top, 1 << 31)
    return top - 1024 - os.getpid() % (top // 4)


def build_root(visible: list[str], user: int, file_bytes: int) -> None:
    """For this process and its children: a root with the visible folders, read-only, four devices and an empty /tmp."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)
    _call("unshare", _CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = "/proc"  # covered in this namespace only; a folder that exists everywhere and holds nothing to be shown
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    # Before the folders are shown, one of which may lie in /tmp.
    os.makedirs(f"{root}/tmp")
    size = file_bytes * _FILES_PER_LIMIT
    own = f"size={size},nr_inodes=4096,mode=700,uid={user},gid={os.getgid() or user}"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, own)
    shown: list[str] = []
    for folder in sorted(visible, key=len):
        if not any(folder.startswith(f"{other}/") for other in shown):
            _show(folder, root)
            shown.append(folder)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name in _DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _MS_BIND)
    _mount(None, root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)
    os.chdir(root)
    if _LIBC.syscall(_PIVOT_ROOT, b".", b"."):
        _raise("pivot_root")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/tmp")


def _show(folder: str, root: str) -> None:
    target = root + folder
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), target)
        return
    os.makedirs(target, exist_ok=True)
    _mount(folder, target, None, _MS_BIND | _MS_REC)
    flags = os.statvfs(folder).f_flag
    kept = flags & _KEPT_FLAGS | (_MS_RELATIME if flags & _ST_RELATIME else 0)
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


def give_up_rights(limits: dict, user: int, keep: tuple[int, ...]) -> None:
    """Limits, no input or output, no open files but ``keep``, an unprivileged user, no capabilities, for good."""
    os.setsid()
    _only_files(keep)
    for what, most in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (most, most))
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    refuse_calls()


def refuse_calls() -> None:
    """The calls that ``forbidden_calls`` lists fail from now on, in all children, too."""
    program = forbidden_calls.call_filter()
    _call("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), ctypes.byref(program), 0, 0)


def _only_files(keep: tuple[int, ...]) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for number in range(3, 256):
        if number not in keep:
            try:
                os.close(number)
            except OSError:
                continue


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if _LIBC.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode()):
        _raise(f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        _raise(name)


def _raise(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
