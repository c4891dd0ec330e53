"""What the kernel enforces, read from its files: made here as a host of either cgroup version shows them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from nri_gpu.domain.errors import UnseenError
from nri_gpu.system.cgroups import Mounted, mounts_of
from nri_gpu.verify.bpf_program import READ, WRITE
from nri_gpu.verify.in_kernel import DeviceFilter, DeviceRule, Kernel, staged_by_mounts

ID = "0a1b2c3d"
ALLOW, DENY = (struct.pack("<BBhi", 0xB4, 0, 0, value) + struct.pack("<BBhi", 0x95, 0, 0, 0) for value in (1, 0))
CALLS = struct.pack("<BBhi", 0x85, 0, 0, 1)
GPU = (195, 1)


class Host:
    """A /proc and its cgroups in a folder, with process 7 in the container's cgroup."""

    def __init__(self, base: Path, cgroups: str, mounts: str, programs: Mapping[int, bytes | OSError] = {}) -> None:
        self.base = base
        self.asked: list[Path] = []
        self._programs = programs
        for pid in ("7", "self"):
            (base / pid).mkdir()
            (base / pid / "mountinfo").write_text(mounts.format(base=base))
        (base / "7" / "cgroup").write_text(cgroups)

    def list_devices(self, text: str) -> None:
        (self.base / "devices" / "pods" / ID).mkdir(parents=True)
        (self.base / "devices" / "pods" / ID / "devices.list").write_text(text)

    def kernel(self) -> Kernel:
        return Kernel(self.base, programs=self._ids, code=self._code)

    def filter(self) -> DeviceFilter:
        return self.kernel().device_filter(7, ID)

    def _ids(self, cgroup: Path) -> list[int]:
        self.asked.append(cgroup)
        return list(self._programs)

    def _code(self, program: int) -> bytes:
        found = self._programs[program]
        if isinstance(found, OSError):
            raise found
        return found


V1 = "30 1 0:26 / {base}/devices rw shared:9 - cgroup cgroup rw,devices\n"
V2 = "31 1 0:27 / {base}/unified rw - cgroup2 cgroup2 rw\n"
IN_V1, IN_V2 = f"5:cpu,devices:/pods/{ID}\n", f"0::/pods/{ID}\n"


@pytest.mark.parametrize(
    ("line", "access", "number", "expected"),
    [
        ("c 195:1 rw", READ | WRITE, GPU, True),
        ("c 195:1 r", READ, GPU, True),
        ("c 195:1 r", READ | WRITE, GPU, False),
        ("c 195:1 m", READ, GPU, False),
        ("c 195:* rw", WRITE, GPU, True),
        ("a *:* rwm", READ | WRITE, GPU, True),
        ("c 195:2 rw", READ, GPU, False),
        ("c 196:1 rw", READ, GPU, False),
        ("b 195:1 rw", READ, GPU, False),
    ],
)
def test_a_rule_of_cgroup_v1_is_read(line: str, access: int, number: tuple[int, int], expected: bool) -> None:
    assert DeviceRule.parse(line).lets_through(access, *number) is expected


def test_a_number_that_may_only_be_read_can_be_opened() -> None:
    assert DeviceFilter((DeviceRule.parse("c 195:1 r"),)).opens(GPU)
    assert DeviceFilter((DeviceRule.parse("c 195:1 w"),)).opens(GPU)
    assert not DeviceFilter((DeviceRule.parse("c 195:1 m"),)).opens(GPU)


def test_on_cgroup_v1_its_list_decides_alone(tmp_path: Path) -> None:
    host = Host(tmp_path, IN_V1 + IN_V2, V1)
    host.list_devices("c 1:3 rwm\nc 195:1 rw\n")
    assert (host.filter().opens(GPU), host.filter().opens((195, 2))) == (True, False)
    assert host.asked == []  # without a mounted cgroup2 nothing is attached to it


@pytest.mark.parametrize(
    ("programs", "expected"), [({}, True), ({4: ALLOW}, True), ({4: ALLOW, 5: DENY}, False), ({4: DENY}, False)]
)
def test_on_cgroup_v2_every_program_has_to_let_through(
    tmp_path: Path, programs: Mapping[int, bytes], expected: bool
) -> None:
    host = Host(tmp_path, IN_V2, V2, programs)
    assert host.filter().opens(GPU) is expected
    assert host.asked == [tmp_path / "unified" / "pods" / ID]


