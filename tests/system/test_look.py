"""The observer's look, by its real child: what it prints of bundles and processes, and what it does with bad ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.node import Majors
from nri_gpu.observe.bundles import DETAILS_MAX, FAULTS_MAX
from nri_gpu.observe.looker import look_at_node
from nri_gpu.observe.looks import DeviceRequest, Line, NodeLook, SeenContainer, Unseen
from nri_gpu.observe.runtime_table import CONTAINERD, CRIO, DOCKER, PODMAN
from nri_gpu.stray.process_scan import HOLDERS_MAX
from nri_gpu.stray.uses import Extent, Use
from nri_gpu.verify.oci_bundles import SPEC_MAX, TASKS
from tests.support.builders import inventory
from tests.support.holding import FULL, MAJOR, ZERO, cgroup_of, holding, into
from tests.support.look_node import device_cgroups, spec, write_bundle
from tests.system.test_process_scan import AS_DROP_IN, CLOSED, MANY, ON_THE_HOST, UNSEEING, WITHOUT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes and cgroups")
ID, OTHER = ContainerId("ab" * 32), ContainerId("cd" * 32)
STATES: Final = "run/containerd", "run/k3s/containerd"
LIB, RUN = (f"{place}/containers/storage/overlay-containers" for place in ("var/lib", "run"))
NODE: Final = inventory(majors=Majors(nvidia=MAJOR))
SECRET: Final = "hunter2"
NAMES: Final = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute"}
GONE: Final = 1 << 22  # a pid that no process has


def tasks(root: Path, state: str = STATES[0]) -> Path:
    return root / state / TASKS


def device(number: DeviceNumber) -> dict[str, object]:
    return {"path": "/dev/x", "type": "c", "major": number[0], "minor": number[1]}


def concerned(**fields: object) -> Mapping[str, Any]:
    """A spec with a node of NVIDIA's."""
    return spec("train", **{"linux": {"devices": [device(FULL)]}, **fields})


async def looked(root: Path, **options: Any) -> NodeLook:  # noqa: ANN401
    return await look_at_node(NODE, root=root, **{"processes": False, **options})


async def only(root: Path) -> SeenContainer:
    look = await looked(root)
    [found] = look.containers
    return found


def printed(root: Path, *before: str, processes: bool = True) -> tuple[list[Line], bytes]:
    """What a look says, run by such a command, and all that it prints."""
    wish = {"owner": 0, "majors": [MAJOR], "numbers": [FULL], "processes": processes, "root": str(root)}
    command = [*before, sys.executable, "-I", "-m", "nri_gpu.observe.look"]
    done = subprocess.run(command, input=json.dumps(wish).encode(), capture_output=True, check=True)
    return [msgspec.json.decode(line, type=Line) for line in done.stdout.splitlines()], done.stdout + done.stderr


async def test_a_container_of_a_pod_with_what_the_kernel_lets_it_open(tmp_path: Path) -> None:
    with holding(tmp_path, FULL) as process, device_cgroups({ID: process.pid}):
        write_bundle(tasks(tmp_path), ID, concerned(), process.pid)
        found = await only(tmp_path)
    assert (found.runtime, found.pod, found.name, found.pid) == (CONTAINERD, "train", "main", process.pid)
    assert found.nodes == (FULL,)
    assert found.opens  # this machine's own cgroup lets through more than the spec says
    assert FULL in found.opens
    assert (found.allowed, found.fault) == ((), "")


async def test_a_process_that_is_not_in_the_container_is_not_believed(tmp_path: Path) -> None:
    write_bundle(tasks(tmp_path), ID, concerned(), os.getpid())
    found = await only(tmp_path)
    assert found.opens is None
    assert "is in no cgroup of this container" in found.fault


@pytest.mark.skipif(not ON_THE_HOST, reason="elsewhere a process that is not here may live all the same")
async def test_a_container_that_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    write_bundle(tasks(tmp_path), ID, concerned(), GONE)
    assert (await looked(tmp_path)).containers == ()


async def test_one_that_starts_has_no_process_yet(tmp_path: Path) -> None:
    (write_bundle(tasks(tmp_path), ID, concerned(), 1) / "init.pid").unlink()
    found = await only(tmp_path)
    assert (found.pid, found.opens, found.fault) == (0, None, "")


