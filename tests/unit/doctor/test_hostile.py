"""Whatever lies in the place of any file that `doctor` reads: it ends with findings, and in time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.doctor.support_bundle import bundle
from tests.unit.doctor.node import CHECKPOINT, CONFIG, HEALTHY, K3S, PLUGINS, DoctorNode, installed


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 20)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def nested(path: Path) -> None:
    path.write_bytes(b'{"a":' * 5000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (garbage, empty, nested, folder, pipe, loop, endless)
}


@pytest.mark.parametrize("spoil", KINDS.values(), ids=KINDS)
def test_anything_in_the_place_of_each_file(node: DoctorNode, spoil: Callable[[Path], None]) -> None:
    installed(node)
    node.listen(f"{PLUGINS}/kubelet.sock")
    node.write(CHECKPOINT, HEALTHY)
    node.write("var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n")
    node.write("etc/docker/daemon.json", "{}")
    files = [path for path in sorted(node.root.rglob("*")) if path.is_file() and not path.is_symlink()]
    places = {str(path.relative_to(node.root)): path for path in files}
    others = (
        "waiting",
        "majors",
        "bin",
        *(("proc", "sys") if spoil in (pipe, endless) else ()),
    )  # these are the kernel's
    libraries = [name for name in places if name.startswith("usr/lib")]
    for path in (places[name] for name in places if not name.startswith(others) and name not in libraries[1:]):
        kept = path.with_name(f"{path.name}.kept")
        shutil.copy2(path, kept)
        kept.rename(node.root.parent / "kept")
        spoil(path)
        began = time.process_time()
        assert list(node.examine().findings), path
        assert bundle(node.seen, container_runtime(node.seen), {}), path
        assert time.process_time() - began < 4, path
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (node.root.parent / "kept").rename(path)
    assert node.found().keys() == {"other injectors", "cgroup driver"}


def test_a_deep_table_and_an_endless_configuration_of_k3s(node: DoctorNode) -> None:
    deep = ".containerd" * 20_000
    node.process(700, "containerd", "containerd", "-c", f"/{K3S}")
    table = "[plugins.'io.containerd.cri.v1.runtime'"
    node.write(K3S, f"{CONFIG}{table}{deep}]\n{table}.containerd.runtimes.x]\n")
    assert list(node.examine().findings)
    node.write(K3S, f'{CONFIG}{table}.containerd]\ndefault_runtime_name = "nvidia"\n')
    (node.root / "etc/rancher/k3s").mkdir(parents=True)
    (node.root / "etc/rancher/k3s/config.yaml").symlink_to("/dev/zero")
    assert node.found(status=None)["default runtime"].fix[0].startswith("# remove default-runtime")


def test_what_vanishes_while_it_is_read(node: DoctorNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that end, and drafts that are renamed, between the list of a folder and the look at its entries."""
    for pid in (699, 701):
        node.process(pid, "containerd", "containerd", "-c", "/etc/other.toml")
        (node.root / f"proc/{pid}/cmdline").unlink()
    node.process(800, "nvidia-persistenced")
    (node.root / "proc/800/cmdline").unlink()
    whole = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        yield from whole(self)
        yield self / ("4000000" if self.name == "proc" else ".gone.new")

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert node.found() == {}
    runtime = container_runtime(node.seen)
    assert (runtime and runtime.process and runtime.process.pid, runtime and runtime.beside) == (700, ())
    assert bundle(node.seen, runtime, {})
