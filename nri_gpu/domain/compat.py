"""A package of CUDA's forward-compatibility libraries, as the administrator put it on the host and we staged it."""

from __future__ import annotations

from msgspec import Struct

CudaVersion = tuple[int, int]


class CompatPackage(Struct, frozen=True, kw_only=True):
    """One package: a newer CUDA on top of the kernel module that is loaded.

    cuda: the CUDA that its libcuda speaks, (13, 0). version: of its libcuda, `580.65.06`.
    drivers: majors of the host drivers that its libcuda was made to run on; None where its file does not say.
    generation: names the staged folder; changes whenever a file does. path: that folder, with every library under its
    names.
    """

    cuda: CudaVersion
    version: str
    drivers: frozenset[int] | None
    generation: str
    path: str

    def __hash__(self) -> int:
        """By place alone, as a driver's tree."""
        return hash(self.path)

    @property
    def cuda_version(self) -> str:
        """`13.0`."""
        return "{}.{}".format(*self.cuda)
