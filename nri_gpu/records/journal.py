"""The journal: grants that the runtime may not know of yet.

A container enters the runtime's list only after CreateContainer is answered. A daemon that dies in between would not
find that grant at its next Synchronize, and would grant the GPUs again before the container starts. So each grant is
one line, appended without waiting for a disk, on /run, which is empty after a boot. The signed grant in it is the
proof: a line that was edited, cut or copied is ignored. Where an append fails, the grants on the containers still hold.

A grant of GPUs that another container was granted, which was created and may still be started, names that one in its
line: it must not start any more, whoever is asked. Only such a grant needs its line to be written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.ledger.grant_text import SignedGrant, sign_grant, verify_grant
from nri_gpu.ledger.recording import Remembered
from nri_gpu.system.storage import read_bytes, write_whole

JOURNAL: Final = "journal"  # in the state folder
# Some 500 grants. Beyond that, lines whose grace is over are dropped.
COMPACT_BYTES: Final = 256 * 1024
AT_MAX: Final = 1e12  # seconds: no machine has run for that long


class Journal:
    """An append-only file. Every method may raise OSError; the daemon goes on without it."""

    def __init__(self, path: Path, key: bytes, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self._path = path
        self._key = key
        self._compact_bytes = compact_bytes
        self._fd: int | None = None
        self._bytes = 0
        self._kept_bytes = 0  # by the last `compact`: what is kept does not make the file full again

    @property
    def full(self) -> bool:
        """Return whether it is time to `compact`."""
        return self._bytes - self._kept_bytes > self._compact_bytes

    def granted(
        self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId] = MappingProxyType({})
    ) -> None:
        """Append a grant. signed: as it is written on the container. revoked: containers that lose GPUs to it."""
        self._append(_grant_line(grant, signed, now, revoked))

    def settled(self, container_id: ContainerId) -> None:
        """Append that the runtime knows of a grant now, or that its container is gone."""
        self._append(_encoded(_Line(settled=container_id)))

    def revoked(self) -> Mapping[ContainerId, PodId]:
        """Return the containers that must not start, with their sandboxes."""
        return revoked_in(self._path)

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        """Append that these containers were revoked, and are gone."""
        self._append(_encoded(_Line(removed=tuple(container_ids))))

    def remembered(self, since: float) -> tuple[Remembered, ...]:
        """Return the grants made at `since` or later and not settled, in order. A missing file is empty."""
        found: dict[ContainerId, Remembered] = {}
        for line in _lines(self._path):
            if line.settled is not None:
                found.pop(line.settled, None)
            elif (remembered := self._understood(line)) and remembered.at >= since:
                found[remembered.grant.container_id] = remembered
        return tuple(found.values())

    def compact(self, since: float) -> None:
        """Write the file again, with what `remembered` returns, the revoked containers, and nothing else."""
        lines = [_grant_line(each.grant, sign_grant(each.grant, self._key), each.at) for each in self.remembered(since)]
        if revoked := revoked_in(self._path):
            lines.append(_encoded(_Line(revoked=revoked)))
        self.close()
        write_whole(self._path, b"".join(lines))
        self._bytes = self._kept_bytes = sum(map(len, lines))

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._bytes = os.fstat(self._fd).st_size
        written = os.write(self._fd, line)
        self._bytes += written
        if written < len(line):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: a line was cut short")

    def _understood(self, line: _Line) -> Remembered | None:
        signed = verify_grant(line.mark, line.pod_uid, line.container_id, self._key)
        if not isinstance(signed, SignedGrant) or line.at is None:
            return None
        grant = Grant(
            container_id=line.container_id,
            container_name=line.container,
            pod_id=line.pod_id,
            pod_uid=line.pod_uid,
            pod_name=line.pod,
            namespace=line.namespace,
            uuids=signed.uuids,
            mode=signed.mode,
            generation=signed.generation,
        )
        return Remembered(grant, line.at)


def revoked_in(path: Path) -> Mapping[ContainerId, PodId]:
    """Return the containers that must not start, since others were granted their GPUs, with their sandboxes.

    There are none without a journal. Raises: OSError, if the journal is there and cannot be read.
    """
    found: dict[ContainerId, PodId] = {}
    _revoke(found, _lines(path))
    return found


class RevokedReader:
    """The reader of revoked containers in another process's journal, who reads only what was appended since.

    The file stays open: until then no other file can have its inode number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._seen: os.stat_result | None = None  # the file as it was read
        self._offset = 0  # of the last line: it may have been read while it was written, so it is read once more
        self._found: dict[ContainerId, PodId] = {}

    def revoked(self) -> Mapping[ContainerId, PodId]:
        """Return what `revoked_in` does, of the file as it is now. Raises: OSError, likewise."""
        try:
            now, seen = self._path.stat(), self._seen
            if seen is None or not os.path.samestat(now, seen) or now.st_size < seen.st_size:
                self._open()
            elif (now.st_size, now.st_mtime_ns) == (seen.st_size, seen.st_mtime_ns):
                return self._found
            elif now.st_size == seen.st_size:  # written over
                self._open()
            self._read()
        except FileNotFoundError:
            self._close()
        except OSError:
            self._close()
            raise
        return self._found

    def _open(self) -> None:
        self._close()
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _read(self) -> None:
        assert self._fd is not None
        seen = os.fstat(self._fd)
        content = os.pread(self._fd, seen.st_size - self._offset, self._offset)
        _revoke(self._found, _decoded(content))
        self._offset += max(content.rfind(b"\n"), 0)
        self._seen = seen

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._seen, self._offset, self._found = None, None, 0, {}


def _revoke(found: dict[ContainerId, PodId], lines: Iterable[_Line]) -> None:
    for line in lines:
        found |= line.revoked
        for each in line.removed:
            found.pop(each, None)


def _lines(path: Path) -> Iterator[_Line]:
    try:
        content = read_bytes(path, -1)
    except FileNotFoundError:
        return
    yield from _decoded(content)


def _decoded(content: bytes) -> Iterator[_Line]:
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):  # cut short, or edited by hand
            yield msgspec.json.decode(line, type=_Line)


class _Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grant with its signature, as it is written on the container; or a container whose grant is settled.

    revoked: containers that must not start from then on, with their sandboxes. removed: revoked ones that are gone.
    """

    revoked: Mapping[ContainerId, PodId] = {}
    removed: tuple[ContainerId, ...] = ()
    settled: ContainerId | None = None
    at: Annotated[float, Meta(ge=0, lt=AT_MAX)] | None = None
    container_id: ContainerId = ContainerId("")
    container: str = ""
    pod_id: PodId = PodId("")
    pod_uid: PodUid = PodUid("")
    pod: str = ""
    namespace: str = ""
    mark: str = ""


def _encoded(line: _Line) -> bytes:
    # A line break first: behind a line that a full disk cut short, this one can still be read.
    return b"\n" + msgspec.json.encode(line)


def _grant_line(
    grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId] = MappingProxyType({})
) -> bytes:
    return _encoded(
        _Line(
            revoked=dict(revoked),
            at=now,
            container_id=grant.container_id,
            container=grant.container_name,
            pod_id=grant.pod_id,
            pod_uid=grant.pod_uid,
            pod=grant.pod_name,
            namespace=grant.namespace,
            mark=signed,
        )
    )
