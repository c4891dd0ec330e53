"""NVIDIA's programs that MPS needs on the host, run from the staged driver with the staged libraries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, DriverFiles, GpuUuid
from nri_gpu.domain.mps import PIPE_VARIABLE

CONTROL: Final = "nvidia-cuda-mps-control"
SMI: Final = "nvidia-smi"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S: Final = 10.0  # a daemon that does not answer for so long is not one
SMI_S: Final = 60.0  # it wakes a GPU that sleeps
_SHOWN_MAX: Final = 200  # characters of what a program says


class MpsError(NriGpuError):
    """A daemon cannot be started, asked or ended. Says why in a clause."""


class Tools(Struct, frozen=True):
    """Programs and libraries of one staged driver."""

    bin: Path
    libraries: Path

    @classmethod
    def of(cls, driver: DriverFiles | None) -> Tools:
        """Those of compute and utility. Raises: MpsError: this driver has none."""
        tree = driver.trees.get(DEFAULT_CAPABILITIES) if driver else None
        if tree is None:
            raise MpsError("the driver's files are not staged yet")
        missing = [name for name in (CONTROL, SMI) if name not in tree.binaries]
        if missing:
            raise MpsError(f"the driver on this node has no {' and no '.join(missing)}: install that part of it")
        return cls(Path(tree.path, "lib64/bin"), Path(tree.path, "lib64"))

    @property
    def environment(self) -> Mapping[str, str]:
        """What they are run with; nothing of our own environment."""
        return {"PATH": f"{self.bin}:{SYSTEM_PATH}", "LD_LIBRARY_PATH": str(self.libraries), "LC_ALL": "C"}

    async def control(self, pipe: Path, command: str) -> str:
        """Say something to the daemon of that pipe directory. Returns what it answers. Raises: MpsError."""
        environment = {**self.environment, PIPE_VARIABLE: str(pipe)}
        return await _output([str(self.bin / CONTROL)], environment, f"{command}\n", COMMAND_S)

    async def set_compute_mode(self, uuid: GpuUuid, mode: str) -> None:
        """`EXCLUSIVE_PROCESS` lets one process, the MPS server, have the GPU; `DEFAULT` any. Raises: MpsError."""
        await _output([str(self.bin / SMI), "-i", uuid, "-c", mode], self.environment, "", SMI_S)


async def _output(command: list[str], environment: Mapping[str, str], said: str, limit_s: float) -> str:
    pipe = asyncio.subprocess.PIPE
    name = Path(command[0]).name
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environment), cwd="/", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise MpsError(f"{name} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate(said.encode())
    except TimeoutError:
        raise MpsError(f"{name} did not end within {limit_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = " ".join(output.decode(errors="replace").split())
    if process.returncode:
        raise MpsError(
            f"{name} {' '.join(command[1:]) or said.strip()} ended with {process.returncode}: {text[:_SHOWN_MAX]}"
        )
    return text
