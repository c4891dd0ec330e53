"""Features enabled and disabled on a folder that stands for /, by the real `systemctl --root`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.enable.enabling import EnableOptions, disable, enable
from nri_gpu.enable.features import CLIENTS, FEATURES, INSTALLED_AS, SERVICE
from nri_gpu.enable.installation import Installation
from nri_gpu.enable.unit_changes import read_files
from tests.support.unit_file import OURS

ETC: Final = "etc/systemd/system"
PACKAGE: Final = Installation(Path("/usr/bin/nri-gpu"))
PYTHON: Final = Path("/usr/bin/python3")
WANTS: Final = f"{ETC}/multi-user.target.wants"
PLAIN: Final = EnableOptions()
REPLACE: Final = EnableOptions(replace=True)


@pytest.fixture(autouse=True)
def systemctl() -> None:
    """Tests of an installed system, as all of systemd's are; a clean root has none."""
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed on this machine: install systemd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a kubelet's unit, and no manager of units that could be asked."""
    for folder in (ETC, "usr/lib/systemd/system", "proc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/system/kubelet.service").write_text("[Service]\nExecStart=/usr/bin/kubelet\n")
    return tmp_path


@pytest.fixture
def packaged(root: Path) -> Path:
    """The same with the files of our package."""
    for unit in OURS.parent.glob("*.*"):
        if unit.is_file():
            (root / "usr/lib/systemd/system" / INSTALLED_AS.get(unit.name, unit.name)).write_text(unit.read_text())
    drop_ins = root / "usr/share/nri-gpu/systemd" / f"{SERVICE}.d"
    drop_ins.mkdir(parents=True)
    for drop_in in (OURS.parent / drop_ins.name).iterdir():
        (drop_ins / drop_in.name).write_text(drop_in.read_text())
    return root


