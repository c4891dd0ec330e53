"""What a container asks for that the kubelet gave GPUs to: those, shaped by what its pod's annotation says besides."""

from __future__ import annotations

from msgspec.structs import replace

from nri_gpu.domain.claim import Claim, Count, Devices, Everything, Mode, Nothing
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.kubelet import KubeletGrant


def claim_of_kubelet(given: KubeletGrant, said: Claim | None) -> Claim:
    """said: the annotation's claim, None where there is none.

    Raises:
        RequestError: what stands on the container does not hold, or the annotation asks for what was not given.

    """
    if given.fault:
        raise RequestError(given.key, given.fault)
    if not given.devices:
        return said or Claim(key=given.key, text="", wanted=Nothing())
    mode = Mode.SHARED if given.shared else Mode.EXCLUSIVE
    wanted = Devices(tuple(given.uuids))
    if said is None:
        return Claim(key=given.key, text=",".join(given.uuids), wanted=wanted, mode=mode, kubelet=True)
    if isinstance(said.wanted, Nothing):
        return said
    _check(given, said, mode)
    return replace(said, wanted=wanted, mode=mode, kubelet=True)


def _check(given: KubeletGrant, said: Claim, mode: Mode) -> None:
    """It may only shape: how many and which is the kubelet's word, since the scheduler counts by it."""
    number = len(given.uuids)
    if isinstance(said.wanted, Count) and said.wanted.gpus > number:
        why = f"asks for {said.wanted.gpus} GPUs and the kubelet gave {number}: ask for as many in resources.limits"
        raise RequestError(said.key, why)
    if not isinstance(said.wanted, Count | Everything):
        why = "names GPUs, and which ones is the kubelet's to say here: write all, which means those that it gave"
        raise RequestError(said.key, why)
    if said.mode not in (None, mode):
        why = f"asks for mode={said.mode}, and the kubelet gave in {mode} mode: ask for another resource in its limits"
        raise RequestError(said.key, why)
