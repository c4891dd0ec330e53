"""The tokens and the CDI device with which our device plugin answers Allocate, and which the NRI plugin finds again.

A token is an annotation for each resource, `v1;resource=nvidia.com/gpu;mode=exclusive;ids=GPU-…,GPU-…;mac=…`. Allocate
names no pod, so a token cannot either. The kubelet keeps it in its checkpoint and sets it again at every restart of the
container, after a reboot too. So it is signed with a key that lives as long as that checkpoint, and says nothing that
changes: whether the GPUs are there and free is asked of the ledger, each time.

The required CDI device keeps the container from starting until our reply undoes it (docs/guard.md). Its specification
never changes, so a runtime finds the same specification whichever version of nri-gpu wrote it, and while none runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nri_gpu.cdi.spec_file import SpecFile, SpecFileError
from nri_gpu.cdi.specification import VERSION, mount_json
from nri_gpu.domain.allocation import (
    REQUIRED_DESTINATION,
    REQUIRED_KIND,
    REQUIRED_NAME,
    REQUIRED_SOURCE,
    Allocated,
    AllocatedDevice,
    AllocationInvalid,
)
from nri_gpu.domain.edits import Mount
from nri_gpu.domain.errors import cause_of
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.ledger.grant_text import has_mac, mac_of, signed_fields
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet_settings import FailClosed, KubeletSettings
from nri_gpu.system.storage import KeyLengthError, NotPrivateError, make_key, read_key
from nri_gpu.system.tasks import LogOnce

KEY_FILE: Final = "nri-gpu.key"
NOT_OURS: Final = (
    "its mac does not match, so it was not written by this node's device plugin: delete the pod to have the kubelet "
    "allocate again"
)
NO_KEY: Final = (
    "the kubelet allocated GPUs to it, but nri-gpu runs without its device plugin, or cannot read its key: start it "
    "with --kubelet (policy: kubelet.enabled), or delete the pod"
)
_FIELDS: Final = ("resource", "mode", "ids", "mac")
_MODES: Final = {"exclusive": False, "shared": True}
_CONTEXT: Final = b"nri-gpu kubelet token:"


FILE_NAME: Final = "nri-gpu-required.json"
_MOUNT: Final = mount_json(Mount(REQUIRED_DESTINATION, REQUIRED_SOURCE, ("bind", "ro")))
SPECIFICATION: Final = json.dumps(
    {
        "cdiVersion": VERSION,
        "kind": REQUIRED_KIND,
        "devices": [{"name": REQUIRED_NAME, "containerEdits": {"mounts": [_MOUNT]}}],
    }
)
NO_RUNTIME: Final = "no runtime is connected yet"
TOO_OLD: Final = "the runtime speaks NRI 0.6 or older, where a reply cannot remove a mount"


def token_key(resource: str) -> str:
    return f"{KUBELET_KEY}.{resource.replace('/', '_')}"


def write_token(resource: str, ids: Sequence[str], key: bytes, *, shared: bool) -> str:
    """Write the annotation's value, with the IDs sorted, since the kubelet's order is random."""
    body = f"v1;resource={resource};mode={'shared' if shared else 'exclusive'};ids={','.join(sorted(ids))}"
    return f"{body};mac={mac_of(body, key, _CONTEXT)}"


def read_tokens(annotations: Mapping[str, str], key: bytes | None) -> Allocated | AllocationInvalid:
    """Read the allocation that all tokens of a container add up to. key: of the tokens; None while there is no key."""
    if key is None:
        return AllocationInvalid(NO_KEY)
    devices: list[AllocatedDevice] = []
    modes: set[bool] = set()
    for name, text in sorted(annotations.items()):
        if not has_mac(text, key, _CONTEXT):
            return AllocationInvalid(NOT_OURS)
        fields = signed_fields(text, _FIELDS)
        if not fields or fields["mode"] not in _MODES or name != token_key(fields["resource"]):
            return AllocationInvalid("it has another annotation's key, or another version: delete the pod")
        modes.add(_MODES[fields["mode"]])
        devices += [AllocatedDevice(fields["resource"], each) for each in fields["ids"].split(",") if each]
    if len(modes) != 1 or not devices:
        return AllocationInvalid("it names shared and unshared GPUs at once, or none: delete the pod")
    return Allocated(tuple(devices), modes.pop())


class TokenKey:
    """The key in the kubelet's folder for device plugins, read again whenever the folder may have been made anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: bytes | None = None
        self._log = LogOnce()

    def look(self) -> bytes | None:
        """Return the key if it is new since the last look. A missing folder is no fault: the kubelet makes it."""
        try:
            key = self._read()
        except FileNotFoundError:
            return None
        except OSError as error:
            fault = f"key in {self._folder}: {cause_of(error)}; answers to the kubelet cannot be signed without it"
            self._log.warning("device plugin not started yet", fault)
            return None
        if key == self._key:
            return None
        self._key = key
        self._log.clear()
        return key

    def _read(self) -> bytes:
        """Read the key in the folder. Where it has none, make a key, or write the key in use again. Raises: OSError."""
        file, known = self._folder / KEY_FILE, self._key
        try:
            return read_key(file)
        except (FileNotFoundError, KeyLengthError):
            pass
        except NotPrivateError:  # somebody else may have read or written it, and could forge tokens with it
            known = None
        return make_key(file, known)


class RequiredDevice:
    """The required CDI device: whether Allocate may answer it, and its specification on disk."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._file = SpecFile(Path(settings.cdi_dir) / FILE_NAME)
        self._wanted = settings.fail_closed is FailClosed.AUTO
        self._runtime_fault = NO_RUNTIME
        self._log = LogOnce()

    def configured(self, configured: Configured) -> None:
        self._runtime_fault = "" if configured.from_nri_0_7 else TOO_OLD

    def write(self) -> None:
        """Write the specification if it is wanted and not there. A failure is logged, and `fault` returns it."""
        if not self._wanted:
            return
        try:
            self._file.write(SPECIFICATION)
        except SpecFileError as error:
            self._log.warning("required CDI device not written, containers can start without nri-gpu", str(error))
        else:
            self._log.clear()

    def name(self) -> str:
        """Return the device's qualified name for an Allocate now; empty where it must not be answered."""
        if not self.fault():
            self.write()
        return "" if self.fault() else f"{REQUIRED_KIND}={REQUIRED_NAME}"

    def fault(self) -> str:
        """Return why the device protects no container, so that only the guard stops those we never saw; or empty."""
        return self._runtime_fault or self._log.fault if self._wanted else 'kubelet.fail_closed = "guard" in the policy'
