"""Whatever the kernel, or what is mounted over its files, shows: it is read or skipped, or is an error that says so.

An input is the name of a file and its content. programs: eBPF instructions. Files of /proc about a process are partly
that process's own texts: its name, its cgroup, its mounts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from nri_gpu.domain.errors import UnseenError
from nri_gpu.driver.elf import parse_elf
from nri_gpu.host.kernel_view import HostFolders, gpus_on_the_bus, host_majors, numa_nodes, unlisted_gpus
from nri_gpu.host.modules import CAP_MINOR_MAX, majors_by_name, read_mig_minors
from nri_gpu.observe.bundles import found_containers
from nri_gpu.observe.container_seen import Numbers, seen_container
from nri_gpu.observe.looks import Line
from nri_gpu.system.cgroups import mounts_of
from nri_gpu.verify.bpf_program import READ, WRITE, lets_through, parse_program
from nri_gpu.verify.in_kernel import Kernel
from nri_gpu.verify.oci_bundles import TASKS, read_bundles
from tests.fuzz.target import Target, chosen, named, scratch, words, written
from tests.support.builders import gpu

FOLDER: Final = scratch()
FOLDERS: Final = HostFolders(proc=FOLDER, sys=FOLDER / "sys", dev=FOLDER / "dev")
BUS_ID: Final = "0000:3b:00.0"
MOUNTINFO: Final = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
CGROUPS: Final = (
    b"30 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    b"31 30 0:27 / %b rw - cgroup cgroup rw,devices\n" % str(FOLDER).encode()
)


def devices(data: bytes) -> bool:
    written(data, FOLDER, "devices")
    majors_by_name(data.decode(errors="replace"))
    return host_majors(FOLDER).nvidia is not None


def mig_minors(data: bytes) -> bool:
    found = read_mig_minors(data.decode(errors="replace"))
    assert all(0 <= minor <= CAP_MINOR_MAX for minor in found.values())
    return bool(found)


def mountinfo(data: bytes) -> bool:
    written(data, FOLDER, "self", "mountinfo")
    try:
        return bool(mounts_of("self", FOLDER))
    except UnseenError:
        return False


def cgroup(data: bytes) -> bool:
    """The cgroups of a process, then an empty line, then devices.list."""
    one, _, rules = data.partition(b"\n\n")
    written(CGROUPS, FOLDER, "self", "mountinfo")
    written(one, FOLDER, "7", "cgroup")
    written(rules, FOLDER, "abc", "devices.list")
    try:
        Kernel(FOLDER, programs=lambda _: (), code=lambda _: b"").device_filter(7, "abc").opens((195, 0))
    except UnseenError:
        return False
    return True


def information(data: bytes) -> bool:
    written(data, FOLDER, "driver", "nvidia", "gpus", BUS_ID, "information")
    written(b"0x10de\n", FOLDER, "sys", "bus", "pci", "devices", BUS_ID, "vendor")
    with suppress(FileExistsError):
        (FOLDERS.sys / "bus" / "pci" / "devices" / BUS_ID / "driver").symlink_to("nvidia")
    written(b"0x030200\n", FOLDER, "sys", "bus", "pci", "devices", BUS_ID, "class")
    assert len(list(gpus_on_the_bus(FOLDERS.sys))) == 1
    (found,) = unlisted_gpus(FOLDERS, ())
    return bool(found.uuid or found.model)


def numa(data: bytes) -> bool:
    cpus, _, meminfo = data.partition(b"\n\n")
    written(cpus, FOLDER, "sys", "devices", "system", "node", "node0", "cpulist")
    written(meminfo, FOLDER, "sys", "devices", "system", "node", "node0", "meminfo")
    return bool(numa_nodes([gpu(0, numa_node=0)], FOLDERS.sys))


def program(data: bytes) -> bool:
    try:
        code = parse_program(data)
        for access, number in ((READ, (195, 0)), (WRITE, (2**20, 2**32 - 1)), (READ | WRITE, (0, 0))):
            assert lets_through(code, access, *number) in (True, False)
    except UnseenError:
        return False
    return True


def bundle(data: bytes) -> bool:
    """A container's config.json, whose annotations and environment are its author's."""
    below = (TASKS, "k8s.io", "abc")
    written(data, FOLDER, "containerd", *below, "config.json")
    written(b"7", FOLDER, "containerd", *below, "init.pid")
    (found,) = read_bundles([FOLDER / "containerd"], variables={"A"})
    if found.fault:
        return False
    spec = found.spec
    return bool([found.name, found.pod, spec.privileged, spec.opens((195, 0)), spec.nodes, spec.env, spec.nvidia_hooks])


def docker(data: bytes) -> bool:
    """Docker's config.v2.json and hostconfig.json of a container, with an empty line between."""
    config, _, host = data.partition(b"\n\n")
    bundle, details = FOLDER / "run/containerd" / TASKS / "moby" / "abc", FOLDER / "var/lib/docker/containers/abc"
    written(
        b'{"linux": {"devices": [{"path": "/dev/x", "type": "c", "major": 195, "minor": 0}]}}', bundle, "config.json"
    )
    written(b"7", bundle, "init.pid")
    written(config, details, "config.v2.json")
    written(host, details, "hostconfig.json")
    (found,), unseen = found_containers((), FOLDER)
    seen = seen_container(found, None, "", Numbers([195], ()))
    assert seen
    assert not unseen
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Line) == seen
    return not seen.fault


