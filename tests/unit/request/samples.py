"""Annotations that are understood, and those that are refused with where and why."""

from __future__ import annotations

from typing import Any

from nri_gpu.domain.edits import Extra, Extras
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.gpu_request import (
    ArchSelector,
    Claim,
    Count,
    Devices,
    Everything,
    MemorySelector,
    MigProfile,
    MigProfiles,
    Mode,
    ModelSelector,
    Nothing,
    Operator,
)
from nri_gpu.domain.mps import MpsLimits
from nri_gpu.request.annotation import VALUE_MAX

KEY = "gpu.nri.io/pod"
UUID = "GPU-8f3a1b2c-0001-4abc-8def-0123456789ab"
AT_LEAST = Operator.AT_LEAST


def claim(text: str, **parts: Any) -> Claim:  # noqa: ANN401 - any of a claim's fields
    return Claim(key=KEY, text=text, **{"wanted": Count(1), **parts})


GOOD: dict[str, Claim] = {
    "all": claim("all", wanted=Everything()),
    "none": claim("none", wanted=Nothing()),
    "count": claim("count=2", wanted=Count(2)),
    "blanks around everything": claim(" \tcount = 2 ; mode= shared\t", wanted=Count(2), mode=Mode.SHARED),
    "and blanks may follow it": claim("2 ; ", wanted=Count(2)),
    "uuid in upper case": claim(f"device=GPU-{UUID[4:].upper()}", wanted=Devices((UUID,))),
    "beginning that ends in a dash": claim("device=GPU-8f3a1b2c-", wanted=Devices(("GPU-8f3a1b2c-",))),
    "bus id": claim("device=0000:3b:00.0", wanted=Devices(("0000:3b:00.0",))),
    "bus id as nvml prints it": claim("device=00000000:3B:00.0", wanted=Devices(("0000:3b:00.0",))),
    "bus id in a long domain": claim("device=00010000:3B:00.0", wanted=Devices(("10000:3b:00.0",))),
    "bus id as the kernel and we print that": claim("device=10000:3b:00.0", wanted=Devices(("10000:3b:00.0",))),
    "bus id with every digit": claim("device=fffe0001:3b:00.0", wanted=Devices(("fffe0001:3b:00.0",))),
    "every capability": claim(
        "1;capabilities=compute,utility,video,graphics,display,ngx,compat32", capabilities=frozenset(Capability)
    ),
    "model with blanks inside": claim("model=NVIDIA H100 80GB*", selectors=(ModelSelector("NVIDIA H100 80GB*"),)),
    "model with an equals sign inside": claim("model=a=b", selectors=(ModelSelector("a=b"),)),
    "mig with numbers": claim(
        "mig = 1g.10gb : 2 , 1c.3g.40gb+me.all",
        wanted=MigProfiles((MigProfile("1g.10gb", 2), MigProfile("1c.3g.40gb+me.all", 1))),
    ),
    "mig devices by name": claim("device=0:1,MIG-8F3A,2", wanted=Devices(("0:1", "MIG-8f3a", "2"))),
    "memory in Gi": claim("memory>=40Gi", selectors=(MemorySelector(AT_LEAST, 40 * 2**30),)),
    "memory in bytes": claim("memory<=5", selectors=(MemorySelector(Operator.AT_MOST, 5),)),
    "memory above": claim("memory > 1K", selectors=(MemorySelector(Operator.ABOVE, 1000),)),
    "memory below": claim("memory<1M", selectors=(MemorySelector(Operator.BELOW, 10**6),)),
    "memory exactly": claim("memory=80G", selectors=(MemorySelector(Operator.EQUAL, 80 * 10**9),)),
    "arch of two digits": claim("arch=12.1", selectors=(ArchSelector(Operator.EQUAL, (12, 1)),)),
    "selectors in their order": claim(
        "arch<9.0;2;memory>=40Gi",
        wanted=Count(2),
        selectors=(ArchSelector(Operator.BELOW, (9, 0)), MemorySelector(AT_LEAST, 40 * 2**30)),
    ),
    "extras, with blanks": claim("1; extras = rdma , gds", extras=Extras(frozenset({Extra.RDMA, Extra.GDS}))),
    "channels in any order": claim(
        "1;extras=imex:7,drm, imex : 2", extras=Extras(frozenset({Extra.DRM, Extra.IMEX}), (2, 7))
    ),
    "none but a former one": claim("1;extras= profile ", extras=Extras(ignored=("profile",))),
    "a former one": claim("1;extras=profile,drm", extras=Extras(frozenset({Extra.DRM}), ignored=("profile",))),
    "the last channel": claim("1;extras=imex:1048575", extras=Extras(frozenset({Extra.IMEX}), (1048575,))),
    "sharing": claim("1;mode=mps;sharing=memory:10Gi,threads:50", mode=Mode.MPS, sharing=MpsLimits(10240, 50)),
    "sharing with blanks": claim("1;mode=mps;sharing= threads : 1 ", mode=Mode.MPS, sharing=MpsLimits(0, 1)),
    "sharing in Mi": claim("1;mode=mps;sharing=memory:1Mi", mode=Mode.MPS, sharing=MpsLimits(1, 0)),
}