def docker(root: Path, **files: object) -> Path:
    """Docker's folder of the container, with these files. The container is in its containerd."""
    write_bundle(tasks(root), ID, concerned(), os.getpid(), "moby")
    folder = root / "var/lib/docker/containers" / ID
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


REQUESTS: Final = [
    {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0"], "Capabilities": None, "Options": None},
    {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}},
]


async def test_a_container_of_docker(tmp_path: Path) -> None:
    docker(tmp_path, **{"config.v2": {"Name": "/busy_turing"}, "hostconfig": {"DeviceRequests": REQUESTS}})
    found = await only(tmp_path)
    assert (found.runtime, found.name, found.pod) == (DOCKER, "busy_turing", "")
    assert found.requests == (DeviceRequest(driver="cdi", ids=("nvidia.com/gpu=0",)), DeviceRequest(count=-1))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.v2": "{"}, "cannot be understood"),
        ({"config.v2": {"Name": 7}}, "cannot be understood"),
        ({"config.v2": {}, "hostconfig": "[" * 100_000}, "cannot be understood"),
        ({"config.v2": " " * (DETAILS_MAX + 1)}, "config.v2.json for it cannot be read: it has"),
        ({"config.v2": {"Name": None}}, "cannot be understood"),
    ],
)
async def test_dockers_own_files_may_be_bad(tmp_path: Path, files: Mapping[str, object], why: str) -> None:
    docker(tmp_path, **files)
    found = await only(tmp_path)
    assert found.name in (ID[:12], "")
    assert why in found.fault


async def test_docker_may_keep_its_files_elsewhere_and_ask_for_nothing(tmp_path: Path) -> None:
    folder = docker(tmp_path, hostconfig={"DeviceRequests": None}, **{"config.v2": {"Name": "/a"}})
    assert (await only(tmp_path)).requests == ()
    shutil.rmtree(folder)
    assert (await only(tmp_path)).name == ID[:12]


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[int]:
    """A process in a cgroup of the container's name, that has a node open."""
    with cgroup_of(ID) as cgroup, holding(tmp_path, FULL, before=into(cgroup)) as process:
        yield process.pid


def userdata(root: Path, pid: object, content: object, *, where: str = LIB) -> None:
    for folder in (root / RUN / ID / "userdata", root / where / ID / "userdata"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / RUN / ID / "userdata/pidfile").write_text(str(pid))
    (root / where / ID / "userdata/config.json").write_text(json.dumps(content))


async def test_a_container_of_podman(tmp_path: Path, contained: int) -> None:
    userdata(tmp_path, contained, concerned(annotations={"io.container.manager": "libpod"}))
    found = await only(tmp_path)
    assert (found.runtime, found.name, found.pid, found.nodes) == (PODMAN, ID[:12], contained, (FULL,))


async def test_a_container_of_cri_o(tmp_path: Path) -> None:
    """After its sources, by its cgroup. Annotations of the pod are on it, too, and say nothing by containerd's keys."""
    annotations = {
        "io.container.manager": "cri-o",
        "io.kubernetes.cri-o.ContainerType": "container",
        "io.kubernetes.cri-o.SandboxID": OTHER,
        "io.kubernetes.container.name": "main",
        "io.kubernetes.pod.name": "train",
        "io.kubernetes.pod.namespace": "research",
        "io.kubernetes.pod.uid": "7d2e",
        "io.kubernetes.cri.sandbox-name": "another",
    }
    with cgroup_of(f"crio-{ID}") as cgroup, holding(tmp_path, FULL, before=into(cgroup)) as process:
        userdata(tmp_path, process.pid, concerned(annotations=annotations), where=RUN)
        found = await only(tmp_path)
    assert (found.runtime, found.namespace, found.pod, found.name) == (CRIO, "research", "train", "main")
    assert (found.pod_uid, found.sandbox) == ("7d2e", False)


@pytest.mark.parametrize("reused", [True, False])
async def test_what_podman_keeps_of_one_that_has_ended(tmp_path: Path, reused: bool) -> None:
    """Its pid may be another process's by now."""
    userdata(tmp_path, os.getpid() if reused else GONE, concerned())
    look = await looked(tmp_path)
    assert (look.containers, look.unseen) == ((), ())


async def test_a_spec_that_is_nowhere(tmp_path: Path, contained: int) -> None:
    userdata(tmp_path, contained, concerned())
    shutil.rmtree(tmp_path / LIB)
    assert "its config.json is not in the folders" in sentences(await looked(tmp_path))


