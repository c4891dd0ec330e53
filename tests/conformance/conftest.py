"""Real containerds for the tests: one of each kind a session, emptied after every test."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests import ground
from tests.support import cleanup, packages
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.containerd import Containerd
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.driver_root import STUBS, compile_stub, make_driver_root
from tests.support.glibc import glibc_files
from tests.support.image import Entry
from tests.support.waiting import wait_for

Boot = Callable[[packages.Runtime, Cgroup], Containerd]


def launch_on(node: Containerd, folder: Path) -> Launch:
    return Launch(folder / "d", node.nri_socket, driver_root=make_driver_root(folder / "driver"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On those containerds that the test's mark names, else on the oldest and the newest; a short one on each."""
    if "runtime" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("containerd")
    there: Sequence[packages.Version | Path] = packages.available()
    if others := metafunc.config.getoption("containerds"):
        there = [Path(each) for each in others.split(os.pathsep)]
    elif not metafunc.config.getoption("everywhere") and not metafunc.definition.get_closest_marker("short"):
        there = (there[0], there[-1])
    metafunc.parametrize(
        "runtime", mark.args if mark and mark.args and not others else there, ids=str, indirect=True, scope="module"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long ones to `make conformance`."""
    long = [each for each in items if each.get_closest_marker("long")]
    if long and not config.getoption("everywhere"):
        config.hook.pytest_deselected(items=long)
        items[:] = [each for each in items if each not in long]


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest) -> packages.Runtime:
    if os.geteuid():
        pytest.fail("these tests boot a real containerd and need root: run them with sudo, or deselect containerd")
    if not isinstance(request.param, Path):
        return packages.fetch(request.param)
    found = packages.inspect(request.param)
    assert found, f"{request.param} has no containerd with its shim and ctr"
    return found


@pytest.fixture(scope="module", params=Cgroup, ids=str)
def cgroup(request: pytest.FixtureRequest) -> Cgroup:
    """Every cgroup generation this machine can show to a containerd."""
    wanted: Cgroup = request.param
    if wanted is Cgroup.V1 and host_cgroup() is Cgroup.V2:
        pytest.skip("this machine has cgroup v2 only, and v1 cannot be had beside it")
    return wanted


@pytest.fixture(scope="session")
def boot() -> Iterator[Boot]:
    """Containerds of every kind: booted when first asked for, and all of them live until the session ends."""
    with ExitStack() as stack:
        yield cache(lambda runtime, cgroup: stack.enter_context(Containerd(runtime, cgroup=cgroup)))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets. Asked for before a node, it outlives the node's pods."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    """What an image needs for `/bin/probe LIBRARY...`, which says where the loader found each."""
    return glibc_files({"/bin/probe": compile_stub(STUBS / "probe.c", tmp_path_factory.mktemp("probe") / "probe", "")})


@pytest.fixture(scope="module")
def module_node(boot: Boot, runtime: packages.Runtime) -> Containerd:
    return boot(runtime, host_cgroup())


@pytest.fixture(scope="module")
def module_cgroup_node(boot: Boot, runtime: packages.Runtime, cgroup: Cgroup) -> Containerd:
    return boot(runtime, cgroup)


@pytest.fixture
def node(module_node: Containerd) -> Iterator[Containerd]:
    """A running containerd on the machine's own cgroups, without pods. Shared: do not stop it."""
    yield module_node
    module_node.cri.remove_all()


@pytest.fixture
def cgroup_node(module_cgroup_node: Containerd) -> Iterator[Containerd]:
    """The same, once on each cgroup generation."""
    yield module_cgroup_node
    module_cgroup_node.cri.remove_all()


@pytest.fixture
def fresh_node(runtime: packages.Runtime) -> Iterator[Containerd]:
    """A running containerd of the test's own, to kill and restart."""
    with Containerd(runtime) as running:
        yield running


@pytest.fixture
def fresh_daemon(fresh_node: Containerd, tmp_path: Path) -> Iterator[NriGpu]:
    """nri-gpu, serving the containerd that the test may kill."""
    with staged(launch_on(fresh_node, tmp_path)) as running:
        yield running


@pytest.fixture
def launch(node: Containerd, tmp_path: Path) -> Launch:
    """How to start nri-gpu on the shared node: four simulated GPUs, a made-up driver."""
    return launch_on(node, tmp_path)


@pytest.fixture
def daemon(launch: Launch) -> Iterator[NriGpu]:
    """nri-gpu, serving the shared node, with the driver's files staged."""
    with staged(launch) as running:
        yield running


@pytest.fixture(scope="module")
def module_launch(module_node: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The same for a whole module."""
    return launch_on(module_node, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def module_daemon(module_launch: Launch) -> Iterator[NriGpu]:
    with staged(module_launch) as running:
        yield running


@pytest.fixture
def shared_daemon(node: Containerd, module_daemon: NriGpu) -> NriGpu:
    """One nri-gpu for all tests of a module, none of which stops it: it holds nothing when a test begins."""
    assert node.nri_socket == module_daemon.launch.socket
    module_daemon.wait_held({})
    return module_daemon


@pytest.fixture
def kubepods(node: Containerd) -> Iterator[str]:
    """The cgroup that a kubelet would make for all pods; taken away with what is in it, as a kubelet does."""
    yield f"/{node.base.name}/kubepods"
    node.cri.remove_all()
    root = Path(f"/proc/{node.supervisor_pid}/root{cleanup.CGROUPS}")
    for cgroup in cleanup.cgroups_named(node.base.name, root):
        if "kubepods" in cgroup.parts:
            cgroup.rmdir()


def injected(adjustment: Mapping[str, object]) -> dict[str, str]:
    """The annotation of a pod by which `injector` adds that (tests/ground/nri-plugins): a ContainerAdjustment."""
    return {"nri-gpu.bench/adjustment": json.dumps(adjustment)}


@contextmanager
def injecting(node: Containerd, index: str) -> Iterator[None]:
    """A plugin that adds to the containers of a pod what `injected` says, and that is asked in this place."""
    before = node.log_path.stat().st_size
    program = [str(ground.need("nri-plugins") / "injector"), "-socket", str(node.nri_socket), "-idx", index]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            name = f"{index}-injector".encode()
            wait_for("the injector", lambda: name in node.log_path.read_bytes()[before:], 20)
            yield
        finally:
            process.kill()


@pytest.fixture
def injector(node: Containerd) -> Iterator[None]:
    """Such a plugin that is asked before ours."""
    with injecting(node, "05"):
        yield


@pytest.fixture
def later_injector(node: Containerd) -> Iterator[None]:
    """Such a plugin that is asked after ours, and after the guard."""
    with injecting(node, "95"):
        yield
