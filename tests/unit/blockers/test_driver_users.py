"""Who uses the driver: each situation with the list it stands on, its line, and what ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from msgspec import Struct, convert
from msgspec.structs import replace

from nri_gpu.blockers.blocker import Blocker, NodeGpu
from nri_gpu.blockers.driver_users import SeenUsers, blockers, driver_devices
from nri_gpu.blockers.module_references import DriverModule
from nri_gpu.blockers.owners import PIDS_MAX, MpsProcess
from nri_gpu.stray.uses import Use
from nri_gpu.verify.oci_bundles import Bundle
from nri_gpu.verify.oci_spec import Spec

DEVICES: Final = {
    "nvidia": frozenset({195}),
    "nvidiactl": frozenset({195}),
    "nvidia-uvm": frozenset({510}),
    "nvidia-caps": frozenset({511}),
    "nvidia-nvswitch": frozenset({512}),
}
GPUS: Final = tuple(
    NodeGpu(
        index=index,
        uuid=f"GPU-{index}",
        pci_bus_id=f"0000:0{index}:00.0",
        minor_number=index,
        drm=((f"card{index}", 226, index),),
    )
    for index in (0, 1)
)
GPU_0, GPU_1, CTL, UVM, CAP, SWITCH = (195, 0), (195, 1), (195, 255), (510, 0), (511, 3), (512, 255)
CARD_0, INTEL = (226, 0), (226, 7)
ID: Final = "ab" * 32
CRI: Final = "io.kubernetes.cri."
LIBCUDA: Final = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"


def use(program: str, cgroup: str, *numbers: tuple[int, int], pid: int = 7, libcuda: bool = False) -> Use:
    return Use(pid, 1, program, (cgroup,), numbers, libcuda=libcuda)


def bundle(
    *numbers: tuple[int, int],
    of: Mapping[str, str] = {},
    mounts: tuple[str, ...] = (),
    privileged: bool = False,
    id_: str = ID,
) -> Bundle:
    """A container. of: what CRI says of its pod, if it has one."""
    rules = [{"allow": True, "access": "rwm"}] * privileged
    spec = {
        "annotations": {f"{CRI}{name.replace('_', '-')}": value for name, value in of.items()},
        "linux": {
            "devices": [{"path": "/dev/x", "type": "c", "major": major, "minor": minor} for major, minor in numbers],
            "resources": {"devices": rules},
        },
        "mounts": [{"destination": "/x", "source": source} for source in mounts],
    }
    return Bundle(id_, "k8s.io" if of else "moby", convert(spec, Spec), 7)


POD: Final = {"sandbox_name": "train", "sandbox_namespace": "ml", "container_name": "main", "sandbox_uid": "7d2e-1"}
STATIC: Final = {**POD, "sandbox_name": "agent-node1", "sandbox_uid": "0123456789abcdef0123456789abcdef"}
END_POD: Final = (
    "kubectl -n ml get pod train -o jsonpath='{.metadata.ownerReferences}'",
    "# scale down what owns it, or drain the node; if nothing owns it:",
    "kubectl -n ml delete pod train",
)
PYTHON: Final = "/usr/bin/python3"


class Case(Struct, frozen=True):
    """A situation, and what is said of it. keeps: whether it keeps the driver loaded, or only breaks."""

    seen: SeenUsers
    line: str
    next: tuple[str, ...]
    keeps: bool = True


def running(*processes: Use) -> SeenUsers:
    return SeenUsers(processes=processes)


CASES: Final[Mapping[str, Case]] = {
    "a pod with a node that no process has open": Case(
        SeenUsers(bundles=(bundle(GPU_0, CTL, of=POD),)),
        "pod ml/train: has /dev/nvidia0, /dev/nvidiactl, open in no process",
        END_POD,
    ),
    "a pod that uses its GPU": Case(
        SeenUsers(
            bundles=(bundle(GPU_0, CTL, UVM, CAP, of=POD),),
            processes=(use(PYTHON, f"/kubepods/pod1/{ID}", GPU_0, CTL, libcuda=True),),
        ),
        "pod ml/train: has /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm and 1 more, open in pid 7 /usr/bin/python3",
        END_POD,
    ),
    "a privileged pod that has a GPU open": Case(
        SeenUsers(
            bundles=(bundle(GPU_0, GPU_1, privileged=True, of=POD),),
            processes=(use(PYTHON, f"/kubepods/cri-containerd-{ID}.scope", GPU_1),),
        ),
        "pod ml/train: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        END_POD,
    ),
    "a static pod": Case(
        SeenUsers(
            bundles=(bundle(GPU_0, of=STATIC),),
            manifests={"agent": "/etc/kubernetes/manifests/agent.yaml", "a": "/etc/kubernetes/manifests/a.yaml"},
        ),
        "static pod ml/agent-node1: has /dev/nvidia0, open in no process",
        (
            "mv /etc/kubernetes/manifests/agent.yaml /root/",
            "# the kubelet ends a static pod whose manifest is gone",
        ),
    ),
    "a static pod whose manifest is not found": Case(
        SeenUsers(bundles=(bundle(GPU_0, of=STATIC),)),
        "static pod ml/agent-node1: has /dev/nvidia0, open in no process",
        ("# move its manifest out of the kubelet's staticPodPath, which /var/lib/kubelet/config.yaml names",),
    ),
    "a container of Docker": Case(
        SeenUsers(bundles=(bundle(GPU_1),), processes=(use(PYTHON, f"/system.slice/docker-{ID}.scope", GPU_1),)),
        "container moby abababababab: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        (f"docker stop {ID}",),
    ),
    "a container of ctr, by any id": Case(
        SeenUsers(
            bundles=(replace(bundle(GPU_1, id_="mine"), namespace="default"),),
            processes=(use(PYTHON, "/default/mine/below", GPU_1),),
        ),
        "container default mine: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        ("ctr -n default task rm -f mine",),
    ),
    "a container of Podman": Case(
        running(use(PYTHON, f"/machine.slice/libpod-{ID}.scope/container", GPU_1)),
        "container abababababab: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        (f"podman stop {ID}",),
    ),
    "a user's container": Case(
        running(use(PYTHON, f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", GPU_1)),
        "container abababababab of user 1000: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        ("kill 7",),
    ),
    "a container of CRI-O": Case(
        running(use(PYTHON, f"/kubepods.slice/crio-{ID}.scope", GPU_1)),
        "container abababababab: has /dev/nvidia1, open in pid 7 /usr/bin/python3",
        (f"crictl inspect {ID}", "# that names its pod: have kubectl end it"),
    ),
    "a service": Case(
        running(use(PYTHON, "/system.slice/system-job.slice/job@1.service/sshd.service", CTL)),
        "unit job@1.service: has /dev/nvidiactl, open in pid 7 /usr/bin/python3",
        ("systemctl stop job@1.service",),
    ),
    "our own daemon": Case(
        running(use(PYTHON, "/system.slice/nri-gpu.service", GPU_0)),
        "unit nri-gpu.service: has /dev/nvidia0, open in pid 7 /usr/bin/python3",
        (
            "# it waits for events of GPUs that containers hold, and lets go once none does;",
            '# if it does not: events = "held" below [health] in the policy, and systemctl reload nri-gpu',
        ),
    ),
    "a session of a user": Case(
        running(
            use(PYTHON, "/user.slice/user-1000.slice/session-3.scope", GPU_0),
            use(PYTHON, "/user.slice/user-1000.slice/session-3.scope", GPU_1, pid=8),
        ),
        "process session 3 of user 1000: has /dev/nvidia0, /dev/nvidia1, open in pid 7 /usr/bin/python3, pid 8 "
        "/usr/bin/python3",
        ("kill 7 8",),
    ),
    "a process of a user's manager": Case(
        running(use(PYTHON, "/user.slice/user-1000.slice/user@1000.service/app.slice/x.service", GPU_0)),
        "process user 1000: has /dev/nvidia0, open in pid 7 /usr/bin/python3",
        ("kill 7",),
    ),
    "a process that is nowhere, by a name with control characters": Case(
        running(use("/tmp/\x1b[2J;\n", "/init.scope", GPU_0)),
        r"process /tmp/\x1b[2J;\n: has /dev/nvidia0, open in pid 7 /tmp/\x1b[2J;\n",
        ("kill 7",),
    ),
    "a process that hangs in the kernel": Case(
        running(replace(use(PYTHON, "/", GPU_0), waits=True)),
        "process /usr/bin/python3: has /dev/nvidia0, open in pid 7 /usr/bin/python3",
        ("kill 7", "# pid 7 waits in the kernel: if it does not end, only a reboot ends it"),
    ),
    "our MPS daemon": Case(
        SeenUsers(
            processes=(use("/x/nvidia-cuda-mps-server", "/system.slice/nri-gpu.service", GPU_0),),
            mps={7: MpsProcess(6, "/run/nri-gpu/mps/clients/GPU-0.ff/pipe")},
        ),
        "MPS daemon with pid 6: has /dev/nvidia0, open in pid 7 /x/nvidia-cuda-mps-server",
        ("echo quit | CUDA_MPS_PIPE_DIRECTORY=/run/nri-gpu/mps/clients/GPU-0.ff/pipe nvidia-cuda-mps-control",),
    ),
    "an MPS daemon that has a unit": Case(
        SeenUsers(
            processes=(use("/usr/bin/nvidia-cuda-mps-server", "/system.slice/nvidia-mps.service", GPU_0),),
            mps={7: MpsProcess(6, "/tmp/nvidia-mps")},
        ),
        "MPS daemon nvidia-mps.service: has /dev/nvidia0, open in pid 7 /usr/bin/nvidia-cuda-mps-server",
        ("systemctl stop nvidia-mps.service",),
    ),
    "an X server of a display manager": Case(
        running(use("/usr/lib/xorg/Xorg", "/system.slice/lightdm.service", CARD_0)),
        "display lightdm.service: has /dev/dri/card0, open in pid 7 /usr/lib/xorg/Xorg",
        ("systemctl stop lightdm.service",),
    ),
    "a Wayland server of a session": Case(
        running(use("/usr/bin/gnome-shell", "/user.slice/user-1000.slice/session-2.scope", CARD_0)),
        "display gnome-shell: has /dev/dri/card0, open in pid 7 /usr/bin/gnome-shell",
        ("# this ends all graphical sessions, and what runs in them:", "systemctl isolate multi-user.target"),
    ),
    "DCGM": Case(
        running(use("/usr/bin/nv-hostengine", "/system.slice/nvidia-dcgm.service", CTL)),
        "monitor nvidia-dcgm.service: has /dev/nvidiactl, open in pid 7 /usr/bin/nv-hostengine",
        ("systemctl stop nvidia-dcgm.service",),
    ),
    "the fabric manager": Case(
        running(use("/usr/bin/nv-fabricmanager", "/system.slice/nvidia-fabricmanager.service", SWITCH)),
        "fabric manager nvidia-fabricmanager.service: has /dev/nvidia-nvswitch255, open in pid 7 "
        "/usr/bin/nv-fabricmanager",
        ("systemctl stop nvidia-fabricmanager.service",),
    ),
    "the persistence daemon, whose program was replaced": Case(
        running(use("/usr/bin/nvidia-persistenced (deleted)", "/system.slice/nvidia-persistenced.service", GPU_0)),
        "persistence nvidia-persistenced.service: has /dev/nvidia0, open in pid 7 /usr/bin/nvidia-persistenced "
        "(deleted)",
        ("systemctl stop nvidia-persistenced.service",),
    ),
    "a service that maps libcuda": Case(
        running(use(PYTHON, "/system.slice/job.service", libcuda=True)),
        "unit job.service: maps libcuda, pid 7 /usr/bin/python3",
        ("systemctl stop job.service",),
        keeps=False,
    ),
    "a pod with files of the driver": Case(
        SeenUsers(bundles=(bundle(mounts=(LIBCUDA, "/etc/hosts"), of=POD),)),
        f"pod ml/train: mounts 1 file of the driver, such as {LIBCUDA}",
        END_POD,
        keeps=False,
    ),
}


def line(each: Blocker) -> str:
    return f"{each.kind} {each.name}: {each.what}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_situation_its_list_and_what_ends_it(case: Case) -> None:
    keeping, breaking = blockers(replace(case.seen, devices=DEVICES, gpus=GPUS))
    found, other = (keeping, breaking) if case.keeps else (breaking, keeping)
    assert ([(line(each), each.next) for each in found], other) == ([(case.line, case.next)], ())


NOBODY: Final[Mapping[str, SeenUsers]] = {
    "a privileged pod, whose spec has every node": SeenUsers(bundles=(bundle(GPU_0, CTL, privileged=True, of=POD),)),
    "a pod with another vendor's GPU": SeenUsers(bundles=(bundle(INTEL, of=POD),)),
    "an X server on another vendor's GPU": running(use("/usr/lib/xorg/Xorg", "/system.slice/gdm.service", INTEL)),
    "a pod that mounts other libraries": SeenUsers(bundles=(bundle(mounts=("/usr/lib/libc.so.6",), of=POD),)),
    "references that open files explain": SeenUsers(
        files={GPU_0: 1, UVM: 1, CARD_0: 1, (195, 254): 1, INTEL: 9},
        modules=tuple(DriverModule(each, 1) for each in ("nvidia", "nvidia_uvm", "nvidia_drm", "nvidia_modeset")),
    ),
    "modules that nobody else uses": SeenUsers(modules=(DriverModule("nvidia", 1, ("nvidia_uvm",)),)),
}


@pytest.mark.parametrize("seen", NOBODY.values(), ids=NOBODY.keys())
def test_nobody(seen: SeenUsers) -> None:
    assert blockers(replace(seen, devices=DEVICES, gpus=GPUS)) == ((), ())


def everybody() -> SeenUsers:
    seen = [case.seen for case in reversed([*CASES.values()])]
    return SeenUsers(
        devices=DEVICES,
        gpus=GPUS,
        bundles=tuple(replace(each, id=f"{number:064x}") for number, one in enumerate(seen) for each in one.bundles),
        processes=tuple(
            replace(each, pid=number) for number, one in enumerate(seen) for each in one.processes if not one.bundles
        ),
        modules=(DriverModule("nvidia", 99, ("gdrdrv",)), DriverModule("gdrdrv", 0)),
    )


def test_workloads_end_before_what_serves_them_and_modules_last() -> None:
    kinds = [each.kind for each in blockers(everybody())[0]]
    assert list(dict.fromkeys(kinds)) == [
        "pod",
        "static pod",
        "container",
        "process",
        "unit",
        "MPS daemon",
        "display",
        "monitor",
        "fabric manager",
        "persistence",
        "module",
        "references",
    ]


def test_of_one_gpu_only_its_users_are_named() -> None:
    keeping, breaking = blockers(everybody(), GPUS[1])
    assert breaking == ()
    assert {"GPU-1"} == {uuid for each in keeping for uuid in each.gpu_uuids if each.gpu_uuids == ("GPU-1",)}
    assert all("GPU-1" in each.gpu_uuids for each in keeping)
    assert not {"monitor", "fabric manager", "module", "references"} & {each.kind for each in keeping}


def test_processes_that_are_ended_one_by_one_keep_or_break_apart() -> None:
    session = "/user.slice/user-1000.slice/session-3.scope"
    two = use(PYTHON, session, GPU_0), use(PYTHON, session, pid=8, libcuda=True)
    [keeping], [breaking] = blockers(SeenUsers(devices=DEVICES, processes=two))
    assert [each.next for each in (keeping, breaking)] == [("kill 7",), ("kill 8",)]


def test_containers_of_one_pod_end_together() -> None:
    two = tuple(bundle(number, id_=f"{number[1]:064x}", of=POD) for number in (GPU_0, GPU_1))
    [pod] = blockers(SeenUsers(devices=DEVICES, gpus=GPUS, bundles=two))[0]
    assert (len(pod.container_ids), pod.gpu_uuids) == (2, ("GPU-0", "GPU-1"))


def test_a_names_letters_never_reach_the_shell() -> None:
    evil = {**POD, "sandbox_name": "$(reboot)", "sandbox_namespace": "a;b\n'"}
    [pod] = blockers(SeenUsers(devices=DEVICES, bundles=(bundle(GPU_0, of=evil),)))[0]
    assert pod.next[2] == r"""kubectl -n 'a;b\n'"'"'' delete pod '$(reboot)'"""


def test_of_many_processes_some_are_in_the_line() -> None:
    many = [use(PYTHON, "/init.scope", GPU_0, pid=pid) for pid in range(1, PIDS_MAX + 4)]
    [found] = blockers(SeenUsers(devices=DEVICES, processes=tuple(many)))[0]
    assert found.next[0].endswith(f" {PIDS_MAX}")
    assert found.next[1] == "# and 3 more: look again then"
    assert found.what.endswith("pid 3 /usr/bin/python3 and 32 more")
    assert len(found.processes) == len(many)


def test_ten_thousand_processes_are_as_many_lines_as_things_to_end() -> None:
    cgroups = ("/system.slice/job.service", "/user.slice/user-1.slice/session-2.scope", f"/kubepods/{ID}")
    many = tuple(use(PYTHON, cgroups[pid % 3], GPU_0, pid=pid) for pid in range(10_000))
    seen = SeenUsers(devices=DEVICES, gpus=GPUS, bundles=(bundle(GPU_0, of=POD),), processes=many)
    keeping, _ = blockers(seen)
    assert [each.kind for each in keeping] == ["pod", "process", "unit"]
    assert sum(len(each.processes) for each in keeping) == len(many)
    assert all(len(line) < 1000 for each in keeping for line in (each.what, *each.next))


def test_the_devices_of_the_driver_are_known_by_their_names() -> None:
    names = ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-fs", "gdrdrv")
    others = ("drm", "nvidiafb", "nvme")
    assert [*driver_devices(dict.fromkeys((*names, *others), frozenset({1})))] == [*names]


OLD: Final = {
    "nvidia-frontend": frozenset({195}),
    "gdrdrv": frozenset({240}),
    "nvidia-caps-imex-channels": frozenset({9}),
}


@pytest.mark.parametrize(
    ("source", "is_of_it"),
    [
        (LIBCUDA, True),
        ("/usr/lib64/libnvidia-ml.so.1", True),
        ("/srv/stage/580.95.05-d118b36d/compute+utility/lib64", True),
        ("/srv/stage/580.95.05-d118b36d.1/compute/lib64", True),
        ("/run/nvidia/driver", True),
        ("/usr/lib64/libcudart.so.12", False),
        ("/run/nvidia/drivers", False),
        ("/opt/app/1.2-rc1/lib", False),
        ("/", False),
    ],
)
def test_files_of_the_driver_are_known_by_their_paths(source: str, is_of_it: bool) -> None:
    _, breaking = blockers(SeenUsers(bundles=(bundle(mounts=(source,), of=POD),)))
    assert [each.mounts for each in breaking] == [(source,)] * is_of_it


@pytest.mark.parametrize(
    ("number", "node"),
    [
        (GPU_0, "/dev/nvidia0"),
        ((195, 254), "/dev/nvidia-modeset"),
        ((240, 0), "/dev/gdrdrv"),
        ((9, 2), "/dev/nvidia-caps-imex-channels/channel2"),
    ],
)
def test_the_node_of_a_number(number: tuple[int, int], node: str) -> None:
    [found] = blockers(SeenUsers(devices=OLD, processes=(use(PYTHON, "/", number),)))[0]
    assert found.nodes == (node,)
