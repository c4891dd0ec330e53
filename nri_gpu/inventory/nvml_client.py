"""The NVML client of our child processes: it announces each call, makes it, and reports a failure as a NvmlCallError.

The calls go through nvidia-ml-py, which uses only the newest version of each function. NVML gives a function a new
suffix with each new layout of its struct, and keeps the old ones. Where a library lacks the newest, an older one is
called, with the struct layouts of nvml.h of that time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import pynvml
from msgspec import Struct

from nri_gpu.inventory.library import FUNCTION_NOT_FOUND, NVML

# Return codes of nvml.h.
SUCCESS: Final = 0
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
ARGUMENT_VERSION_MISMATCH: Final = 25

UNSUPPORTED: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
GPU_GONE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})
INIT: Final = "nvmlInit"
MESSAGE_MAX: Final = 400  # characters; the report refuses longer sentences
NO_INSTANCE: Final = 0xFFFFFFFF  # of an event that concerns the whole GPU (nvml.h: nvmlEventData_t)
SPARE_PROCESSES: Final = 8  # for those that start between two calls


class NvmlCallError(Exception):
    """An NVML call that failed: `nvmlDeviceGetUUID: GPU is lost (15)`. code: 0 where the answer was unreadable."""

    def __init__(self, name: str, message: str, code: int = 0) -> None:
        super().__init__((f"{name}: {message} ({code})" if code else f"{name}: {message}")[:MESSAGE_MAX])
        self.code = code


class NvmlClient:
    """The maker of NVML calls. announce: gets the name of each call, and the GPU's index, before the call is made."""

    def __init__(self, announce: Callable[[str, int | None], None]) -> None:
        self._announce = announce
        self._library: ctypes.CDLL | None = None
        self._older: dict[str, Callable[..., Any] | None] = {}  # by the name that nvidia-ml-py has for the call
        self._lacking: dict[str, str] = {}

    @property
    def lacking(self) -> list[tuple[str, str]]:
        """Return the functions that this driver's library lacks, each with the older one used instead, or empty."""
        return sorted(self._lacking.items())

    def call(self, name: str, *arguments: object, gpu: int | None = None) -> Any:  # noqa: ANN401 (NVML's own types)
        """Return the result of one call. gpu: the index of the GPU that the call is about.

        Raises: NvmlCallError.
        """
        self._announce(name, gpu)
        try:
            if name not in self._older:
                self._older[name] = self._find_older(name)
            older = self._older[name]
            if older is None:
                return _binding(name)(*arguments)
            if name == INIT:
                # nvidia-ml-py opens the library in this call only, before it finds that the function is missing.
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
            return older(*arguments)
        except pynvml.NVMLError as error:
            raise NvmlCallError(name, str(error), error.value) from error
        except ValueError as error:  # bytes that are not UTF-8
            raise NvmlCallError(name, f"unreadable answer ({error})") from error

    def parsed(self, parse: Callable[[str], str], name: str, *arguments: object, gpu: int | None = None) -> str:
        """Return the text of a call, checked by `parse`. Raises: NvmlCallError."""
        return checked(parse, self.call(name, *arguments, gpu=gpu), name)

    def if_supported(self, name: str, *arguments: object, default: object = None, gpu: int) -> Any:  # noqa: ANN401
        """Return the result, or `default` if this GPU or driver does not support the call. Raises: NvmlCallError."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError as error:
            if error.code not in UNSUPPORTED:
                raise
            return default

    def optional(self, name: str, *arguments: object, default: object = None, gpu: int | None = None) -> Any:  # noqa: ANN401
        """Return the result, or `default` if the call fails. Raises: NvmlCallError, when the GPU is gone."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError as error:
            if error.code in GPU_GONE:
                raise
            return default

    def attempt(self, name: str, *arguments: object, gpu: int) -> Any:  # noqa: ANN401
        """Return the result, or None if the call fails for whatever reason."""
        try:
            return self.call(name, *arguments, gpu=gpu)
        except NvmlCallError:
            return None

    def _find_older(self, name: str) -> Callable[..., Any] | None:
        """Return the older function to call instead of nvidia-ml-py's, or None if that one works or nothing does."""
        self._library = self._library or ctypes.CDLL(NVML)
        chain = CHAINS.get(name, Chain(name, ()))
        if hasattr(self._library, chain.newest):
            return None
        for symbol, call in chain.older:
            if hasattr(self._library, symbol):
                self._lacking[chain.newest] = symbol
                return partial(call, getattr(self._library, symbol))
        self._lacking[chain.newest] = ""
        return None


def checked(parse: Callable[[str], str], text: str, name: str) -> str:
    """Return `parse(text)`, of a text that the call `name` returned. Raises: NvmlCallError."""
    try:
        return parse(text)
    except ValueError as error:
        raise NvmlCallError(name, str(error)) from error


