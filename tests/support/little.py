"""A daemon whose state folder has little room; a test that has few descriptors, or room for small files alone."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Final

from tests.support.daemon import Launch, NriGpu

IN_LITTLE: Final = 'mount -t tmpfs -o "size=$1,mode=0700" none "$2" && shift 2 && exec "$@"'


class NriGpuInLittle(NriGpu):
    """The daemon with a state folder of so many KiB, in a mount namespace of its own."""

    def __init__(self, launch: Launch, size_kib: int) -> None:
        super().__init__(launch)
        self._size_kib = size_kib
        launch.state.mkdir(mode=0o700, exist_ok=True)

    def program(self) -> list[str]:
        alone = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", IN_LITTLE, "sh"]
        return [*alone, f"{self._size_kib}k", str(self.launch.state), *super().program()]

    @property
    def folder(self) -> Path:
        return Path(f"/proc/{self.pid}/root{self.launch.state}")

    def fill(self) -> None:
        """Until not a byte more goes in."""
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                return


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Let this process open no more than `free` files at a time."""
    unused = (number for number in count() if not Path(f"/proc/self/fd/{number}").exists())
    with _limited(resource.RLIMIT_NOFILE, next(islice(unused, free, None))):
        yield


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Let this process write no more than `most` bytes into a file: a longer write is cut short, then fails."""
    with _limited(resource.RLIMIT_FSIZE, most):
        yield


@contextmanager
def _limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
