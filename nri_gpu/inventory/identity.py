"""What a GPU's UUID, PCI bus id and model, and a MIG device's UUID and profile look like, whoever wrote them down."""

from __future__ import annotations

import re
from typing import Final

from nri_gpu.domain.gpu import MIG_PROFILE, GpuUuid, PciBusId

_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MIG_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VERSION: Final = re.compile(r"\d{1,5}(?:\.\d{1,5}){1,2}")
_MODULE_VERSION: Final = re.compile(r"[0-9A-Za-z._+-]{0,64}")
_CLUSTER: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BUS_ID: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
# Nodes below /dev/dri that programs open; a card's folder in sysfs holds its connectors too.
DRM_NAME: Final = re.compile(r"(?:card|renderD)[0-9]{1,5}")

MODEL_MAX: Final = 96  # characters; NVML's own buffer (NVML_DEVICE_NAME_V2_BUFFER_SIZE)


def parse_uuid(text: str) -> GpuUuid:
    """A whole GPU's UUID.

    Raises: ValueError.
    """
    if not _UUID.fullmatch(text):
        raise ValueError(f"{text!r} is not a GPU UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return GpuUuid(text)


def parse_mig_uuid(text: str) -> GpuUuid:
    """A MIG device's UUID, as drivers from 470 on write it.

    Raises: ValueError.
    """
    if not _MIG_UUID.fullmatch(text):
        raise ValueError(f"{text!r} is not a MIG UUID (MIG-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return GpuUuid(text)


def parse_profile(text: str) -> str:
    """A MIG profile.

    Raises: ValueError.
    """
    if not MIG_PROFILE.fullmatch(text):
        raise ValueError(f"{text!r} is not a MIG profile (1g.10gb, 1c.3g.40gb, 1g.10gb+me)")
    return text


def profile_in(name: str) -> str:
    """The profile in a MIG device's name, `NVIDIA A100-SXM4-40GB MIG 1g.5gb`; empty where it has none."""
    last = name.rpartition(" MIG ")[2].lower()
    return last if " MIG " in name and MIG_PROFILE.fullmatch(last) else ""


def parse_bus_id(text: str) -> PciBusId:
    """A PCI address, lower case, its domain of 4 digits where it fits: NVML writes 8 and upper case.

    Raises: ValueError.
    """
    match = _BUS_ID.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a PCI bus id (0000:3b:00.0)")
    domain, bus, device, function = match.groups()
    return PciBusId(f"{int(domain, 16):04x}:{bus}:{device}.{function}")


def parse_model(text: str) -> str:
    """A model name, which ends in tables, logs and globs.

    Raises: ValueError.
    """
    if not text or len(text) > MODEL_MAX or any(not " " <= letter <= "~" for letter in text):
        raise ValueError(f"{text[:MODEL_MAX]!r} is not a model name (1 to {MODEL_MAX} printable ASCII characters)")
    return text


def parse_drm_name(text: str) -> str:
    """The name of a node below /dev/dri. Raises: ValueError."""
    if not DRM_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is neither card0 nor renderD128 nor the like")
    return text


def parse_version(text: str) -> str:
    """A driver's or CUDA's version; empty: not known. Raises: ValueError."""
    if text and not _VERSION.fullmatch(text):
        raise ValueError(f"{text!r} is not a version (580.95.05)")
    return text


def parse_module_version(text: str) -> str:
    """A kernel module's version, as its author wrote it; empty: not known. Raises: ValueError."""
    if not _MODULE_VERSION.fullmatch(text):
        raise ValueError(f"{text[:64]!r} is not a module's version (580.95.05)")
    return text


def parse_cluster(text: str) -> str:
    """An NVLink fabric's cluster UUID; empty: not known. Raises: ValueError."""
    if text and not _CLUSTER.fullmatch(text):
        raise ValueError(f"{text[:64]!r} is not a cluster UUID (xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)")
    return text