def sentences(look: NodeLook) -> str:
    return "\n".join(each.sentence for each in look.unseen)


def bad_link(bundle: Path) -> None:
    (bundle / "config.json").rename(bundle.parents[3] / "outside.json")
    (bundle / "config.json").symlink_to("../../../outside.json")


def bad_folder(bundle: Path) -> None:
    bundle.rename(bundle.parents[3] / "outside")
    bundle.symlink_to("../../../outside")


def bad_pipe(bundle: Path) -> None:
    (bundle / "config.json").unlink()
    os.mkfifo(bundle / "config.json")


def holds(text: str, file: str = "config.json") -> Callable[[Path], object]:
    return lambda bundle: (bundle / file).write_text(text)


BAD: Final[Mapping[str, tuple[Callable[[Path], object], str]]] = {
    "no JSON": (holds("\0\x1b[2J"), "cannot be understood"),
    "17 MB": (holds(" " * (SPEC_MAX + 1)), "its config.json cannot be read: it has 16777217 bytes"),
    "deeply nested": (holds("[" * 1_000_000), "cannot be understood"),
    "nested where it is passed over": (holds('{"x":' + '{"x":' * 1_000_000), "cannot be understood"),
    "of another shape": (holds(json.dumps({"linux": [SECRET]})), "cannot be understood"),
    "an environment of another shape": (holds(json.dumps({"process": {"env": {SECRET: SECRET}}})), "be understood"),
    "annotations of another shape": (holds(json.dumps({"annotations": {SECRET: [SECRET]}})), "cannot be understood"),
    "a link out of its folder": (bad_link, "its config.json cannot be read: it is a link"),
    "a folder that is a link": (bad_folder, "it is no folder, or a link"),
    "a pipe": (bad_pipe, "its config.json cannot be read: it is no regular file"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD.values(), ids=BAD.keys())
async def test_a_bad_bundle_is_named_and_hides_no_other(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(write_bundle(tasks(tmp_path), ID, concerned(), os.getpid()))
    write_bundle(tasks(tmp_path), OTHER, concerned(), os.getpid())
    look = await looked(tmp_path)
    assert [each.id for each in look.containers] == [OTHER]
    [unseen] = look.unseen
    assert f"container {ID[:48]}... of k8s.io: " in unseen.sentence
    assert why in unseen.sentence
    assert SECRET not in unseen.sentence
    assert unseen.sentence.isprintable()


@pytest.mark.parametrize("pid", [SECRET, "-1", "0x7", str(GONE + 1), "9" * 32, "", "1" * 33])
async def test_a_pid_that_names_no_process(tmp_path: Path, pid: str) -> None:
    (write_bundle(tasks(tmp_path), ID, concerned(), 1) / "init.pid").write_text(pid)
    found = await only(tmp_path)
    assert found.fault
    assert SECRET not in found.fault


async def test_a_bundle_that_is_gone_while_it_is_read(tmp_path: Path) -> None:
    (write_bundle(tasks(tmp_path), ID, concerned(), 1) / "config.json").unlink()
    look = await looked(tmp_path)
    assert (look.containers, look.unseen) == ((), ())


async def test_the_same_container_in_two_folders(tmp_path: Path) -> None:
    """A folder may be mounted twice. If they differ, that is said."""
    for state in STATES:
        write_bundle(tasks(tmp_path, state), ID, concerned(), os.getpid())
    look = await looked(tmp_path)
    assert (len(look.containers), look.unseen) == (1, ())
    (tasks(tmp_path, STATES[1]) / "k8s.io" / ID / "init.pid").write_text(str(os.getppid()))
    look = await looked(tmp_path)
    assert len(look.containers) == 1
    assert "have the same id: only the first is shown" in sentences(look)


async def test_of_many_bad_bundles_some_are_named(tmp_path: Path) -> None:
    for at in range(FAULTS_MAX + 5):
        write_bundle(tasks(tmp_path), f"{at:064x}", [], 1)
    look = await looked(tmp_path)
    assert len(look.unseen) == FAULTS_MAX + 1
    assert "5 more containers whose bundles cannot be read" in sentences(look)


async def test_a_node_without_any_runtime_is_no_clean_bill(tmp_path: Path) -> None:
    assert "no folder of containerd, Docker, Podman or CRI-O is here" in sentences(await looked(tmp_path))


async def test_a_containerd_of_another_folder(tmp_path: Path) -> None:
    write_bundle(tasks(tmp_path, "srv/own"), ID, concerned(), os.getpid())
    assert [each.id for each in (await looked(tmp_path, states=["/srv/own"])).containers] == [ID]
    assert "no containerd keeps containers below" in sentences(await looked(tmp_path, states=["/srv/none"]))


def planted(value: object) -> object:
    """The same with a secret in each text."""
    match value:
        case dict():
            return {key: planted(each) for key, each in value.items()} | {f"x{SECRET}": SECRET}
        case list():
            return [*map(planted, value), *([SECRET] if any(isinstance(each, str) for each in value) else [])]
        case str():
            return f"{value}{SECRET}"
    return value


WHOLE: Final = {  # a field of each kind that runtime-spec has
    "ociVersion": "1.2.0",
    "hostname": "host",
    "domainname": "name",
    "root": {"path": "rootfs"},
    "process": {
        "args": ["serve", "--token=x"],
        "commandLine": "serve",
        "cwd": "/",
        "env": ["TOKEN=x", "NVIDIA_VISIBLE_DEVICE=x", "NVIDIA_VISIBLE_DEVICES_2=x"],
        "apparmorProfile": "x",
        "selinuxLabel": "x",
        "user": {"username": "x", "uid": 0},
        "capabilities": {"bounding": ["CAP_CHOWN"]},
    },
    "mounts": [{"destination": "/run/secrets/x", "source": "/var/x", "type": "bind", "options": ["ro"]}],
    "annotations": {"note": "x", "io.kubernetes.cri.image-name": "x", "cdi.k8s.io/x": "vendor.com/nic=x"},
    "hooks": {"prestart": [{"path": "/bin/x", "args": ["x"], "env": ["TOKEN=x"]}]},
    "linux": {
        "cgroupsPath": "/x",
        "sysctl": {"x": "x"},
        "seccomp": {"syscalls": [{"names": ["x"], "action": "x"}]},
        "namespaces": [{"type": "x", "path": "/x"}],
        "maskedPaths": ["/x"],
    },
}


def test_no_field_of_any_file_is_printed_but_those_that_are_read_for_it(tmp_path: Path) -> None:
    """A secret in each field of each file, and in each file that lies beside them."""
    content: Any = planted(WHOLE)
    content["hooks"] = {"prestart": [{**content["hooks"]["prestart"][0], "path": f"/{SECRET}/nvidia-ctk"}]}
    content["process"]["env"] += [f"{name}={value}" for name, value in NAMES.items()]
    content["linux"] |= {"devices": [{**device(FULL), "path": f"/dev/{SECRET}", "x": SECRET}]}
    content["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm", "x": SECRET}]}
    content["mounts"].append({"source": f"/{SECRET}/libcuda.so.580.95.05", "destination": f"/{SECRET}"})
    files: Any = {
        "config.v2": {"Name": "/busy", "Config": {"Env": ["TOKEN=x"], "Cmd": ["x"]}, "Path": "x", "LogPath": "x"},
        "hostconfig": {"Binds": ["x"], "LogConfig": {"Config": {"x": "x"}}, "ContainerIDFile": "x"},
    }
    files = {name: planted(each) for name, each in files.items()}
    files["config.v2"]["Name"] = "/busy"
    files["hostconfig"]["DeviceRequests"] = [{**REQUESTS[0], "Options": {"x": SECRET}, "Capabilities": [[SECRET]]}]
    folder = docker(tmp_path, **files)
    bundle = tasks(tmp_path) / "moby" / ID
    (bundle / "config.json").write_text(json.dumps(content))
    for beside in (folder, bundle):
        (beside / "x.json").write_text(SECRET)
    write_bundle(tasks(tmp_path), OTHER, content, os.getpid())
    lines, text = printed(tmp_path)
    found = {each.id: each for each in lines if isinstance(each, SeenContainer)}
    assert {*found} == {ID, OTHER}
    assert not [each for each in lines if isinstance(each, Unseen)]
    assert (found[ID].name, len(found[ID].requests), found[ID].asked) == ("busy", 1, "all")
    assert (found[OTHER].capabilities, found[OTHER].hooks) == ("compute", ("nvidia-ctk",))
    assert found[OTHER].driver_versions == ("580.95.05",)
    assert SECRET.encode() not in text


