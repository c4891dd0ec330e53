"""Images and volumes made to lead our mounts astray: runc confines them or the container is not made; no host changes.

Where our mounts go is asked of a harmless container, so that the attacks follow them wherever they are moved.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from posixpath import dirname
from typing import Any, Final

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.driver_root import make_driver_root
from tests.support.image import Entry, Fifo, File, Folder, ImageSpec, Link
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec

pytestmark = on_newest

CLAIM: Final = "device=1; mode=shared; capabilities=compute,utility,video,graphics,display,ngx"
SECRET: Final = "nri-gpu-canary"  # a name that nothing else on the machine has
V: Final = "580.95.05"
DEBIAN: Final = "/usr/lib/x86_64-linux-gnu"
UP: Final = "../" * 12
# Nothing that is or leads to the host's file; what the kernel shows of processes is not the image's.
SEARCH: Final = (
    f"find / \\( -path /proc -o -path /sys \\) -prune -o -name {SECRET} -type f -exec grep -l 'of the host' {{}} +"
)

Given = tuple[tuple[Any, ...], ...]


class Host(Struct, frozen=True):
    """What must stay as it is: the driver, its staged copy, and a folder that every attack would like to get at.

    places: where our mounts go in a container -> whether it is a folder. given: the nodes and rules it gets.
    """

    node: Containerd
    daemon: NriGpu
    canary: Path
    places: Mapping[str, bool]
    given: Given

    @property
    def folders(self) -> tuple[Path, ...]:
        driver = self.daemon.launch.driver_root
        assert driver
        return (driver, self.daemon.launch.base / "drivers", self.canary)

    def mounts(self) -> list[str]:
        """Mounts in the namespace that containerd lives in: one below these folders would be a leak."""
        table = Path(f"/proc/{self.node.supervisor_pid}/mountinfo").read_text()
        return [line for line in table.splitlines() if any(str(folder) in line.split()[4] for folder in self.folders)]

    def check_given(self, container: ContainerId) -> None:
        """Exactly the grant's devices, and nothing of the host's canary can be read."""
        assert given(self.node.cri.status(container).oci) == self.given
        found = self.node.cri.execute(container, "/bin/sh", "-c", SEARCH)
        assert (found.stdout, found.stderr) == ("", "")


def run(node: Containerd, spec: ContainerSpec, **pod: Any) -> ContainerId:  # noqa: ANN401 - any field of a PodSpec
    return node.cri.run(node.cri.asking(CLAIM, **pod), spec)


def nodes(oci: Mapping[str, Any]) -> Given:
    listed = oci["linux"].get("devices") or ()
    return tuple(sorted((each["path"], each["type"], each["major"], each["minor"]) for each in listed))


def given(oci: Mapping[str, Any]) -> Given:
    rules = (tuple(sorted(rule.items())) for rule in oci["linux"]["resources"]["devices"])
    return (*nodes(oci), *rules)


def seal(folders: Iterable[Path]) -> Mapping[str, tuple[object, ...]]:
    """Path -> kind, mode, owner, number, and content or target; of everything below these folders, and of themselves.

    Times of change are left out for files (reading makes none), and kept for folders: a name that came and went shows.
    """
    return {str(path): _facts(path) for folder in folders for path in (folder, *sorted(folder.rglob("*")))}


def _facts(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    common = (oct(found.st_mode), found.st_uid, found.st_gid, found.st_rdev)
    if stat.S_ISLNK(found.st_mode):
        return (*common, os.fspath(path.readlink()))
    if stat.S_ISREG(found.st_mode):
        return (*common, hashlib.sha256(path.read_bytes()).hexdigest())
    return (*common, found.st_mtime_ns)


@pytest.fixture(scope="module")
def host(module_node: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    base = tmp_path_factory.mktemp("host")
    canary = base / "canary"
    (canary / "folder").mkdir(parents=True)
    (canary / SECRET).write_text("of the host")
    (canary / "folder" / SECRET).write_text("of the host")
    driver = make_driver_root(base / "driver", V, everything=True)
    with staged(Launch(base / "d", module_node.nri_socket, driver_root=driver)) as daemon:
        oci = module_node.cri.status(run(module_node, ContainerSpec())).oci
        below = str(daemon.launch.base / "drivers")
        places = {m["destination"]: Path(m["source"]).is_dir() for m in oci["mounts"] if below in m["source"]}
        module_node.cri.remove_all()
        yield Host(module_node, daemon, canary, places, given(oci))


Image = Callable[[Host], Mapping[str, Entry]]


def everywhere(entry: Callable[[Host, bool], Entry]) -> Image:
    """The same thing at each of our places. entry: told whether ours is a folder."""
    return lambda host: {place: entry(host, folder) for place, folder in host.places.items()}


def at_first(entry: Entry, *, folder: bool) -> Image:
    """Something in the place of the first folder, or of the first file, that we mount."""
    return lambda host: {next(place for place, kind in host.places.items() if kind is folder): entry}


def around(target: Callable[[Host], str]) -> Image:
    """The folder around each of our places is a link."""
    return lambda host: {dirname(place): Link(target(host)) for place in host.places if dirname(place) != "/usr"}


def fixed(entries: Mapping[str, Entry]) -> Image:
    return lambda _: entries


def inside(host: Host, folder: bool) -> str:
    return str(host.canary / "folder" if folder else host.canary / SECRET)


class Then(StrEnum):
    """What becomes of the container. The last: it depends on where our mounts go."""

    RUNS = "runs"
    FAILS = "fails"
    EITHER = "either"


CUDA: Final = f"{DEBIAN}/libcuda.so.1"
OWN: Final[Mapping[str, Entry]] = {
    CUDA: Link("/etc/passwd"),
    "/usr/lib64/libcuda.so.1": Link("/proc/self/environ"),
    "/usr/lib64/libcuda.so": Link("/not/there"),
    f"{DEBIAN}/libnvidia-ml.so.1/x": File(b""),
    "/usr/lib64/libnvidia-ml.so.1": Fifo(),
    "/dev/dri": Link("/etc"),
    "/usr/local/cuda/compat": Link("/"),
    "/etc/nvidia": Link("/proc/sys"),
}
PROC: Final[Mapping[str, Entry]] = {"/etc/vulkan": Link("/proc/sys"), "/etc/OpenCL": Link("/proc")}
HWCAPS: Final[Mapping[str, Entry]] = {
    f"{folder}/glibc-hwcaps": Link("/etc") for folder in (DEBIAN, "/usr/lib64", "/usr/lib", "/lib64")
}
IMAGES: Final[dict[str, tuple[Image, Then]]] = {
    "our places lead to the host": (everywhere(lambda host, folder: Link(inside(host, folder))), Then.RUNS),
    "our places lead up and out": (everywhere(lambda host, folder: Link(UP + inside(host, folder))), Then.RUNS),
    "our places lead to nothing on the host": (everywhere(lambda host, _: Link(f"{host.canary}/none")), Then.FAILS),
    "our places lead to the root": (everywhere(lambda *_: Link("/")), Then.FAILS),
    "our places lead to a file of proc": (everywhere(lambda *_: Link("/proc/self/environ")), Then.FAILS),
    "our places lead to the first process's root": (everywhere(lambda *_: Link("/proc/1/root")), Then.FAILS),
    "our places lead in a circle": (lambda host: {place: Link(place) for place in host.places}, Then.FAILS),
    "folders around them lead to the host": (around(lambda host: inside(host, True)), Then.RUNS),
    "folders around them lead up and out": (around(lambda host: UP + inside(host, True)), Then.RUNS),
    "folders around them lead to the root": (around(lambda _: "/"), Then.RUNS),
    "a file for a folder": (at_first(File(b""), folder=True), Then.FAILS),
    "a folder for a file": (at_first(Folder(), folder=False), Then.FAILS),
    "a pipe for a folder": (at_first(Fifo(), folder=True), Then.FAILS),
    "a pipe for a file": (at_first(Fifo(), folder=False), Then.RUNS),
    "lib64 is the root": (fixed({"/usr/lib64": Link("/")}), Then.RUNS),
    "lib64 leads up and out": (fixed({"/usr/lib64": Link("../../../../etc")}), Then.RUNS),
    "libraries that are none, and links beside them": (fixed(OWN), Then.RUNS),
    "the library folder is a file": (fixed({DEBIAN: File(b"")}), Then.EITHER),
    "hwcaps is etc": (fixed(HWCAPS), Then.RUNS),
    "configuration is in proc": (fixed(PROC), Then.EITHER),
    "programs are in proc": (fixed({"/usr/bin": Link("/proc")}), Then.EITHER),
    "programs are in sys": (fixed({"/usr/bin": Link("/sys")}), Then.EITHER),
    "the flat root is the root": (fixed({"/usr/local/nvidia": Link("/")}), Then.EITHER),
}


@pytest.mark.parametrize("attack", IMAGES)
def test_an_image(host: Host, node: Containerd, attack: str) -> None:
    image, expected = IMAGES[attack]
    spec = ImageSpec("localhost/nri-gpu/hostile:1", extra=image(host))
    node.import_image(spec)
    before = seal(host.folders)
    try:
        container = run(node, ContainerSpec(image=spec.name))
    except CriError as error:
        assert "error mounting" in error.details
        assert expected is not Then.RUNS
    else:
        assert expected is not Then.FAILS
        host.check_given(container)
    assert seal(host.folders) == before
    assert host.mounts() == []


def test_what_leaks_would_be_seen(host: Host, node: Containerd) -> None:
    """The two questions of these tests, asked where the answer is yes."""
    container = run(node, ContainerSpec(mounts={"/somewhere": str(host.canary)}))
    assert f"/somewhere/{SECRET}" in node.cri.execute(container, "/bin/sh", "-c", SEARCH).stdout.splitlines()
    before = seal(host.folders)
    node.cri.execute(container, "/bin/touch", "/somewhere/folder/new")
    assert seal(host.folders) != before
    node.cri.execute(container, "/bin/rm", "/somewhere/folder/new")


def test_volumes_stay_as_they_are(host: Host, node: Containerd, tmp_path: Path) -> None:
    volume, file = tmp_path / "volume", tmp_path / "file"
    (volume / "inner").mkdir(parents=True)
    file.write_text("the pod's own")
    before = seal((tmp_path, *host.folders))
    for at in (
        "/usr",
        "/usr/lib64",
        DEBIAN,
        "/usr/local/nvidia",
        "/usr/local/nvidia/lib64",
        "/etc/vulkan",
        "/opt",
        "/run",
    ):
        host.check_given(run(node, ContainerSpec(mounts={at: str(volume)})))
    for at in (CUDA, "/usr/bin/nvidia-smi", "/usr/local/nvidia/lib64/libcuda.so.1"):
        container = run(node, ContainerSpec(mounts={at: str(file)}))
        host.check_given(container)
        assert node.cri.execute(container, "/bin/cat", at).stdout == "the pod's own"
    assert seal((tmp_path, *host.folders)) == before


@pytest.mark.parametrize("at", ["/dev", "/dev/dri", "/dev/dri/card1", "/dev/nvidia1", "/dev/nvidia-uvm"])
def test_a_volume_in_the_place_of_a_node(host: Host, node: Containerd, tmp_path: Path, at: str) -> None:
    """There runc would make nodes in the volume, on the host, or leave one out and start the container all the same."""
    volume = tmp_path / "volume"
    if at in ("/dev", "/dev/dri"):
        volume.mkdir()
    else:
        volume.write_text("the pod's own")
    before = seal((tmp_path,))
    with pytest.raises(CriError, match=r"\[volume-in-the-way\]: the container mounts a volume at /dev/"):
        run(node, ContainerSpec(mounts={at: str(volume)}))
    assert seal((tmp_path,)) == before
    host.daemon.wait_held({})


def test_a_privileged_pod_with_the_driver_root(host: Host, node: Containerd) -> None:
    driver = host.folders[0]
    before = seal(host.folders)
    for at in ("/host", "/usr/local/nvidia", "/usr/lib64"):
        spec = ContainerSpec(mounts={at: str(driver)}, privileged=True)
        container = run(node, spec, privileged=True)
        assert "libcuda.so.1" in node.cri.execute(container, "/bin/ls", f"{at}/lib64").stdout
    assert seal(host.folders) == before
