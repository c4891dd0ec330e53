"""Units in /etc that hide the package's, or start what is not there."""

from __future__ import annotations

import subprocess

import pytest

from nri_gpu.domain.finding import Finding, Level
from nri_gpu.enable.features import CLIENTS
from tests.support.unit_file import OURS
from tests.unit.doctor.node import DoctorNode

CDI = "nri-gpu-cdi.service"
TEXT = OURS.with_name(CDI).read_text()


def found(node: DoctorNode) -> list[Finding]:
    return [each for each in node.examine().findings if each.subject == "units"]


def test_a_checkouts_unit_on_a_node_with_the_package(node: DoctorNode) -> None:
    """As docs/cdi.md once told users of the package."""
    node.write(f"usr/lib/systemd/system/{CDI}", TEXT)
    node.write(f"etc/systemd/system/{CDI}", TEXT)
    hides, absent = found(node)
    assert hides.level is Level.WARNING
    assert f"/etc/systemd/system/{CDI} hides the package's" in hides.meaning
    aside = hides.fix[0].replace("'/", f"'{node.root}/")
    for text in ("first", "second"):
        node.write(f"etc/systemd/system/{CDI}", text)
        subprocess.run(["sh", "-c", aside], check=True)
    kept = (node.root / "etc/systemd/system").glob(f"{CDI}.old*")
    assert sorted(path.read_text() for path in kept) == ["first", "second"]
    assert hides.fix[-1] == f"systemctl daemon-reload && systemctl try-restart '{CDI}'"
    assert absent.level is Level.ERROR
    assert "starts /opt/nri-gpu/bin/nri-gpu, which is not there" in absent.meaning


def test_a_mount_unit_whose_name_systemd_escapes(node: DoctorNode) -> None:
    node.write(f"usr/lib/systemd/system/{CLIENTS}", "")
    node.write(f"etc/systemd/system/{CLIENTS}", "")
    (hides,) = found(node)
    assert f"/etc/systemd/system/{CLIENTS} hides the package's" in hides.meaning


@pytest.mark.parametrize("path", ["/opt/nri-gpu/bin/nri-gpu", "/srv/my 100% gpus/bin/nri-gpu"])
def test_a_checkouts_unit_whose_program_is_there(node: DoctorNode, path: str) -> None:
    quoted = f'"{path.replace("%", "%%")}"' if " " in path else path
    node.write(f"etc/systemd/system/{CDI}", TEXT.replace("/opt/nri-gpu/bin/nri-gpu", quoted))
    assert [each.level for each in found(node)] == [Level.ERROR]
    node.write(path.lstrip("/"), "")
    assert found(node) == []


def test_a_drop_in_starts_another_program(node: DoctorNode) -> None:
    node.write(f"etc/systemd/system/{CDI}", TEXT)
    node.write(f"etc/systemd/system/{CDI}.d/own.conf", "[Service]\nExecStart=\nExecStart=/usr/bin/nri-gpu\n")
    assert found(node) == []


def test_a_masked_unit_is_the_administrators_choice(node: DoctorNode) -> None:
    node.write(f"usr/lib/systemd/system/{CDI}", TEXT)
    (node.root / "etc/systemd/system" / CDI).symlink_to("/dev/null")
    assert found(node) == []


def test_a_drop_in_that_leads_nowhere(node: DoctorNode) -> None:
    """The package is gone, and what `enable` linked stayed."""
    link = node.root / "etc/systemd/system/nri-gpu.service.d/mps.conf"
    link.parent.mkdir()
    link.symlink_to("/usr/share/nri-gpu/systemd/nri-gpu.service.d/mps.conf")
    (finding,) = found(node)
    assert (finding.level, finding.fix) == (Level.ERROR, (f"rm '/{link.relative_to(node.root)}'",))
    node.write("usr/share/nri-gpu/systemd/nri-gpu.service.d/mps.conf", "")
    assert found(node) == []
