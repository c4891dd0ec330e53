"""Functions of NVML as older libraries have them: nvidia-ml-py uses only the newest version of each.

NVML gives a function a new suffix with each new layout of its struct, and keeps the old functions. The older ones are
called through the library that is already loaded, with the struct layouts of nvml.h of that time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct

SUCCESS: Final = 0
INSUFFICIENT_SIZE: Final = 7
NO_INSTANCE: Final = 0xFFFFFFFF
SPARE_PROCESSES: Final = 8  # for those that start between two calls


class ReturnCodeError(Exception):
    """NVML returned an error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Device(ctypes.Structure):
    """What nvmlDevice_t points to: opaque."""


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


Foreign = Callable[..., int]  # a function of the library
Call = Callable[..., Any]  # (that function, arguments) -> what the binding would have returned


def _checked(code: int) -> None:
    """Raises: ReturnCodeError."""
    if code != SUCCESS:
        raise ReturnCodeError(code)


def _start(function: Foreign) -> None:
    _checked(function())


def _count(function: Foreign) -> int:
    number = ctypes.c_uint()
    _checked(function(ctypes.byref(number)))
    return number.value


def _by_index(function: Foreign, index: int) -> Any:  # noqa: ANN401 (a pointer)
    device = Device()
    _checked(function(ctypes.c_uint(index), ctypes.byref(device)))
    return device


def _by_bus_id(function: Foreign, bus_id: bytes) -> Any:  # noqa: ANN401 (a pointer)
    device = Device()
    _checked(function(ctypes.c_char_p(bus_id), ctypes.byref(device)))
    return device


def _pci_info(function: Foreign, *whose: Any) -> PciInfoV2:  # noqa: ANN401 (a device, or a device and a link)
    info = PciInfoV2()
    _checked(function(*whose, ctypes.byref(info)))
    return info


def _event(function: Foreign, events: Any, timeout_ms: int) -> EventDataV1:  # noqa: ANN401 (a pointer)
    data = EventDataV1()
    _checked(function(events, ctypes.byref(data), ctypes.c_uint(timeout_ms)))
    return data


def _processes(layout: type[ctypes.Structure]) -> Call:
    def call(function: Foreign, device: Any) -> list[Any]:  # noqa: ANN401 (a pointer)
        room = ctypes.c_uint(0)
        code = function(device, ctypes.byref(room), None)
        if code == INSUFFICIENT_SIZE:
            room.value += SPARE_PROCESSES
            infos = (layout * room.value)()
            _checked(function(device, ctypes.byref(room), infos))
            return list(infos[: room.value])
        _checked(code)
        return []

    return call


class Chain(Struct, frozen=True):
    """newest: the symbol that nvidia-ml-py uses. older: the symbols to use instead, newest first."""

    newest: str
    older: tuple[tuple[str, Call], ...]


def _running(kind: str) -> Chain:
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    return Chain(f"{name}_v3", ((f"{name}_v2", _processes(ProcessInfoV2)), (name, _processes(ProcessInfoV1))))


# By the name that nvidia-ml-py has for the call.
CHAINS: Final[Mapping[str, Chain]] = {
    "nvmlInit": Chain("nvmlInitWithFlags", (("nvmlInit_v2", _start),)),
    "nvmlSystemGetCudaDriverVersion_v2": Chain(
        "nvmlSystemGetCudaDriverVersion_v2", (("nvmlSystemGetCudaDriverVersion", _count),)
    ),
    "nvmlDeviceGetCount": Chain("nvmlDeviceGetCount_v2", (("nvmlDeviceGetCount", _count),)),
    "nvmlDeviceGetHandleByIndex": Chain("nvmlDeviceGetHandleByIndex_v2", (("nvmlDeviceGetHandleByIndex", _by_index),)),
    "nvmlDeviceGetHandleByPciBusId": Chain(
        "nvmlDeviceGetHandleByPciBusId_v2", (("nvmlDeviceGetHandleByPciBusId", _by_bus_id),)
    ),
    "nvmlDeviceGetPciInfo_v3": Chain(
        "nvmlDeviceGetPciInfo_v3", (("nvmlDeviceGetPciInfo_v2", _pci_info), ("nvmlDeviceGetPciInfo", _pci_info))
    ),
    "nvmlDeviceGetNvLinkRemotePciInfo": Chain(
        "nvmlDeviceGetNvLinkRemotePciInfo_v2", (("nvmlDeviceGetNvLinkRemotePciInfo", _pci_info),)
    ),
    "nvmlDeviceGetComputeRunningProcesses_v3": _running("Compute"),
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _running("Graphics"),
    "nvmlEventSetWait_v2": Chain("nvmlEventSetWait_v2", (("nvmlEventSetWait", _event),)),
}


class Symbols:
    """The functions that the loaded library has. Each name is looked up once."""

    def __init__(self, load: Callable[[], ctypes.CDLL]) -> None:
        self._load = load
        self._library: ctypes.CDLL | None = None
        self._older: dict[str, Callable[..., Any] | None] = {}
        self._lacking: dict[str, str] = {}

    @property
    def lacking(self) -> list[tuple[str, str]]:
        """Symbols that were needed and are missing, each with the one used instead, or empty."""
        return sorted(self._lacking.items())

    def older(self, name: str) -> Callable[..., Any] | None:
        """The older function to call instead of nvidia-ml-py's; None where that one works, or nothing does."""
        if name not in self._older:
            self._older[name] = self._find(name)
        return self._older[name]

    def _find(self, name: str) -> Callable[..., Any] | None:
        self._library = self._library or self._load()
        chain = CHAINS.get(name, Chain(name, ()))
        if hasattr(self._library, chain.newest):
            return None
        for symbol, call in chain.older:
            if hasattr(self._library, symbol):
                self._lacking[chain.newest] = symbol
                return partial(call, getattr(self._library, symbol))
        self._lacking[chain.newest] = ""
        return None
