"""Every strategy in every kind of container, with a real loader: docs/loader.md has the table, and it is true."""

import platform
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.node import Loader
from tests.support.cdi import specification
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Executed, Pod
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.driver_root import make_driver_root, write_32
from tests.support.image import File, ImageSpec
from tests.support.loader_images import OTHERS, specs
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.probe import nvidia_nodes

pytestmark = [
    on_newest,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc has hwcaps levels on x86-64 only"),
]

V: Final = "580.95.05"
PAGE: Final = Path(__file__).parents[2] / "docs" / "loader.md"
NAMES: Final = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")
NAMES_32: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
PROBE: Final = ("/bin/probe", *NAMES)
CLEARED: Final = ("/bin/env", "-i", *PROBE)
SMI: Final = ("/bin/sh", "-c", "nvidia-smi")
# What `ldconfig -p` knows, and how Triton's compiler looks for libcuda (triton: backends/nvidia/driver.py).
LDCONFIG: Final = ("/bin/sh", "-c", "/sbin/ldconfig -p 2>&1 | grep -q libcuda.so.1 && echo known || echo unknown")
FRESH: Final = ("/bin/sh", "-c", f"/sbin/ldconfig && {LDCONFIG[2]}")
TRITON: Final = (
    "/bin/sh",
    "-c",
    f"IFS=:; for at in $LD_LIBRARY_PATH; do if [ -e $at/libcuda.so.1 ]; then echo known; exit; fi; done; {LDCONFIG[2]}",
)
HWCAPS: Final = tuple(f"/usr/{place}/glibc-hwcaps" for place in ("lib/x86_64-linux-gnu", "lib64"))
PLAIN: Final = ContainerSpec()


class Case(Struct, frozen=True):
    """One row: a kind of container, and what is run in it. volumes: places of the pod's own volumes."""

    image: str
    command: tuple[str, ...] = PROBE
    spec: ContainerSpec = PLAIN
    volumes: tuple[str, ...] = ()
    capabilities: str = "compute,utility"
    cdi: bool = False


CASES: Final = {
    "Debian-like, glibc 2.36": Case("debian"),
    "RHEL-like, glibc 2.36": Case("rhel"),
    "Debian-like, glibc 2.31": Case("old"),
    "distroless: no shell, no loader cache": Case("distroless"),
    "a user who is not root": Case("debian", spec=ContainerSpec(user=1000)),
    "a read-only root file system": Case("debian", spec=ContainerSpec(readonly_rootfs=True)),
    "a cleared environment (`env -i`, `su -`, sudo)": Case("debian", CLEARED),
    "a cleared environment, RHEL-like": Case("rhel", CLEARED),
    "a cleared environment, glibc 2.31": Case("old", CLEARED),
    "a setuid program": Case("debian", ("/bin/probe-setuid", *NAMES), ContainerSpec(user=1000)),
    "a loader cache that names another libcuda": Case("cache"),
    "such a cache, and a cleared environment": Case("cache", CLEARED),
    "a pod that overrides its image's `LD_LIBRARY_PATH`": Case(
        "own path", spec=ContainerSpec(env={"LD_LIBRARY_PATH": "/pod/lib"})
    ),
    "a volume at `/usr/local/nvidia`": Case("debian", volumes=("/usr/local/nvidia",)),
    "a volume at `/usr/lib64`, Debian-like": Case("debian", volumes=("/usr/lib64",)),
    "volumes in both `glibc-hwcaps`": Case("debian", volumes=HWCAPS),
    "32-bit programs (`compat32`)": Case(
        "debian", ("/bin/probe32", *NAMES_32), capabilities="compute,utility,compat32"
    ),
    "found by `ldconfig -p`": Case("debian", LDCONFIG),
    "found by `ldconfig -p` after `ldconfig`": Case("debian", FRESH),
    "found by `ldconfig -p` or in `LD_LIBRARY_PATH`, as Triton does": Case("debian", TRITON),
    "`nvidia-smi` by its name": Case("debian", SMI),
    "`nvidia-smi` by its name, in NVIDIA's images": Case("nvidia", SMI),
    "by CDI: Debian-like, glibc 2.36": Case("debian", cdi=True),
    "by CDI: Debian-like, glibc 2.31": Case("old", cdi=True),
    "by CDI: NVIDIA's images, glibc 2.31": Case("nvidia, old", cdi=True),
    "by CDI: as Triton does": Case("debian", TRITON, cdi=True),
    "by CDI: as Triton does, in NVIDIA's images": Case("nvidia", TRITON, cdi=True),
    "by CDI: as Triton does, with the line below in the image": Case("line", TRITON, cdi=True),
}
# What a container may say when it is not served, and nothing else.
NOT_SERVED: Final = ("cannot open shared object file", f"-> {OTHERS}/", "nvidia-smi: not found", "unknown")