async def test_processes_with_a_node_open(tmp_path: Path) -> None:
    """The looker's own are left out, so the child is asked by another."""
    with cgroup_of(ID) as cgroup, holding(tmp_path, ZERO, FULL, before=into(cgroup)) as process:
        lines, _ = printed(tmp_path)
        [use] = [each for each in lines if isinstance(each, Use) and each.pid == process.pid]
        look = await looked(tmp_path, processes=True)
    assert {ZERO, FULL} <= {*use.numbers}
    assert process.pid not in {each.pid for each in look.uses}
    assert isinstance(lines[-1], Extent)
    assert look.extent
    assert look.extent.whole is ON_THE_HOST


async def test_a_program_with_control_characters_in_its_name(tmp_path: Path) -> None:
    """It is kept as it is, in JSON; who shows it escapes it."""
    odd = tmp_path / "a\x1b[2Jb"
    odd.symlink_to(sys.executable)
    name = "open('/proc/self/comm', 'w').write('\\x1b[2J\\n')"
    script = f"import os, sys\n{name}\nos.open(sys.argv[1], os.O_RDWR)\nprint('open', flush=True)\nsys.stdin.read()"
    with holding(tmp_path, FULL, script=script) as process:
        lines, text = printed(tmp_path)
    assert process.pid in {each.pid for each in lines if isinstance(each, Use)}
    assert b"\x1b" not in text