def elf(data: bytes) -> bool:
    (FOLDER / "elf").write_bytes(data)
    with (FOLDER / "elf").open("rb") as file:
        return parse_elf(file) is not None


READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "devices": devices,
    "mig-minors": mig_minors,
    "mountinfo": mountinfo,
    "cgroup": cgroup,
    "information": information,
    "numa": numa,
    "program": program,
    "bundle": bundle,
    "docker": docker,
    "elf": elf,
}
RETURNS_1: Final = struct.pack("<BBhi", 0xB7, 0, 0, 1) + struct.pack("<BBhi", 0x95, 0, 0, 0)
KERNEL: Final = Target(
    chosen(READERS),
    good=[
        *named(
            "devices",
            "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n509 nvidia-uvm\n\nBlock devices:\n  8 sd\n",
        ),
        *named("mig-minors", "gpu0/gi0/access 3\nconfig 1\n"),
        *named("mountinfo", MOUNTINFO, CGROUPS),
        *named("cgroup", "4:devices:/abc\n\nc 195:0 rw\na *:* rwm\n"),
        *named(
            "information",
            "Model: \t NVIDIA A100\nGPU UUID: \t GPU-0a100004-0000-4000-8000-000000000000\nDevice Minor: \t 0\n",
        ),
        *named("numa", "0-15,32-47\n\nNode 0 MemTotal:  131072 kB\n"),
        *named("program", RETURNS_1),
        *named(
            "bundle", '{"process": {"env": ["A=b"]}, "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c"}]}}'
        ),
        *named(
            "docker",
            '{"Name": "/a"}\n\n{"DeviceRequests": [{"Driver": "cdi", "Count": 1, "DeviceIDs": ["nvidia.com/gpu=0"]}]}',
            '{}\n\n{"DeviceRequests": null}',
        ),
    ],
    bad=[
        *(each for name in READERS if name not in ("bundle", "numa") for each in named(name, b"", b"\xff\0\n")),
        *named("mountinfo", "36 35"),
        *named("cgroup", "4:devices:/abc\n\nc 195 rw", "x\n\n", "4:devices:/abc\n\nc x:y rw"),
        *named("program", b"\x05\0\xff\xff\0\0\0\0", b"\xff" * 8),
        *named("docker", '{"Name": 1}', '{"Name": "/a"}\n\n{"DeviceRequests": [1]}', "[" * 2000),
        *named("bundle", "", "[" * 2000, "\xff", '{"process": {"env": [1]}}'),
    ],
    pieces=(
        *READERS,
        *words(
            'nvidia-frontend nvidia-caps MemTotal: kB 0- 0::/abc devices.list "hooks": "resources": "allow": "major":'
        ),
        *words('"Name": "DeviceRequests": "Driver": "DeviceIDs": "Count": "cdi" null'),
        *("Character devices:", "/access ", "," * 50, "null", "1e400"),
        *(" - cgroup cgroup rw,devices", " - cgroup2 x rw", "\\040", "c 195:* rwm", "b *:* m", "9" * 5000),
        *("GPU Excluded: Yes", "Device Minor:", "[" * 2000),
        *(
            struct.pack("<BBhi", opcode, 0x12, 1, -1)
            for opcode in (0x07, 0x67, 0xC7, 0x15, 0x06, 0x61, 0x18, 0x85, 0x95, 0xBC)
        ),
    ),
    bytes_max=4000,
)
TARGETS: Final = {"kernel": KERNEL}