EXTRAS = "drm, gds, gdrcopy, rdma, nvswitch, imex:N, persistenced, fabricmanager, firmware, mig-config"
# name -> value, 0-based position, words of the sentence
BAD: dict[str, tuple[str, int, str]] = {
    "empty": ("", 0, "the value is empty"),
    "clause missing at the start": (";2", 0, "a clause is missing"),
    "clause missing in the middle": ("2;;mode=shared", 2, "a clause is missing"),
    "zero": ("0", 0, "write none"),
    "leading zero": ("02", 0, "without sign or leading zeros"),
    "too many": ("129", 0, "at most 128"),
    "a list without device": ("0,1", 0, "write device=0,1"),
    "a bus id without device": ("0000:3b:00.0", 0, "write device=0000:3b:00.0"),
    "upper case word": ("ALL", 0, "must be in lower case: all"),
    "unknown word": ("everything", 0, "known: all, none, a number, count, device"),
    "letters swapped": ("mdoe=shared", 0, 'did you mean "mode"?'),
    "what others call it": ("gpus=2", 0, 'did you mean "count"?'),
    "colon for equals": ("device:0", 0, 'did you mean "device"?'),
    "a mode by itself": ("1;shared", 2, "write mode=shared"),
    "a key by itself": ("device", 0, "needs a value, such as device=0,1"),
    "a key with nothing behind": ("1; mode = ", 9, "needs a value, such as mode=shared"),
    "all with a value": ("all=1", 0, "takes no value"),
    "wrong way round": ("memory=>40Gi", 6, "it takes: >=, <=, >, <, ="),
    "an order where there is none": ("mode>=shared", 4, "it takes: ="),
    "key twice": ("count=1;count=1", 8, "count is given twice"),
    "all and none": ("all;none", 4, "exclude one another"),
    "none and a mode": ("none;mode=shared", 5, "stands alone"),
    "how without which": ("mode=shared", 0, "only how GPUs are used"),
    "device twice": ("device=0,0", 9, "named twice"),
    "device twice in two spellings": ("device=0000:3b:00.0,00000000:3B:00.0", 20, "named twice"),
    "device missing": ("device=0,,1", 9, "a GPU is missing"),
    "device all": ("device=all", 7, "write all by itself"),
    "index with a leading zero": ("device=00", 7, "without leading zeros"),
    "uuid too short": ("device=GPU-8f3", 7, "is too short"),
    "uuid with a misplaced dash": ("device=GPU-8f3a-1b2c", 7, "is not a UUID"),
    "uuid in small letters": ("device=gpu-8f3a", 7, "GPU- in capitals"),
    "mig uuid as a path": ("device=MIG-../../etc", 7, "is not a UUID: MIG- and"),
    "mig uuid without device": ("MIG-8f3a", 0, "write device=MIG-8f3a"),
    "mig name of old": (f"device=MIG-{UUID}/1/0", 7, "write 0:1"),
    "mig index without device": ("0:1", 0, "write device=0:1"),
    "mig index without the gpu's": ("device=:1", 7, "such as 0:1"),
    "mig index with a leading zero": ("device=0:01", 7, "such as 0:1"),
    "bus id without domain": ("device=3b:00.0", 7, "write 0000:3b:00.0"),
    "cdi name": ("device=nvidia.com/gpu=0", 7, "does not name a GPU"),
    "too many devices": ("device=" + ",".join(str(n) for n in range(129)), 409, "at most 128"),
    "unknown mode": ("1;mode=private", 7, "known: exclusive, shared"),
    "unknown capability": ("1;capabilities=compute,evil", 23, "known: compute, utility"),
    "all capabilities": ("1;capabilities=all", 15, '"all" is not accepted'),
    "capability twice": ("1;capabilities=compute,compute", 23, "named twice"),
    "several models": ("model=*H100*,*A100*", 12, "one glob only"),
    "long glob": ("model=" + "*" * 65, 6, "over the limit of 64"),
    "memory in GB": ("memory>=40GB", 8, "is not a size"),
    "more memory than there is": ("memory>=999999999999Ti", 8, "more memory than any GPU has"),
    "arch without a dot": ("arch>=9", 6, "write major.minor"),
    "mig by itself": ("mig", 0, "needs a value, such as mig=1g.10gb:2"),
    "mig and device": ("device=0;mig=1g.10gb", 9, "exclude one another"),
    "mig profile of nothing": ("mig=1g.10gb,", 12, "is not a MIG profile"),
    "mig profile twice": ("mig=1g.10gb,1g.10gb", 12, "write 1g.10gb:2"),
    "mig of none": ("mig=1g.10gb:0", 12, "are no request"),
    "mig of how many": ("mig=1g.10gb:", 12, "is not a number"),
    "mig of too many": ("mig=1g.10gb:128,2g.20gb", 16, "at most 128 MIG devices"),
    "unknown extra": ("1;extras=frob", 9, f'unknown extra "frob", known: {EXTRAS}, mig-monitor'),
    "nearly an extra": ("1;extras=drm,gdrcpy", 13, 'did you mean "gdrcopy"?'),
    "an extra as NVIDIA calls it": ("1;extras=mofed", 9, 'did you mean "rdma"?'),
    "all extras": ("1;extras=all", 9, '"all" is not accepted'),
    "extra twice": ("1;extras=rdma,drm,rdma", 18, '"rdma" is named twice'),
    "no extra between": ("1;extras=drm,,gds", 13, "an extra is missing here"),
    "a number where none goes": ("1;extras=drm:1", 9, '"drm" takes no number'),
    "no channel": ("1;extras=imex", 9, "names no IMEX channel: write imex:N, with N from 0 to 1048575"),
    "channel too high": ("1;extras=imex:1048576", 9, "names no IMEX channel"),
    "channel twice": ("1;extras=imex:3,imex:3", 16, '"imex:3" is named twice'),
    "memory of GPUs in G": ("1;mode=mps;sharing=memory:10G", 26, '"10G" is not a share of memory'),
    "less than a Mi": ("1;mode=mps;sharing=memory:1Ki", 26, '"1Ki" is not a whole number of Mi'),
    "no memory": ("1;mode=mps;sharing=memory:0Gi", 26, "write a whole number with Ki, Mi or Gi"),
    "memory of no GPU": ("1;mode=mps;sharing=memory:9999999Gi", 26, "that a GPU could have"),
    "too many threads": ("1;mode=mps;sharing=threads:101", 27, "write a percentage from 1 to 100"),
    "share without a value": ("1;mode=mps;sharing=threads", 19, '"threads" needs a value'),
    "unknown share": (
        "1;mode=mps;sharing=thread:5",
        19,
        'unknown share "thread", known: memory:10Gi, threads:50 (did you mean "threads"?)',
    ),
    "share twice": ("1;mode=mps;sharing=threads:5,threads:5", 29, '"threads" is named twice'),
    "share of another mode": ("1;mode=shared;sharing=threads:5", 14, '"sharing" goes with mode=mps only'),
    "share of the default mode": ("1;sharing=threads:5", 2, '"sharing" goes with mode=mps only'),
    "line break": ("0\n1", 1, "a line break is not allowed"),
    "escape sequence": ("\x1b[31m2", 0, "is not allowed"),
    "too long": ("," * (VALUE_MAX + 1), VALUE_MAX, "over the limit of 4096"),
}
