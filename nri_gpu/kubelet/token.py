"""The token: what the device plugin answers to the kubelet's Allocate, and what the NRI half finds on the container.

`v1;resource=nvidia.com/gpu;mode=exclusive;ids=GPU-…,GPU-…;mac=…`, one annotation for each resource. The request names
no pod, so neither can the token; the kubelet keeps it in its checkpoint and hands it out again at every restart of the
container, after a reboot too. So it is signed with a key that lives as long as that checkpoint, and says nothing that
ages: whether those GPUs are there and free is asked of the ledger, each time.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.allocation.grant import KEY_BYTES as KEY_BYTES
from nri_gpu.allocation.grant import signed_fields
from nri_gpu.domain.kubelet import AllocatedDevice, KubeletAllocation
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.system.storage import NotPrivateError, read_private

_FIELDS: Final = ("resource", "mode", "ids", "mac")
_MODES: Final = {"exclusive": False, "shared": True}
_CONTEXT: Final = b"nri-gpu kubelet token:"  # so that no other text signed with that key passes for a token
NOT_OURS: Final = (
    "its mac does not match, so it was not written by this node's device plugin: delete the pod to have the kubelet "
    "allocate anew"
)
NO_KEY: Final = (
    "the kubelet gave it GPUs, but nri-gpu runs without its kubelet half, or cannot read that half's key: start it "
    "with --kubelet (policy: kubelet.enabled), or delete the pod"
)


def token_key(resource: str) -> str:
    """The annotation's key for a resource."""
    return f"{KUBELET_KEY}.{resource.replace('/', '_')}"


def write_token(resource: str, ids: Sequence[str], key: bytes, *, shared: bool) -> str:
    """The annotation's value. ids: sorted, since the kubelet's order is none."""
    body = f"v1;resource={resource};mode={'shared' if shared else 'exclusive'};ids={','.join(sorted(ids))}"
    return f"{body};mac={_mac(body, key)}"


def read_tokens(annotations: Mapping[str, str], key: bytes | None) -> KubeletAllocation:
    """What all tokens on one container come to. key: None where there is none."""
    if key is None:
        return KubeletAllocation(fault=NO_KEY)
    devices: list[AllocatedDevice] = []
    modes: set[bool] = set()
    for name, text in sorted(annotations.items()):
        body, _, mac = text.rpartition(";mac=")
        if not hmac.compare_digest(mac.encode(errors="surrogatepass"), _mac(body, key).encode()):
            return KubeletAllocation(fault=NOT_OURS)
        fields = _fields(text)
        if fields is None or name != token_key(fields["resource"]):
            return KubeletAllocation(fault="it stands under another key, or is of another version: delete the pod")
        modes.add(_MODES[fields["mode"]])
        devices += [AllocatedDevice(fields["resource"], each) for each in fields["ids"].split(",") if each]
    if len(modes) != 1 or not devices:
        return KubeletAllocation(fault="it gives shared and other GPUs at once, or none: delete the pod")
    return KubeletAllocation(tuple(devices), modes.pop())


def _mac(body: str, key: bytes) -> str:
    return hmac.new(key, _CONTEXT + body.encode(errors="surrogatepass"), digestmod="sha256").hexdigest()


def _fields(text: str) -> Mapping[str, str] | None:
    fields = signed_fields(text, _FIELDS)
    return fields if fields and fields["mode"] in _MODES else None


KEY_FILE: Final = "nri-gpu.key"


class KeyKeeper:
    """Looks for the key whenever the folder may have come or been made anew. keyed: told each that is another one."""

    def __init__(self, folder: Path, keyed: Callable[[bytes], None]) -> None:
        self._folder = folder
        self._keyed = keyed
        self._key: bytes | None = None
        self._said = ""

    def look(self) -> None:
        """Now. That there is no folder is no fault yet: the kubelet makes it, and the endpoints say so."""
        try:
            key = tokens_key(self._folder, self._key)
        except FileNotFoundError:
            return
        except OSError as error:
            fault = f"key in {self._folder}: {error.strerror}; it is needed to sign what the kubelet is answered"
            if fault != self._said:
                logger.bind(fault=fault).warning("no device plugin yet")
            self._said = fault
            return
        if key != self._key:
            self._key, self._said = key, ""
            self._keyed(key)


def tokens_key(folder: Path, known: bytes | None = None) -> bytes:
    """The key, made when there is none. known: the one in use, kept where the folder was made anew. Raises: OSError."""
    file = folder / KEY_FILE
    try:
        if len(key := read_private(file, KEY_BYTES + 1)) == KEY_BYTES:
            return key
    except FileNotFoundError:
        pass
    except NotPrivateError:  # what others could read or write, they may have, and forge grants with it
        known = None
    fresh = file.with_name(f".{KEY_FILE}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(known or secrets.token_bytes(KEY_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)
    return file.read_bytes()
