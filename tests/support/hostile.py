"""Requests of which one field is as large as a limit allows: what the request path must answer all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nri_gpu._pb import nri_pb2 as pb
from tests.support import nri_messages as nri

Fill = Callable[[pb.PodSandbox, pb.Container, int], None]  # puts the entry of that number in


def _annotate(key: str, value: str = "") -> Fill:
    return lambda pod, _, number: pod.annotations.update({key.format(number): value})


def _variable(text: str) -> Fill:
    return lambda _, made, number: made.env.append(text.format(number))


def _device(path: str, major: int) -> Fill:
    return lambda _, made, number: made.linux.devices.append(
        pb.LinuxDevice(path=path.format(number), type="c", major=major, minor=number)
    )


def _rule(number: int) -> pb.LinuxDeviceCgroup:
    major, minor = pb.OptionalInt64(value=195), pb.OptionalInt64(value=number)
    return pb.LinuxDeviceCgroup(allow=True, type="c", major=major, minor=minor, access="rw")


ENTRIES: Final[dict[str, Fill]] = {
    "empty variables": _variable(""),
    "variables": _variable("N"),
    "requirements": _variable("NVIDIA_REQUIRE_{0}=cuda>={0}"),
    "one requirement again and again": _variable("NVIDIA_REQUIRE_A=cuda>={}"),
    "requirements without a value": _variable("NVIDIA_REQUIRE_"),
    "NVIDIA_VISIBLE_DEVICES again and again": _variable("NVIDIA_VISIBLE_DEVICES=x"),
    "NVIDIA_DRIVER_CAPABILITIES again and again": _variable("NVIDIA_DRIVER_CAPABILITIES=all,x"),
    "mounts": lambda _, made, number: made.mounts.append(pb.Mount(destination=f"/m{number}")),
    "empty mounts": lambda _, made, number: made.mounts.append(pb.Mount()),
    "hooks": lambda _, made, number: made.hooks.prestart.append(pb.Hook(path="/x/nvidia-ctk")),
    "devices": _device("/d{}", 1),
    "NVIDIA's devices": _device("/dev/nvidia{}", 195),
    "device rules": lambda _, made, number: made.linux.resources.devices.append(_rule(number)),
    "CDI devices": lambda _, made, number: made.CDI_devices.append(pb.CDIDevice(name="a")),
    "rlimits": lambda _, made, number: made.rlimits.append(pb.POSIXRlimit(type="a")),
    "namespaces": lambda _, made, number: made.linux.namespaces.append(pb.LinuxNamespace(type="a")),
    "arguments": lambda _, made, number: made.args.append("a"),
    "annotations on the container": lambda _, made, number: made.annotations.update({f"gpu.nri.io/{number}": ""}),
    "the kubelet's annotations": lambda _, made, n: made.annotations.update(
        {f"gpu.nri.io/kubelet.{n}": "v1;" + "x" * 40}
    ),
    "annotations": _annotate("{}"),
    "annotations of ours": _annotate("gpu.nri.io/container.{}", "1"),
    "labels": lambda pod, _, number: pod.labels.update({str(number): ""}),
}
TEXTS: Final = {"a long request": "device=0;", "a long list": "0,"}
FIELDS: Final = (*ENTRIES, *TEXTS)


def request(field: str, limit_bytes: int) -> bytes:
    """CreateContainer of a container that asks for a GPU, with as much of that field as goes below the limit."""
    if field in TEXTS:
        return _longer(TEXTS[field], limit_bytes)
    fill, sample = ENTRIES[field], 1_000
    each = (len(_made(fill, sample)) - len(_made(fill, 0))) / sample
    count = int(0.93 * limit_bytes / each)  # numbers grow
    while len(payload := _made(fill, count)) > limit_bytes:
        count = int(count * 0.97)
    return payload


def _made(fill: Fill, count: int) -> bytes:
    pod = nri.asking("1")
    made = nri.container(pod)
    for number in range(count):
        fill(pod, made, number)
    return nri.create(pod, made)


def _longer(text: str, limit_bytes: int) -> bytes:
    pod = nri.asking(text * ((limit_bytes - 2_000) // len(text)))
    return nri.create(pod, nri.container(pod))
