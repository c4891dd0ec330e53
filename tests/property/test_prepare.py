"""Laws, on real nodes: whatever lies in /dev, preparing leaves nothing to do, and touches only what it may."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nri_gpu.host.actions import make_plan
from nri_gpu.host.make_nodes import actor, prepare
from tests.unit.host.host_tree import CAPS, NVIDIA, UVM, HostTree, host_below, params

NODES = {
    "nvidiactl": (NVIDIA, 255),
    "nvidia0": (NVIDIA, 0),
    "nvidia1": (NVIDIA, 1),
    "nvidia7": (NVIDIA, 7),  # of a GPU that is not there
    "nvidia-modeset": (NVIDIA, 254),
    "nvidia-uvm": (UVM, 0),
    "nvidia-uvm-tools": (UVM, 1),
    "nvidia-caps/nvidia-cap12": (CAPS, 12),
    "nvidia-caps/nvidia-cap13": (CAPS, 13),
}
STATES = ("absent", "good", "wrong number", "wrong mode", "wrong owner", "file", "link", "folder")
LINK_STATES = ("absent", "good", "absolute", "elsewhere", "file")

hosts = st.fixed_dictionaries(
    {
        "nodes": st.fixed_dictionaries({path: st.sampled_from(STATES) for path in NODES}),
        "links": st.fixed_dictionaries({path: st.sampled_from(LINK_STATES) for path in NODES}),
        "modify": st.sampled_from((1, 1, 1, 0)),
        "mode": st.sampled_from((0o666, 0o660, 0o600, 666)),
        "gid": st.sampled_from((0, 44)),
        "loaded": st.sampled_from((True, True, True, False)),
        "graphics": st.booleans(),
        "mig": st.booleans(),
    }
)


def build(host: HostTree, given_host: dict[str, object]) -> HostTree:
    if given_host["loaded"]:
        host.loaded()
    if given_host["mig"]:
        host.mig("gpu0/gi1", 12)
        host.mig("gpu0/gi1/ci0", 13)
    for folder in (host.base, host.base / "waiting/nvidia"):
        if (folder / "proc/driver/nvidia/params").exists():
            text = params(
                modify=int(str(given_host["modify"])),
                mode=int(str(given_host["mode"])),
                gid=int(str(given_host["gid"])),
            )
            (folder / "proc/driver/nvidia/params").write_text(text)
    states, links = given_host["nodes"], given_host["links"]
    assert isinstance(states, dict)
    assert isinstance(links, dict)
    for path, number in NODES.items():
        put(host, path, number, states[path])
        put_link(host, path, number, links[path])
    return host


def put(host: HostTree, path: str, number: tuple[int, int], state: str) -> None:
    major, minor = number
    target = host.dev / path
    target.parent.mkdir(exist_ok=True)
    makers: dict[str, Callable[[], object]] = {
        "good": lambda: host.node(path, major, minor),
        "wrong number": lambda: host.node(path, major + 100, minor),
        "wrong mode": lambda: host.node(path, major, minor, 0o640),
        "wrong owner": lambda: host.node(path, major, minor, 0o666, 5, 6),
        "file": lambda: target.write_text("precious"),
        "link": lambda: target.symlink_to(host.base / "proc/devices"),
        "folder": target.mkdir,
    }
    if state != "absent":
        makers[state]()


def put_link(host: HostTree, path: str, number: tuple[int, int], state: str) -> None:
    place = host.dev / "char" / f"{number[0]}:{number[1]}"
    targets = {"good": f"../{path}", "absolute": f"/dev/{path}", "elsewhere": "../somewhere"}
    if state in targets:
        place.symlink_to(targets[state])
    elif state == "file":
        place.write_text("precious")


def contents(host: HostTree) -> dict[str, tuple[object, ...]]:
    """Everything in /dev by inode, mode, owner and content."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in sorted(host.dev.rglob("*")):
        status = path.lstat()
        content: object = path.readlink() if path.is_symlink() else status.st_rdev
        if stat.S_ISREG(status.st_mode):
            content = path.read_text()
        key = str(path.relative_to(host.dev))
        seen[key] = (status.st_ino, status.st_mode, status.st_uid, status.st_gid, content)
    return seen


@given(given_host=hosts)
@settings(max_examples=40, deadline=None)
def test_prepared_is_prepared(given_host: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as base:
        tree = build(host_below(Path(base)), given_host)
        before = contents(tree)
        graphics = bool(given_host["graphics"])
        report = prepare(tree.look, actor(tree.places, Path("/")), graphics=graphics)
        after = contents(tree)

        assert make_plan(tree.look(), graphics=graphics).actions == ()
        again = prepare(tree.look, actor(tree.places, Path("/")), graphics=graphics)
        assert again.done == ()
        assert again.findings == report.findings
        assert contents(tree) == after

        for path, was in before.items():
            mode = was[1]
            assert isinstance(mode, int)
            replaceable = stat.S_ISCHR(mode) or (stat.S_ISLNK(mode) and path.startswith("char/"))
            assert replaceable or after[path] == was
        if given_host["modify"] == 0 or given_host["mode"] == 666:
            assert {p: s for p, s in after.items() if p.startswith("nvidia")} == {
                p: s for p, s in before.items() if p.startswith("nvidia")
            }
        if not report.findings:
            assert_ready(tree, graphics=graphics, mig=bool(given_host["mig"]))


def assert_ready(tree: HostTree, *, graphics: bool, mig: bool) -> None:
    """No finding means that a container can be given anything."""
    skipped = {"nvidia7"} | (set() if graphics else {"nvidia-modeset"})
    for path, number in NODES.items():
        if path in skipped or (path.startswith("nvidia-caps/") and not mig):
            continue
        assert (tree.dev / path).lstat().st_rdev == os.makedev(*number)
        link = tree.dev / "char" / f"{number[0]}:{number[1]}"
        assert str(link.readlink()) in (f"../{path}", f"/dev/{path}")