def _fabric_info(handle: object) -> Any:  # noqa: ANN401 (an nvmlGpuFabricInfo of some version)
    """Return the filled struct that nvidia-ml-py wants from its caller, or the older struct of drivers before R550."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    except pynvml.NVMLError as error:
        if error.value not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH):
            raise
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(info))
    return info


def _memory_info(handle: object) -> Any:  # noqa: ANN401 (an nvmlMemory_v2_t)
    return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)


_OURS: Final[Mapping[str, Callable[..., Any]]] = {
    "nvmlDeviceGetGpuFabricInfoV": _fabric_info,
    "nvmlDeviceGetMemoryInfo_v2": _memory_info,
}


def _binding(name: str) -> Callable[..., Any]:
    return _OURS.get(name) or getattr(pynvml, name, None) or _undeclared


def _undeclared(*_: object) -> None:
    """Stand in for a function that this release of nvidia-ml-py does not declare. Raises: NVMLError."""
    raise pynvml.NVMLError(FUNCTION_NOT_FOUND)


class _Device(ctypes.Structure):
    """The opaque struct that nvmlDevice_t points to."""


Device: Final = ctypes.POINTER(_Device)


class PciInfoV2(ctypes.Structure):
    """nvmlPciInfo_t before _v3: 52 bytes. Its texts lie elsewhere than today, so only the numbers are read."""

    _fields_ = (
        ("busId", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 4),
    )


class EventDataV1(ctypes.Structure):
    """nvmlEventData_t before it had MIG instances: 24 bytes. Every event is about the whole GPU."""

    _fields_ = (("device", Device), ("eventType", ctypes.c_ulonglong), ("eventData", ctypes.c_ulonglong))
    gpuInstanceId = computeInstanceId = NO_INSTANCE


class ProcessInfoV1(ctypes.Structure):
    """nvmlProcessInfo_t before it had MIG instances: 16 bytes."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


class ProcessInfoV2(ctypes.Structure):
    """nvmlProcessInfo_t of _v2 and _v3: 24 bytes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


F = TypeVar("F", bound="ctypes.Structure | ctypes.c_uint | ctypes._Pointer[_Device]")
Foreign = Callable[..., int]  # a function of the library
Call = Callable[..., Any]  # (that function, arguments) -> what the binding would have returned


def _check(code: int) -> None:
    """Raise NVMLError unless the code is success."""
    if code != SUCCESS:
        raise pynvml.NVMLError(code)


def _filled(kind: type[F]) -> Callable[..., F]:
    """Return a call whose last argument points to the struct that it fills in. kind: makes the struct."""

    def call(function: Foreign, *arguments: object) -> F:
        found = kind()
        _check(function(*arguments, ctypes.byref(found)))
        return found

    return call


_by_handle, _pci_info, _number = _filled(Device), _filled(PciInfoV2), _filled(ctypes.c_uint)


def _count(function: Foreign) -> int:
    return _number(function).value


def _event(function: Foreign, events: object, timeout_ms: int) -> EventDataV1:
    data = EventDataV1()
    _check(function(events, ctypes.byref(data), ctypes.c_uint(timeout_ms)))
    return data


def _processes(layout: type[ctypes.Structure]) -> Call:
    def call(function: Foreign, device: object) -> list[ctypes.Structure]:
        room = ctypes.c_uint(0)
        code = function(device, ctypes.byref(room), None)
        if code == INSUFFICIENT_SIZE:
            room.value += SPARE_PROCESSES
            infos = (layout * room.value)()
            _check(function(device, ctypes.byref(room), infos))
            return list(infos[: room.value])
        _check(code)
        return []

    return call


class Chain(Struct, frozen=True):
    """The symbols of one NVML function. newest: the one nvidia-ml-py uses.

    older: those to use instead, newest first.
    """

    newest: str
    older: tuple[tuple[str, Call], ...]


def _running(kind: str) -> Chain:
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    return Chain(f"{name}_v3", ((f"{name}_v2", _processes(ProcessInfoV2)), (name, _processes(ProcessInfoV1))))


# By the name that nvidia-ml-py has for the call.
CHAINS: Final[Mapping[str, Chain]] = {
    "nvmlInit": Chain("nvmlInitWithFlags", (("nvmlInit_v2", lambda function: _check(function())),)),
    "nvmlSystemGetCudaDriverVersion_v2": Chain(
        "nvmlSystemGetCudaDriverVersion_v2", (("nvmlSystemGetCudaDriverVersion", _count),)
    ),
    "nvmlDeviceGetCount": Chain("nvmlDeviceGetCount_v2", (("nvmlDeviceGetCount", _count),)),
    "nvmlDeviceGetHandleByIndex": Chain("nvmlDeviceGetHandleByIndex_v2", (("nvmlDeviceGetHandleByIndex", _by_handle),)),
    "nvmlDeviceGetHandleByPciBusId": Chain(
        "nvmlDeviceGetHandleByPciBusId_v2", (("nvmlDeviceGetHandleByPciBusId", _by_handle),)
    ),
    "nvmlDeviceGetPciInfo_v3": Chain(
        "nvmlDeviceGetPciInfo_v3",
        (("nvmlDeviceGetPciInfo_v2", _pci_info), ("nvmlDeviceGetPciInfo", _pci_info)),
    ),
    "nvmlDeviceGetNvLinkRemotePciInfo": Chain(
        "nvmlDeviceGetNvLinkRemotePciInfo_v2", (("nvmlDeviceGetNvLinkRemotePciInfo", _pci_info),)
    ),
    "nvmlDeviceGetComputeRunningProcesses_v3": _running("Compute"),
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _running("Graphics"),
    "nvmlEventSetWait_v2": Chain("nvmlEventSetWait_v2", (("nvmlEventSetWait", _event),)),
}
