"""Small files of the kernel, of the host and of our own: read, replaced, kept private, locked."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from nri_gpu.system.user_namespace import is_the_hosts

KEY_BYTES: Final = 32
Signature = tuple[int, int, int, int]  # device, inode, time of change in ns, bytes
_LOCKS: Final = Path("/proc/locks")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class NotPrivateError(PermissionError):
    """A file that users other than root could have written, or may read. `strerror` says why, as a clause."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


class KeyLengthError(OSError):
    """A file that is not as long as a key. `strerror` says so, as a clause."""


def text_of(path: str | Path, most: int = -1, encoding: str = "ascii") -> str | None:
    """Return the text of a file as `bytes_of` does, odd bytes replaced: not for one whose reader refuses such bytes."""
    content = bytes_of(path, most)
    return None if content is None else content.decode(encoding, errors="replace")


def bytes_of(path: str | Path, most: int = -1) -> bytes | None:
    """Return the bytes of a file, or None if it cannot be read. most: of them; -1: all."""
    try:
        return read_bytes(path, most)
    except OSError:
        return None


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the first bytes of a file. A pipe in its place is empty, and hangs nobody. most: -1: all. Raises: OSError.

    A pipe that others hold open has no content yet; a socket cannot be opened.
    """
    with open(path, "rb", opener=_at_once) as file:
        return file.read(most) or b""


def open_input(path: str | Path) -> BinaryIO:
    """Open what the command line names. A pipe that nobody writes is empty, and hangs nobody. Raises: OSError."""
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115 - the caller closes it
    os.set_blocking(file.fileno(), True)
    return file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def below(root: Path, path: str | Path) -> Path:
    """Return a path below a root folder. /var/run is mostly a link to /run, which would lead out of the root."""
    inside = str(path).lstrip("/")
    if inside.startswith("var/run/") and root != Path("/"):
        inside = inside.removeprefix("var/")
    return root / inside


def is_there(path: Path) -> bool:
    """Return whether a path exists, also if this user may not look: reading it says why not."""
    try:
        return stat_of(path) is not None
    except OSError:
        return True


def write_whole(path: Path, content: bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Replace a file, whole or not at all. A process that has the old file open or mounted keeps it.

    mode: of the new file, whatever the umask. sync: on the disk before it replaces the old one. The draft's name begins
    with a dot, so those who read all files of a folder (CDI, Node Feature Discovery) pass over it.

    Raises: OSError, also if the folder is missing.
    """
    draft = draft_of(path)
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)
            stream.write(content)
            if sync:
                stream.flush()
                os.fsync(descriptor)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)  # it may have taken the last room
        raise


def draft_of(path: Path) -> Path:
    """Return where `write_whole` writes a file at first: a process that is killed meanwhile leaves it."""
    return path.with_name(f".{path.name}.new")


def stat_of(path: Path) -> os.stat_result | None:
    """Return what stat(2) reports of a path, or None if nothing is there.

    Raises: OSError, if the path cannot be looked up. `Path.exists` takes that for nothing from Python 3.14 on.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def signature(path: str | Path, *, follow: bool = True) -> Signature | None:
    """Return a value that differs once a file's content does, or None without one. follow: a link to its file."""
    try:
        found = os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - it may be a string
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def why_untrusted(found: os.stat_result, path: Path | None = None) -> str:
    """Return a clause: why a file or folder is not safe to hand to containers; empty if only root and we can change it.

    We are root where it matters. Elsewhere (tests, a dry run) we could change our own files anyway. In an unprivileged
    container nobody can change what is its host's. path: where it is, which may prove that.
    """
    known = found.st_uid in {0, os.geteuid()} or is_the_hosts(found.st_uid, path)
    if known and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: users other than root can change it"


def boot_id(path: Path = _BOOT_ID) -> str:
    """Return the boot id of the running kernel, or empty if it cannot be read."""
    return (text_of(path) or "").strip()


def read_private(path: Path, most: int) -> bytes:
    """Return the first bytes of a file that is ours alone: a key that others could read or write proves nothing.

    Raises: NotPrivateError; OSError, if it cannot be opened. A file that is not regular neither hangs us nor leads on.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = stat.S_IMODE(_ours(path, descriptor).st_mode)
        if mode & 0o077:
            raise NotPrivateError(path, f"its mode {mode:04o} lets users other than root use it")
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def read_key(file: Path) -> bytes:
    """Return the key in a file that is ours alone. Raises: KeyLengthError; NotPrivateError, OSError: `read_private`."""
    key = read_private(file, KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise KeyLengthError(errno.EINVAL, f"it is not {KEY_BYTES} bytes long", str(file))
    return key


def make_key(file: Path, key: bytes | None = None) -> bytes:
    """Write a key, a new one unless one is handed in, and return what the file holds then. Raises: OSError.

    Another daemon may have replaced the key meanwhile.
    """
    write_whole(file, key or os.urandom(KEY_BYTES), sync=True)
    return read_key(file)


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock file, made when missing. Only root can open it, since whoever can, can hold it.

    Raises: NotPrivateError; OSError, if it cannot be opened or made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if _ours(path, descriptor).st_mode & 0o077:  # as versions before this one made it
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Lock the file among all processes until the descriptor is closed; return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_holder(descriptor: int) -> str:
    """Return ` (pid 12)` of the process that has the file locked, or empty if it is unknown, as in another pod."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"  # proc_locks(5)
    lines = (line.split() for line in (text_of(_LOCKS) or "").splitlines())
    return next((f" (pid {words[4]})" for words in lines if words[1:2] == ["FLOCK"] and place in words), "")


def _ours(path: Path, descriptor: int) -> os.stat_result:
    """Return the file's stat. Raises: NotPrivateError, if the file is not regular, or not our own."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise NotPrivateError(path, "it is not a regular file")
    if found.st_uid != os.geteuid():
        raise NotPrivateError(path, f"it belongs to user {found.st_uid}")
    return found
