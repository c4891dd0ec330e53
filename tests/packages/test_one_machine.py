"""docs/quickstart/one-machine.md, followed on clean machines that systemd has booted: Debian 13 and 12."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests import ground
from tests.packages.conftest import Debs
from tests.packages.test_systemd import DROP_IN, OPTIONS
from tests.support import image, packages, pages, runc_devices_only
from tests.support.booted_root import BootedRoot, starting
from tests.support.driver_root import make_driver_root

PAGE: Final = pages.FOLDER / "one-machine.md"
CONFIG: Final = "/etc/containerd/config.toml"
DIST: Final = "/root/my checkout/dist"
PROGRAMS: Final = "/usr/local/sbin"  # where a shell and containerd look first
# The one line of the file of Docker's containerd.io that is no comment, between two that are.
DOCKERS: Final = '#   limitations under the License.\n\ndisabled_plugins = ["cri"]\n\n#root = "/var/lib/containerd"\n'
TABLE: Final = '[plugins."io.containerd.nri.v1.nri"]\n'
CONTAINERD_2: Final = f"""
[Service]
Type=notify
ExecStart={PROGRAMS}/containerd
Delegate=yes
KillMode=process
"""
# containerd cannot keep layers on an overlay, which the machine's root is. Then what a registry would give.
BEGIN: Final = """
set -e
systemctl stop containerd
mount -t tmpfs tmpfs /var/lib/containerd
systemctl start containerd
for each in /images/*.tar; do ctr --namespace k8s.io images import $each; done
touch /etc/hosts /etc/resolv.conf
"""


class Machine(Struct, frozen=True):
    """A Debian and its containerd. included: of Debian's packages. programs: of others, for PROGRAMS.

    config: what containerd's file says instead of what is there.
    """

    suite: str
    included: Sequence[str]
    programs: Path | None = None
    config: str = ""


def debian_13(config: str = "") -> Machine:
    return Machine("trixie", ("containerd",), config=config)


def debian_12() -> Machine:
    """With containerd's newest release, and its file as `containerd config default` writes it."""
    folder = ground.need(packages.SETS[packages.Version.V2_4])
    return Machine("bookworm", ("runc",), folder, _default(folder / "containerd"))


@contextmanager
def booted(machine: Machine, folder: Path, debs: Debs | None = None) -> Iterator[BootedRoot]:
    """The machine with crictl, a made-up driver, and four simulated GPUs for the daemon once it is installed."""
    own = {name: folder / name for name in ("programs", "images", "drop-in", "units", "state")}
    for each in own.values():
        each.mkdir()
    programs = own["programs"]
    for program in (*(machine.programs.iterdir() if machine.programs else ()), ground.need("crictl") / "crictl"):
        shutil.copy(program, programs)
    write_runc(programs)
    (own["drop-in"] / "test.conf").write_text(starting(f"/usr/bin/nri-gpu run {OPTIONS}"))
    seen = {
        programs: PROGRAMS,
        own["images"]: "/images",
        own["drop-in"]: DROP_IN,
        make_driver_root(folder / "driver"): "/driver",
    }
    if debs:
        seen[debs.folder] = DIST
    if machine.programs:
        (own["units"] / "containerd.service").write_text(CONTAINERD_2)
        seen |= {own["units"]: "/etc/systemd/system", own["state"]: "/var/lib/containerd"}
    containerd = programs / "containerd" if machine.programs else packages.fetch(packages.Version.V1_7).containerd
    pause = re.search(r"[\w.]+/pause:[\w.]+", _default(containerd))
    assert pause
    for name in (pause[0], "docker.io/library/debian:12"):
        image.build(own["images"] / f"{name.rpartition('/')[2]}.tar", packages.busybox(), image.ImageSpec(name))
    with BootedRoot(machine.suite, seen, included=machine.included) as root:
        root.run("bash", "-c", BEGIN)
        if machine.config:
            write_config(root, machine.config)
        yield root


@pytest.mark.parametrize("kind", ["Debian 13", "Debian 13, CRI disabled", "Debian 12, containerd 2"])
def test_a_reader_follows_it(debs: Debs, tmp_path: Path, kind: str) -> None:
    machines = {
        "Debian 13": debian_13,
        "Debian 13, CRI disabled": lambda: debian_13(DOCKERS),
        "Debian 12, containerd 2": debian_12,
    }
    with booted(machines[kind](), tmp_path, debs) as root:
        if "disabled" in kind:
            seen = root.try_run("crictl", "--runtime-endpoint=unix:///run/containerd/containerd.sock", "pods").stdout
            assert "unknown service runtime.v1.RuntimeService" in seen
        pages.follow(PAGE, lambda script: root.try_run("bash", "-c", f"cd '{DIST}'\n{script}", answers="y\n").stdout)
        if "disabled" in kind:
            write_config(root, DOCKERS)
            shown = PAGE.read_text().partition("## CRI is disabled\n")[2].split("```")[1].split()
            assert " ".join(shown) in " ".join(root.try_run("nri-gpu", "doctor").stdout.split())


def test_the_block_never_breaks_the_file(tmp_path: Path) -> None:
    """Whatever the file says of NRI, and however it ends: containerd starts, and NRI is on but where the file says no.

    Then the line that the page tells to write is enough.
    """
    block = pages.blocks(PAGE)[1].script
    debians = (Path(packages.fetch(packages.Version.V1_7).folder).parents[1] / CONFIG[1:]).read_text()
    off = f"{TABLE}  disable = true\n"
    files = {
        "no end of its last line": debians.rstrip("\n"),
        "the block twice": f"{debians}\n{TABLE}  disable = false\n",
        "the table, empty": f"{debians}{TABLE}",
        "switched off": f"{debians}{off}",
        "switched off, with no end of its last line": f"{debians}{off}".rstrip("\n"),
        "inline": 'version = 2\nplugins = {"io.containerd.nri.v1.nri" = {disable = false}}\n',
        "of Docker, with a table": f"{DOCKERS}\n{off}",
        "empty but for its version": "version = 2",
    }
    with booted(debian_13(), tmp_path) as root:
        for name, text in files.items():
            write_config(root, text)
            said = root.try_run("bash", "-c", block)
            off_still = text.endswith(("= true", "= true\n", TABLE))
            assert (said.returncode != 0) == off_still, f"{name}: {said.stdout}"
            assert root.run("systemctl", "is-active", "containerd") == "active\n", name
            if off_still:
                fixed = (root.path / CONFIG[1:]).read_text().partition(TABLE)[0]
                write_config(root, f"{fixed}{TABLE}  disable = false\n")
                root.run("bash", "-c", block)


def write_runc(programs: Path) -> None:
    """Put into PROGRAMS what has Debian's runc set no more than it can here."""
    script = Path(PROGRAMS) / Path(shutil.copy(runc_devices_only.__file__, programs)).name
    runc_devices_only.write_wrapper(programs / "runc", Path("/usr/sbin/runc"), Path("/usr/bin/python3"), script)


def write_config(root: BootedRoot, text: str) -> None:
    """Have containerd started with this file."""
    root.run("mkdir", "-p", str(Path(CONFIG).parent))
    (root.path / CONFIG[1:]).write_text(text)
    root.run("rm", "-f", "/run/nri/nri.sock")  # which a containerd without NRI leaves there
    root.run("systemctl", "reset-failed", "containerd")  # of the number of starts that are allowed in ten seconds
    root.run("systemctl", "restart", "containerd")


def _default(containerd: Path) -> str:
    return subprocess.run([containerd, "config", "default"], capture_output=True, text=True, check=True).stdout