@pytest.fixture
def checkout(root: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """A checkout on a node whose administrator installed nri-gpu.service from it."""
    (root / ETC / SERVICE).write_text(OURS.read_text())
    monkeypatch.setattr(Installation, "why_unsafe", lambda _: "")  # pytest's folders are below /tmp
    return Installation(Path("/srv/my 100% gpus/.venv/bin/nri-gpu"), OURS.parent, PYTHON, Path("/srv/nri-gpu"))


def files(root: Path) -> dict[str, str]:
    """What /etc has: targets of links, texts of files."""
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in (root / "etc").rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", FEATURES)
def test_of_a_package_all_is_linked_and_goes_again(packaged: Path, name: str) -> None:
    feature = FEATURES[name]
    done = enable(name, PACKAGE, PLAIN, packaged)
    units = {f"{WANTS}/{unit}": f"/usr/lib/systemd/system/{unit}" for unit in feature.units}
    drop_in = f"{SERVICE}.d/{feature.drop_in}"
    links = {f"{ETC}/{drop_in}": f"/usr/share/nri-gpu/systemd/{drop_in}"} if feature.drop_in else {}
    # systemctl itself writes them relative to its root or not, by its release.
    assert {path: target.replace(str(packaged), "") for path, target in files(packaged).items()} == {**units, **links}
    assert (done.due, done.services) == (True, (SERVICE,) if links else ())
    assert enable(name, PACKAGE, PLAIN, packaged).plan.steps == ()
    assert disable(name, PLAIN, packaged).due
    assert files(packaged) == {}
    assert not (packaged / ETC / f"{SERVICE}.d").exists()
    assert disable(name, PLAIN, packaged).plan.steps == ()


@pytest.mark.parametrize("name", FEATURES)
def test_of_a_checkout_copies_start_its_own_program_and_go_again(root: Path, checkout: Installation, name: str) -> None:
    before = files(root)
    enable(name, checkout, PLAIN, root)
    made = files(root)
    starts = [line for path in made if path not in before for line in made[path].splitlines() if "=/opt" in line]
    assert starts == []
    for unit in FEATURES[name].units:
        assert f"{WANTS}/{unit}" in made
        if unit.endswith(".service"):
            assert 'ExecStart="/srv/my 100%% gpus/.venv/bin/nri-gpu" ' in made[f"{ETC}/{unit}"]
    assert (f"{ETC}/{CLIENTS}" in made) is (name == "mps")
    assert all(
        oct((root / path).lstat().st_mode)[-3:] == "644"
        for path in made
        if path.startswith(ETC) and WANTS not in path and path not in before
    )
    assert enable(name, checkout, PLAIN, root).plan.steps == ()
    disable(name, PLAIN, root)
    assert files(root) == before


def test_a_dry_run_changes_nothing(packaged: Path) -> None:
    done = enable("cdi", PACKAGE, EnableOptions(dry_run=True), packaged)
    assert [str(step) for step in done.plan.steps] == ["systemctl enable nri-gpu-cdi.service nri-gpu-cdi.path"]
    assert files(packaged) == {}


def test_a_unit_that_hides_the_packages_goes_only_when_told(packaged: Path) -> None:
    hiding = packaged / ETC / "nri-gpu-prepare.service"
    old = OURS.with_name(hiding.name).read_text()
    hiding.write_text(old)
    (packaged / WANTS).mkdir()
    (packaged / WANTS / hiding.name).symlink_to(f"/{ETC}/{hiding.name}")
    before = files(packaged)
    with pytest.raises(CommandError, match=r"nri-gpu-prepare.service: .* --replace .*nothing was changed") as refused:
        enable("prepare", PACKAGE, PLAIN, packaged)
    assert (refused.value.code, files(packaged)) == (Exit.FINDING, before)
    left_alone = disable("prepare", PLAIN, packaged).plan
    assert (left_alone.foreign, left_alone.disabled) == ((f"/{ETC}/{hiding.name}",), ())
    assert files(packaged) == before
    enable("prepare", PACKAGE, REPLACE, packaged)
    left = files(packaged)
    assert left[f"{ETC}/{hiding.name}.old"] == old
    assert left[f"{WANTS}/{hiding.name}"].endswith("/usr/lib/systemd/system/nri-gpu-prepare.service")
    assert len(left) == 2


def test_a_copy_that_was_edited_is_the_administrators(root: Path, checkout: Installation) -> None:
    enable("metrics", checkout, PLAIN, root)
    copy = root / ETC / f"{SERVICE}.d/metrics.conf"
    copy.write_text(copy.read_text() + "IPAddressAllow=10.0.0.0/8\n")
    edited = copy.read_text()
    assert disable("metrics", PLAIN, root).plan.foreign == (f"/{ETC}/{SERVICE}.d/metrics.conf",)
    with pytest.raises(CommandError, match=r"metrics\.conf"):
        enable("metrics", checkout, PLAIN, root)
    assert copy.read_text() == edited
    enable("metrics", checkout, REPLACE, root)
    copy.write_text(edited)
    enable("metrics", checkout, REPLACE, root)
    assert [(copy.parent / f"metrics.conf{end}").read_text() for end in (".old", ".old2")] == [edited, edited]


def test_metrics_of_an_observer_go_to_its_unit(packaged: Path) -> None:
    (packaged / "usr/lib/systemd/system" / SERVICE).unlink()
    enable("metrics", PACKAGE, PLAIN, packaged)
    assert list(files(packaged)) == [f"{ETC}/nri-gpu-observe.service.d/metrics.conf"]


@pytest.mark.parametrize(
    ("missing", "name", "sentence"),
    [
        ("kubelet.service", "dra", "dra is for a kubelet, and this node has none"),
        ("kubelet.service", "kubelet", "kubelet is for a kubelet, and this node has none"),
        (SERVICE, "stray", "stray is for nri-gpu.service, which is not installed"),
        ("nri-gpu-cdi.path", "cdi", "/usr/lib/systemd/system/nri-gpu-cdi.path is missing: it is in the package"),
    ],
)
def test_what_the_node_cannot_have(packaged: Path, missing: str, name: str, sentence: str) -> None:
    (packaged / "usr/lib/systemd/system" / missing).unlink()
    with pytest.raises(CommandError, match=sentence) as refused:
        enable(name, PACKAGE, PLAIN, packaged)
    assert (refused.value.code, files(packaged)) == (Exit.UNAVAILABLE, {})


def test_a_checkout_does_not_hide_a_package(packaged: Path, checkout: Installation) -> None:
    before = files(packaged)
    with pytest.raises(CommandError, match=r"is a package's here, and a copy would hide it"):
        enable("cdi", checkout, PLAIN, packaged)
    assert files(packaged) == before


def test_a_step_that_fails_takes_back_the_others(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hiding = packaged / ETC / "nri-gpu-dra.service"
    hiding.write_text("[Service]\nExecStart=/bin/true\n")
    before = files(packaged)
    monkeypatch.setenv("PATH", os.devnull)  # where there is no systemctl
    with pytest.raises(CommandError, match="systemctl") as refused:
        enable("dra", PACKAGE, REPLACE, packaged)
    assert (refused.value.code, files(packaged)) == (Exit.UNAVAILABLE, before)


@pytest.mark.parametrize(
    ("ending", "error"),
    [("exit 1", CommandError), ("kill -INT $PPID; sleep 0.1; exit 1", KeyboardInterrupt)],
    ids=["it fails", "Ctrl-C"],
)
def test_a_systemctl_that_ends_halfway_is_taken_back(
    root: Path, checkout: Installation, monkeypatch: pytest.MonkeyPatch, ending: str, error: type[BaseException]
) -> None:
    """The real one enables the first of two units, and no more."""
    before = files(root)
    (root / "bin").mkdir()
    half = f'case "$*" in *" enable "*" "*) {shutil.which("systemctl")} "$1" "$2" enable "$4"; {ending};; esac'
    (root / "bin/systemctl").write_text(f'#!/bin/sh\n{half}\nexec {shutil.which("systemctl")} "$@"\n')
    (root / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(root / "bin"), prepend=os.pathsep)
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    try:
        with pytest.raises(error):
            enable("cdi", checkout, PLAIN, root)
    finally:
        signal.signal(signal.SIGINT, before_test)
    assert files(root) == before


def test_a_folder_in_the_way(packaged: Path) -> None:
    drop_in = packaged / ETC / f"{SERVICE}.d/mps.conf"
    drop_in.mkdir(parents=True)
    with pytest.raises(CommandError, match=r"mps\.conf: .*nothing was changed"):
        enable("mps", PACKAGE, PLAIN, packaged)
    assert list(drop_in.parent.iterdir()) == [drop_in]


def test_whatever_the_umask_everybody_may_look(packaged: Path) -> None:
    mask = os.umask(0o077)
    try:
        enable("mps", PACKAGE, PLAIN, packaged)
    finally:
        os.umask(mask)
    assert oct((packaged / ETC / f"{SERVICE}.d").stat().st_mode)[-3:] == "755"


def test_a_file_that_a_user_may_not_read_stops_no_dry_run() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret.service").touch(0o600)
        os.seteuid(65534)
        try:
            there = read_files(folder, [""])
        finally:
            os.seteuid(0)
    assert list(there) == ["/secret.service"]


@pytest.mark.parametrize("name", ["cdi", "dra", "prepare"])
def test_units_of_a_checkout_on_a_node_without_the_daemon(root: Path, checkout: Installation, name: str) -> None:
    """As docs/cdi.md has it for Docker."""
    (root / ETC / SERVICE).unlink()
    enable(name, checkout, PLAIN, root)
    assert {f"{ETC}/{unit}" for unit in FEATURES[name].units} <= files(root).keys()
