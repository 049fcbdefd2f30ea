"""Isolation of a process from the machine, by what the Linux kernel gives to users without rights. Imports the standard library alone.

`isolate` takes away, in this order: the user root; the network, other processes, other users' mounts (namespaces); every file but the
interpreter's own, read-only; `drop_rights` then takes the capabilities that the new namespaces gave. `limit` bounds one run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sysconfig
from pathlib import Path

NOBODY = 65534
"""User and group that the processes of a service which runs as root become."""
TMPFS_MIB = 64
"""All that a program may write to files."""
MAX_FILES = 64
MAX_PROCESSES = 8
"""And threads, of the isolated user."""
MIB = 1024 * 1024

_CLONE_NEWUSER = 0x10000000
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, host name, IPC, processes, network."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
"""Number of the system call, the same on every architecture (Linux 5.12)."""
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("null", "zero", "urandom")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def interpreter_folders() -> list[Path]:
    """The folders that running Python code needs: shared libraries and the standard library."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders = [*map(Path, _LIBRARIES), *(Path(each).resolve() for each in sorted(standard))]
    return [folder for folder in folders if folder.is_dir()]


def leave_root() -> None:
    """Makes a process of root one of nobody, where that user exists here."""
    if os.getuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a container without that user: its root is none of the machine's
            raise
    _prctl(_PR_SET_DUMPABLE, 1)  # its own /proc files are its own again


def isolate(folder: str) -> None:
    """Leaves this process with an empty network, no other process in sight of its children, and a root of its own at `folder`.

    The folder's content is hidden by files in memory, TMPFS_MIB at most, which vanish with the process. The current directory is the
    root's /tmp. Raises OSError, which names the step, where the kernel refuses one; the process is then of no use.
    """
    shown = interpreter_folders()
    os.umask(0o022)  # the user that the process becomes must find its way
    as_root = os.getuid() == 0 and _libc.unshare(_NAMESPACES) == 0
    if not as_root:
        leave_root()
        _own_users(_NAMESPACES)
    _furnish(folder, shown)
    os.chdir(folder)  # from here on its path need not be open to this user
    if as_root:
        leave_root()
        _own_users()
    os.chroot(".")
    os.chdir("/tmp")  # noqa: S108  of its own root


def drop_rights() -> None:
    """Takes every capability for good, of this process and all that it starts, none of which can read its memory.

    From now on it ends with the process that forked it.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(seconds: float, memory_mib: int, *, alone: bool) -> None:
    """Bounds this process for good: processor time, memory, size and number of files, and where its user is `alone`, processes."""
    cpu = int(seconds) + 1
    processes = MAX_PROCESSES if alone else resource.RLIM_INFINITY  # of another user, the kernel counts all that run
    for what, wanted in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mib * MIB),
        (resource.RLIMIT_FSIZE, TMPFS_MIB * MIB),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = min((each for each in (wanted, hard) if each != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)
        resource.setrlimit(what, (most, most))


def _own_users(more: int = 0) -> None:
    """Gives this process a namespace of users with itself alone, in which it has every right, and can make no namespaces within."""
    uid, gid = os.getuid(), os.getgid()
    _checked("unshare", _libc.unshare(_CLONE_NEWUSER | more))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    with contextlib.suppress(OSError):  # where /proc is read-only, programs may make namespaces
        Path("/proc/sys/user/max_user_namespaces").write_text("0")


def _furnish(folder: str, shown: list[Path]) -> None:
    """Mounts at `folder` what the process shall see."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={TMPFS_MIB}m,mode=0755")
    for path in shown:
        _show(path, Path(f"{folder}{path}"))
    for name in _DEVICES:
        file = Path(folder, "dev", name)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        _mount(f"/dev/{name}", str(file), "", _MS_BIND)
    own = Path(folder, "tmp")
    own.mkdir()
    own.chmod(0o777)


def _show(source: Path, target: Path) -> None:
    """Makes a folder visible at `target`, read-only, with all that is mounted below it."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    target.mkdir(parents=True, exist_ok=True)
    _mount(str(source), str(target), "", _MS_BIND | _MS_REC)
    read_only = _MountAttributes(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    path = os.fsencode(target)
    arguments = _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only)
    if _libc.syscall(_MOUNT_SETATTR, *arguments) and ctypes.get_errno() != errno.ENOSYS:
        _checked(f"mount_setattr of {target}", -1)
    elif ctypes.get_errno() == errno.ENOSYS:
        _mount("none", str(target), "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (text.encode() or None for text in (source, target, kind))
    _checked(f"mount of {target}", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None))


def _prctl(option: int, value: int) -> None:
    _checked(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _checked(step: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{step}: {os.strerror(ctypes.get_errno())}")


_libc = ctypes.CDLL(None, use_errno=True)