@pytest.fixture(scope="module")
def images(module_node: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ImageSpec]:
    made = specs(tmp_path_factory.mktemp("images"))
    for spec in made.values():
        module_node.import_image(spec)
    return made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_driver_root(tmp_path_factory.mktemp("driver"), V, compiled=True)
    (root / "lib").mkdir()
    for soname in NAMES_32:
        file = write_32(root / "lib" / f"{soname.removesuffix('.1')}.{V}", soname)
        file.with_name(soname).symlink_to(file.name)
    (root / "etc/OpenCL/vendors").mkdir(parents=True)
    (root / "etc/OpenCL/vendors/nvidia.icd").write_text("libnvidia-opencl.so.1\n")
    return root


@pytest.fixture(params=Loader, ids=str)
def loader(request: pytest.FixtureRequest) -> Loader:
    """Every strategy in turn."""
    chosen: Loader = request.param
    return chosen


@pytest.fixture
def launch(node: Containerd, tmp_path: Path, driver: Path, loader: Loader) -> Launch:
    plain = Launch(tmp_path / "d", node.nri_socket, driver_root=driver)
    return plain.with_policy(f'[driver]\nloader = "{loader}"\n')


@pytest.fixture
def cdi(node: Containerd, launch: Launch) -> Iterator[None]:
    """The same strategy's specification, for as long as a test takes."""
    assert launch.driver_root
    with specification(node.layout.cdi, launch.driver_root, launch.base / "cdi", policy=launch.policy):
        yield