def test_of_many_processes_some_are_printed(tmp_path: Path) -> None:
    with cgroup_of(ID) as cgroup, holding(tmp_path, FULL, script=MANY, before=into(cgroup)):
        uses = [each for each in printed(tmp_path)[0] if isinstance(each, Use) and f"/{ID}" in str(each.cgroups)]
    assert len(uses) == HOLDERS_MAX


@pytest.mark.parametrize(("before", "whole", "into_all"), UNSEEING.values(), ids=UNSEEING.keys())
def test_a_look_that_may_see_less(tmp_path: Path, before: Sequence[str], whole: bool, into_all: bool) -> None:
    """Without hostPID, behind hidepid, without capabilities: it ends, and tells how far it reaches."""
    write_bundle(tasks(tmp_path), ID, concerned(), os.getpid())
    lines, _ = printed(tmp_path, *before)
    [extent] = [each for each in lines if isinstance(each, Extent)]
    assert (extent.whole, extent.closed <= CLOSED) == (whole, into_all)


def test_folders_of_others_are_named_and_hide_nothing_else(tmp_path: Path) -> None:
    folders = [tasks(tmp_path), tmp_path / LIB, tmp_path / "var/lib/docker/containers"]
    for folder in folders:
        folder.mkdir(parents=True)
        for each in (folder.parent, folder):
            os.chown(each, 1, 1)
            each.chmod(0o700)
    write_bundle(tasks(tmp_path, STATES[1]), ID, concerned(), os.getpid())
    lines, _ = printed(tmp_path, *WITHOUT)
    assert [each.id for each in lines if isinstance(each, SeenContainer)] == [ID]
    [denied] = [each.sentence for each in lines if isinstance(each, Unseen) and each.what == "bundles"]
    assert f"{folders[0]} cannot be listed" in denied


def test_rules_that_are_not_mounted_here(tmp_path: Path) -> None:
    with holding(tmp_path, FULL) as process, device_cgroups({ID: process.pid}):
        write_bundle(tasks(tmp_path), ID, concerned(), process.pid)
        hide = 'umount -R /sys/fs/cgroup; exec "$@"'
        lines, _ = printed(tmp_path, "unshare", "--mount", "sh", "-c", hide, "sh", *AS_DROP_IN)
    [found] = [each for each in lines if isinstance(each, SeenContainer)]
    assert found.opens is None
    assert [(each.what, found.fault in each.sentence) for each in lines if isinstance(each, Unseen)] == [
        ("rules", True)
    ]


async def test_a_look_that_takes_too_long_is_told(tmp_path: Path) -> None:
    look = await looked(tmp_path, processes=True, limit_s=0.001)
    assert (look.containers, look.uses, look.extent) == ((), (), None)
    assert [each.what for each in look.unseen] == ["processes", "look"]
    assert "took longer than 0 s, and was stopped" in sentences(look)


def test_unseen_is_the_only_word_for_what_is_missing(tmp_path: Path) -> None:
    lines, _ = printed(tmp_path, processes=False)
    assert [type(each) for each in lines] == [Unseen]