@pytest.mark.parametrize(("rules", "program"), [("c 195:1 rw", DENY), ("c 195:2 rw", ALLOW)])
def test_a_host_with_both_versions_asks_both(tmp_path: Path, rules: str, program: bytes) -> None:
    host = Host(tmp_path, IN_V1 + IN_V2, V1 + V2, {4: program})
    host.list_devices(f"{rules}\n")
    assert not host.filter().opens(GPU)


@pytest.mark.parametrize(
    ("cgroups", "mounts", "programs", "why", "denied"),
    [
        (IN_V2, V2, {4: PermissionError(1, "not permitted")}, "cannot be read: not permitted", True),
        (IN_V2, V2, {4: OSError("no bpf(2) on riscv64")}, "no bpf(2) on riscv64", False),
        (IN_V2, V2, {4: b""}, "hides the eBPF program", False),
        (IN_V2, V2, {4: CALLS}, "cannot be judged: it calls a function", False),
        (IN_V2, V2, {4: b"odd"}, "no whole instructions", False),
        (IN_V2, "", {}, "no hierarchy of cgroups", False),
        (IN_V1, "", {}, "cgroup v1 is not mounted", False),
        (IN_V1, V1, {}, "devices.list cannot be read: no such file", False),
        ("0::/other\n", V2, {}, "in no cgroup of this container", False),
        (f"0::/../{ID}\n", V2, {}, "run this on the host", False),
    ],
)
def test_what_cannot_be_seen(
    tmp_path: Path, cgroups: str, mounts: str, programs: Mapping[int, bytes | OSError], why: str, denied: bool
) -> None:
    with pytest.raises(UnseenError) as caught:
        Host(tmp_path, cgroups, mounts, programs).filter().opens(GPU)
    assert why in str(caught.value)
    assert caught.value.denied is denied


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UnseenError, match="no such file"):
        mounts_of(8, tmp_path)


def test_mountinfo_is_read_with_its_blanks() -> None:
    line = r"36 35 98:0 /mnt1 /a\040place rw,noatime shared:1 master:2 - ext4 /dev/root rw,errors=continue"
    found = Mounted.parse(line)
    assert found == Mounted("98:0", "/mnt1", "/a place", "ext4", frozenset({"rw", "errors=continue"}))


def test_a_hostile_name_in_mountinfo_is_one_line(tmp_path: Path) -> None:
    """The kernel escapes blanks and line breaks alone; to Python there are more characters that end a line."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "mountinfo").write_text("36 35 98:0 / /a\x0b\u2028\x1cb rw - tmpfs  rw\n")
    [found] = mounts_of(7, tmp_path)
    assert (found.place, found.kind) == ("/a\x0b\u2028\x1cb", "tmpfs")


STAGE = Path("/var/lib/nri-gpu/drivers")
ROOT = Mounted("8:1", "/", "/", "ext4", frozenset())
VAR = Mounted("8:2", "/@var", "/var", "btrfs", frozenset())
OWN = Mounted("8:3", "/", str(STAGE), "xfs", frozenset())  # the stage folder is a file system


@pytest.mark.parametrize(
    ("host", "inside", "expected"),
    [
        ([ROOT], [("8:1", "/var/lib/nri-gpu/drivers/580/all")], {"580"}),
        ([ROOT], [("8:2", "/var/lib/nri-gpu/drivers/580/all")], set()),
        (
            [ROOT, VAR],
            [("8:2", "/@var/lib/nri-gpu/drivers/580"), ("8:2", "/@var/lib/nri-gpu/drivers/570/x")],
            {"580", "570"},
        ),
        ([ROOT, VAR], [("8:1", "/var/lib/nri-gpu/drivers/580")], set()),
        ([ROOT], [("8:1", "/var/lib/nri-gpu/drivers-old/580")], set()),
        ([ROOT, OWN], [("8:3", "/580/all"), ("8:1", "/var/lib/nri-gpu/drivers/570")], {"580"}),
        ([], [("8:1", "/var/lib/nri-gpu/drivers/580")], set()),
    ],
)
def test_driver_files_among_mounts(host: list[Mounted], inside: list[tuple[str, str]], expected: set[str]) -> None:
    mounts = [Mounted(device, root, "/usr/local/nvidia", "ext4", frozenset()) for device, root in inside]
    assert staged_by_mounts(STAGE, host, mounts) == expected
