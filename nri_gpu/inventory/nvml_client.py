"""The NVML client of our child processes: it announces each call, makes it, and reports a failure as a NvmlCallError.

The calls go through nvidia-ml-py, or through an older function where the library lacks the one that nvidia-ml-py uses.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Final

import pynvml

from nri_gpu.inventory.library import NVML
from nri_gpu.inventory.nvml_symbols import ReturnCodeError, Symbols

# Return codes of nvml.h.
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NOT_FOUND: Final = 6
TIMEOUT: Final = 10
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
ARGUMENT_VERSION_MISMATCH: Final = 25

UNSUPPORTED: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
GPU_GONE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})
INIT: Final = "nvmlInit"
MESSAGE_MAX: Final = 400  # characters; the report refuses longer sentences


class NvmlCallError(Exception):
    """An NVML call that failed: `nvmlDeviceGetUUID: GPU is lost (15)`. code: 0 where the answer was unreadable."""

    def __init__(self, name: str, message: str, code: int = 0) -> None:
        super().__init__((f"{name}: {message} ({code})" if code else f"{name}: {message}")[:MESSAGE_MAX])
        self.code = code


class NvmlClient:
    """Makes NVML calls. announce: told the name of each call, and the GPU's index, before the call is made."""

    def __init__(self, announce: Callable[[str, int | None], None]) -> None:
        self._announce = announce
        self._symbols = Symbols(lambda: ctypes.CDLL(NVML))

    @property
    def lacking(self) -> list[tuple[str, str]]:
        """Functions that this driver's library lacks, each with the older one used instead, or empty."""
        return self._symbols.lacking

    def call(self, name: str, *arguments: object, gpu: int | None = None) -> Any:  # noqa: ANN401 (NVML's own types)
        """The result of one call. gpu: the index of the GPU that the call is about.

        Raises: NvmlCallError.
        """
        self._announce(name, gpu)
        try:
            older = self._symbols.older(name)
            if older is None:
                return _binding(name)(*arguments)
            if name == INIT:
                # nvidia-ml-py opens the library in this call only, before it finds that the function is missing.
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
            return older(*arguments)
        except pynvml.NVMLError as error:
            raise NvmlCallError(name, str(error), error.value) from error
        except ReturnCodeError as error:
            raise NvmlCallError(name, str(pynvml.NVMLError(error.code)), error.code) from error
        except ValueError as error:  # bytes that are not UTF-8
            raise NvmlCallError(name, f"unreadable answer ({error})") from error

    def parsed(self, parse: Callable[[str], str], name: str, *arguments: object, gpu: int | None = None) -> str:
        """The text that a call returns, checked by `parse`. Raises: NvmlCallError."""
        return checked(parse, self.call(name, *arguments, gpu=gpu), name)

    def if_supported(self, name: str, *arguments: object, default: object = None, gpu: int) -> Any:  # noqa: ANN401
        """The result, or `default` where this GPU or driver does not support the call. Raises: NvmlCallError."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError as error:
            if error.code not in UNSUPPORTED:
                raise
            return default

    def optional(self, name: str, *arguments: object, default: object = None, gpu: int | None = None) -> Any:  # noqa: ANN401
        """The result, or `default` where the call fails. Raises: NvmlCallError, when the GPU is gone."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError as error:
            if error.code in GPU_GONE:
                raise
            return default

    def attempt(self, name: str, *arguments: object, gpu: int) -> Any:  # noqa: ANN401
        """The result, or None where the call fails for whatever reason."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError:
            return None


def checked(parse: Callable[[str], str], text: str, name: str) -> str:
    """`parse(text)`, of a text that the call `name` returned. Raises: NvmlCallError."""
    try:
        return parse(text)
    except ValueError as error:
        raise NvmlCallError(name, str(error)) from error


def _fabric_info(handle: object) -> Any:  # noqa: ANN401 (an nvmlGpuFabricInfo of some version)
    """Fills the struct that nvidia-ml-py wants from its caller. Drivers before R550 have an older struct and call."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    except pynvml.NVMLError as error:
        if error.value not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH):
            raise
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(info))
    return info


_OURS: Final[Mapping[str, Callable[..., Any]]] = {"nvmlDeviceGetGpuFabricInfoV": _fabric_info}


def _binding(name: str) -> Callable[..., Any]:
    return _OURS.get(name) or getattr(pynvml, name, None) or _undeclared


def _undeclared(*_: object) -> None:
    """Stands in for a function that this release of nvidia-ml-py does not declare. Raises: NVMLError."""
    raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