def table() -> dict[str, dict[str, str]]:
    """Row -> strategy -> `yes` or `no`, as the page has it."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in PAGE.read_text().partition("## Who is served")[2].splitlines()
        if line.startswith("| ")
    ]
    [_, *strategies] = rows[0]
    return {
        row[0]: dict(zip((each.strip("`") for each in strategies), row[1:], strict=True)) for row in rows[1:] if row
    }


class Trial(Struct, frozen=True):
    """A node with nri-gpu on it, where containers are had of each kind. folder: for the pods' volumes.

    pods: by what all of its containers ask for.
    """

    node: Containerd
    images: Mapping[str, ImageSpec]
    folder: Path
    pods: dict[str, Pod] = field(default_factory=dict)

    def container(self, case: Case) -> ContainerId:
        """One that runs, holding GPU 1."""
        request = "" if case.cdi else f"device=1; mode=shared; capabilities={case.capabilities}"
        volumes = {place: str(self._volume(place)) for place in case.volumes}
        spec = replace(
            case.spec,
            name=f"c{uuid4()}",
            image=self.images[case.image].name,
            mounts=volumes,
            cdi_devices=("nvidia.com/gpu=1",) if case.cdi else (),
        )
        return self.node.cri.run(self._pod(request), spec)

    def _pod(self, request: str) -> Pod:
        if request not in self.pods:
            self.pods[request] = self.node.cri.asking(request, f"p{len(self.pods)}")
        return self.pods[request]

    def _volume(self, place: str) -> Path:
        volume = self.folder / place.strip("/").replace("/", "-")
        volume.mkdir(parents=True, exist_ok=True)
        return volume

    def served(self, case: Case) -> str:
        """`yes` or `no`; anything else that may happen, in full."""
        done = self.node.cri.execute(self.container(case), *case.command)
        return _judged(case, done)


def _judged(case: Case, done: Executed) -> str:
    said = done.stdout + done.stderr
    wanted = [word for word in case.command if ".so" in word]
    if case.command == SMI:
        found = said.startswith(f"nvidia-smi: SIMULATION of driver {V}")
    elif case.command in (LDCONFIG, FRESH, TRITON):
        found = said == "known\n"
    elif case.command[0] == "/bin/probe32":  # it names what it loaded
        found = done.stdout.split() == wanted
        return "yes" if found else said or "no"
    else:
        found = [line.partition(" -> ")[0] for line in said.splitlines()] == wanted and OTHERS not in said
    if found and not done.code:
        return "yes"
    return "no" if any(each in said for each in NOT_SERVED) else said


@pytest.fixture
def trial(node: Containerd, images: Mapping[str, ImageSpec], tmp_path: Path) -> Trial:
    return Trial(node, images, tmp_path / "volumes")


def test_the_table_has_a_row_for_every_case_and_a_column_for_every_strategy() -> None:
    rows = {name: row for name, row in table().items() if not set(name) <= set("-")}
    assert list(rows) == list(CASES)
    assert all(row.keys() == {*Loader} and {*row.values()} <= {"yes", "no"} for row in rows.values())


@pytest.mark.usefixtures("daemon", "cdi")
def test_the_table_is_true(trial: Trial, loader: Loader) -> None:
    seen = {name: trial.served(case) for name, case in CASES.items()}
    assert seen == {name: table()[name][loader] for name in CASES}


@pytest.mark.usefixtures("daemon")
def test_the_number_of_mounts(trial: Trial, launch: Launch, loader: Loader) -> None:
    """It is what a strategy costs."""
    mounts = trial.node.cri.status(trial.container(Case("debian"))).oci["mounts"]
    ours = [mount for mount in mounts if str(launch.base) in mount["source"]]
    folders = [mount for mount in ours if Path(mount["source"]).is_dir()]
    icd = 1  # this driver has OpenCL
    expected = {Loader.FOLDERS: (2, 3 + icd), Loader.TREE: (1, 1 + icd), Loader.HWCAPS: (2, 3 + icd)}
    if loader is Loader.FILES:
        assert (len(folders), len(ours) > 40) == (0, True)
    else:
        assert (len(folders), len(ours)) == expected[loader]


@pytest.mark.usefixtures("daemon")
def test_images_without_glibc_start_unharmed(trial: Trial, images: Mapping[str, ImageSpec]) -> None:
    """With every strategy: their nodes are right, their own files what they were, their own libraries found."""
    cri = trial.node.cri
    for kind in ("musl", "static"):
        container = trial.container(Case(kind))
        assert {*nvidia_nodes(cri, container)} == {f"/dev/nvidia{each}" for each in ("1", "ctl", "-uvm", "-uvm-tools")}
        for path, entry in images[kind].extra.items():
            assert isinstance(entry, File)
            summed = cri.execute(container, "/bin/sha256sum", path).stdout
            assert summed.split()[0] == sha256(entry.content).hexdigest(), path
        if kind == "musl":
            assert cri.execute(container, "/bin/probe", "libown.so.1").stdout == "libown.so.1 loaded\n"


@pytest.mark.parametrize("loader", [Loader.FOLDERS], indirect=True)
def test_a_reload_changes_the_next_container(trial: Trial, daemon: NriGpu, launch: Launch) -> None:
    before = trial.node.cri.status(trial.container(Case("debian")))
    launch.with_policy('[driver]\nloader = "tree"\n')
    daemon.reload()
    after = trial.node.cri.status(trial.container(Case("debian")))
    assert before.env["LD_LIBRARY_PATH"] == f"{HWCAPS[0]}/x86-64-v2"
    assert after.env["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert "/usr/local/nvidia" in {mount["destination"] for mount in after.oci["mounts"]}


class OnAnOldCpu(NriGpu):
    """A daemon on a CPU without x86-64-v2, as /proc/cpuinfo shows it."""

    def command(self) -> list[str]:
        cpuinfo = self.launch.base / "cpuinfo"
        cpuinfo.write_text("processor : 0\nflags : fpu sse sse2 cx16 lahf_lm\n")
        script = f'mount --bind {cpuinfo} /proc/cpuinfo && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *super().command()]


@pytest.mark.parametrize("loader", [Loader.FOLDERS, Loader.HWCAPS], indirect=True)
def test_on_a_cpu_without_x86_64_v2_libraries_are_found(trial: Trial, launch: Launch, loader: Loader) -> None:
    """Glibc looks into no such folder there; the tunable makes it believe so here."""
    old = Case("debian", spec=ContainerSpec(env={"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-SSE4_2,-POPCNT"}))
    if loader is Loader.HWCAPS:
        with staged(launch) as daemon:
            assert trial.served(old) == "no", "what the rest of this test is about"
    with OnAnOldCpu(launch) as daemon:
        daemon.wait_staged()
        assert trial.served(old) == "yes"
        assert trial.served(Case("rhel", spec=old.spec)) == "yes"
