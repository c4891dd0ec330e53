from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import MARKERS_MAX, Container, DeviceRef
from nri_gpu.domain.gpu import Capability
from nri_gpu.nri import convert
from nri_gpu.nri.convert import may_concern
from nri_gpu.request.environment import CAPABILITIES_MAX, named_capabilities
from nri_gpu.request.image_requirements import TOTAL_MAX
from tests.support import builders as make


@pytest.mark.parametrize(("kind", "counts"), [("c", True), ("u", True), ("b", False), ("p", False)])
def test_only_a_character_device_is_a_node_of_a_gpu(kind: str, counts: bool) -> None:
    """A raw block volume may have any numbers, and any path."""
    message = make.container_message(make.container())
    message.linux.devices.add(path="/dev/nvidia0", type=kind, major=195, minor=0)
    read = convert.container_from_pb(message, make.pod())
    assert read.devices == ((DeviceRef("/dev/nvidia0", 195, 0),) if counts else ())


def test_odd_environment_entries_are_passed_over() -> None:
    payload = make.create_payload(
        make.container(), env=["", "=", "=x", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES=a=b"]
    )
    assert convert.request_from_pb(payload).env == {"NVIDIA_VISIBLE_DEVICES": "a=b"}


def test_of_a_variable_that_comes_twice_the_last_counts_and_it_is_said() -> None:
    twice = ["NVIDIA_VISIBLE_DEVICES=all", "PATH=/a", "PATH=/b", "LD_LIBRARY_PATH=", "NVIDIA_VISIBLE_DEVICES=void"]
    read = convert.request_from_pb(make.create_payload(make.container(), env=twice))
    assert read.env == {"NVIDIA_VISIBLE_DEVICES": "void", "LD_LIBRARY_PATH": ""}
    assert read.env_twice == {"NVIDIA_VISIBLE_DEVICES"}


def test_what_an_image_requires_is_kept_and_nothing_that_only_looks_like_it() -> None:
    stated = ["NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla", "CUDA_VERSION=12.4.1", "NVIDIA_DISABLE_REQUIRE=1"]
    others = ["NVIDIA_REQUIRE_JETPACK=csv-mounts=all", "NVIDIA_REQUIRE_X", "CUDA_VERSION_MAJOR=12", "XCUDA_VERSION=1"]
    read = convert.request_from_pb(make.create_payload(make.container(), env=[*stated, *others]))
    assert read.env == dict(entry.split("=", 1) for entry in stated)
    again = convert.request_from_pb(make.create_payload(make.container(), env=[*stated, "CUDA_VERSION=11.0"]))
    assert again.env["CUDA_VERSION"] == "11.0"
    assert again.env_twice == {"CUDA_VERSION"}


def test_of_the_parts_of_the_driver_no_more_is_kept_than_is_read() -> None:
    for entry in ("NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_DRIVER_CAPABILITIES="):
        assert convert.request_from_pb(make.create_payload(make.container(), env=[entry])).env == dict(
            [entry.split("=")]
        )
    flood = f"NVIDIA_DRIVER_CAPABILITIES={'x' * CAPABILITIES_MAX},all"
    read = convert.request_from_pb(make.create_payload(make.container(), env=[flood])).env
    assert len(read["NVIDIA_DRIVER_CAPABILITIES"]) == CAPABILITIES_MAX + 1
    assert named_capabilities(read["NVIDIA_DRIVER_CAPABILITIES"]) == frozenset()
    whole = f"ngx,{'x' * (CAPABILITIES_MAX - 8)},all"  # one character more would have been cut
    read = convert.request_from_pb(
        make.create_payload(make.container(), env=[f"NVIDIA_DRIVER_CAPABILITIES={whole}"])
    ).env
    assert named_capabilities(read["NVIDIA_DRIVER_CAPABILITIES"]) == frozenset(Capability)


def test_requirements_past_what_is_checked_are_not_read() -> None:
    flood = [f"NVIDIA_REQUIRE_{number}=cuda>=1" for number in range(convert.ENTRIES_MAX)]
    env = [*flood, "NVIDIA_VISIBLE_DEVICES=all"]
    read = convert.request_from_pb(make.create_payload(make.container(), env=env[1:]))
    assert read.requirement_chars > TOTAL_MAX
    assert sum(len(name) + len(value) for name, value in read.env.items()) < 2 * TOTAL_MAX
    assert read.env["NVIDIA_VISIBLE_DEVICES"] == "all"


@pytest.mark.parametrize(
    ("cpu", "pinned"),
    [
        (pb.LinuxCPU(), False),
        (pb.LinuxCPU(cpus="0-3"), True),
        (pb.LinuxCPU(mems="0"), True),
        (pb.LinuxCPU(shares=pb.OptionalUInt64(value=2), quota=pb.OptionalInt64(value=1)), False),
    ],
    ids=["nothing", "cpus", "memory", "shares and a quota"],
)
def test_a_container_is_pinned_by_its_cpuset_alone(cpu: pb.LinuxCPU, pinned: bool) -> None:
    message = pb.Container(linux=pb.LinuxContainer(resources=pb.LinuxResources(cpu=cpu)))
    assert convert.container_from_pb(message, make.pod()).pinned is pinned


HOOKS: dict[str, tuple[pb.Hook, bool]] = {
    "by path": (pb.Hook(path="/usr/bin/nvidia-cdi-hook"), True),
    "by its first argument": (pb.Hook(path="/bin/env", args=["/x/nvidia-ctk", "hook"]), True),
    "by another argument": (pb.Hook(path="/bin/log", args=["log", "nvidia-ctk"]), False),
    "a longer name": (pb.Hook(path="/usr/bin/nvidia-cdi-hook2"), False),
    "somebody else's": (pb.Hook(path="/usr/bin/hook", args=["hook"]), False),
    "nothing": (pb.Hook(), False),
}


@pytest.mark.parametrize(("hook", "is_nvidias"), HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("stage", ["prestart", "create_runtime", "create_container", "start_container", "poststop"])
def test_nvidias_hooks_are_known_by_their_programs(stage: str, hook: pb.Hook, is_nvidias: bool) -> None:
    message = pb.Container(id="c")
    getattr(message.hooks, stage).append(hook)
    assert bool(convert.container_from_pb(message, make.pod()).nvidia_hooks) is is_nvidias


@pytest.mark.parametrize(
    ("mount", "in_the_way"),
    [
        (pb.Mount(destination="/dev", type="tmpfs", source="tmpfs"), False),
        (pb.Mount(destination="/dev", type="bind", source="/dev"), False),
        (pb.Mount(destination="/dev", type="bind", source="/var/lib/volume"), True),
        (pb.Mount(destination="/dev/dri", type="bind", source="/dev/dri"), True),
        (pb.Mount(destination="/dev/shm", type="tmpfs", source="shm"), False),
        (pb.Mount(destination="/dev/shm", type="bind", source="/run/containerd/sandboxes/sandbox/shm"), False),
        (pb.Mount(destination="/dev/shm", type="bind", source="/dev/shm"), False),
        (pb.Mount(destination="/dev/shm", type="bind", source="/var/lib/volume"), True),
        (pb.Mount(destination="/dev/shm", type="bind", source="/run/containerd/sandboxes/another/shm"), True),
    ],
    ids=[
        *("the runtime's", "the host's", "a volume", "part of the host's"),
        *("memory of its own", "the pod's", "with hostIPC", "a volume for memory", "another pod's"),
    ],
)
def test_the_usual_dev_is_no_mount_of_the_containers_own(mount: pb.Mount, in_the_way: bool) -> None:
    request = pb.CreateContainerRequest(pod=pb.PodSandbox(id="sandbox"), container=pb.Container(mounts=[mount]))
    read = convert.request_from_pb(request.SerializeToString())
    assert read.mounts == ({mount.destination} if in_the_way else frozenset())


def rule(kind: str, access: str, **numbers: int) -> pb.LinuxDeviceCgroup:
    given = {name: pb.OptionalInt64(value=number) for name, number in numbers.items()}
    return pb.LinuxDeviceCgroup(allow=True, type=kind, access=access, **given)


# What a rule of the device cgroup makes of its container.
RULES: dict[str, tuple[pb.LinuxDeviceCgroup, str]] = {
    "all of it, as containerd writes": (rule("", "rwm"), "privileged"),
    "all of it, as the OCI spec writes": (rule("a", "rwm"), "privileged"),
    "the deny-all rule": (pb.LinuxDeviceCgroup(allow=False, access="rwm"), ""),
    "one major of any kind": (rule("", "", major=195), ""),
    "one device": (rule("c", "rw", major=195, minor=0), "opened"),
    "the same to make its node": (rule("c", "m", major=195, minor=0), ""),
    "refused": (pb.LinuxDeviceCgroup(type="c", access="rwm"), ""),
    "all minors": (rule("c", "rwm", major=195), "wildcard"),
    "all majors": (rule("c", "rw"), "wildcard"),
    "all nodes may be made": (rule("c", "m"), ""),
}


@pytest.mark.parametrize(("rule", "makes"), RULES.values(), ids=RULES)
def test_what_a_rule_of_the_device_cgroup_makes_of_its_container(rule: pb.LinuxDeviceCgroup, makes: str) -> None:
    message = pb.Container(id="c")
    message.linux.resources.devices.append(rule)
    for exists in (False, True):
        read = convert.container_from_pb(message, make.pod(), exists=exists)
        assert (read.privileged, read.wildcard) == (makes == "privileged", makes == "wildcard")
        assert read.opened == ({(195, 0)} if makes == "opened" else set())
    if makes in ("opened", "wildcard"):
        assert may_concern(message.SerializeToString(), None, environment=False)


def test_which_staged_files_are_mounted() -> None:
    message = pb.Container(id="c")
    for source in (
        "/var/drivers/580-a/compute/lib64",
        "/var/drivers/compat14-b",
        "/var/drivers.old/x",
        "/var/drivers",
        "/",
    ):
        message.mounts.add(destination="/x", source=source)
    read = convert.container_from_pb(message, make.pod(), exists=True, stage_dir="/var/drivers")
    assert read.staged == {"580-a", "compat14-b"}
    assert not convert.container_from_pb(message, make.pod(), exists=True).staged
    assert may_concern(message.SerializeToString(), None, environment=False, stage_dir="/var/drivers")


def test_the_folder_of_its_mps_daemon_is_read_off_its_mounts() -> None:
    listed = make.container_message(
        make.container(env={"NVIDIA_VISIBLE_DEVICES": "x", "CUDA_MPS_PIPE_DIRECTORY": "/p"})
    )
    for message, folder in ((listed, "/run/m/GPU-0.a"), (make.container_message(make.container()), "")):
        message.mounts.add(destination="/dev/shm", type="bind", source="/run/m/GPU-0.a/shm")
        message.mounts.add(destination="/tmp/nvidia-mps", type="bind", source="/run/m/GPU-0.a/pipe")
        for exists in (True, False):
            assert convert.container_from_pb(message, make.pod(), exists=exists).mps_folder == folder


def test_markers_of_claims_are_read_of_every_container_and_of_none_too_many() -> None:
    of = make.container()
    env = ["NRI_GPU_CLAIM_A=old", "NRI_GPU_CLAIM_A=v=1", "NRI_GPU_CLAIM_B", f"NRI_GPU_CLAIM_{'C' * 9999}={'x' * 9999}"]
    for exists in (True, False):
        found = convert.container_from_pb(make.container_message(of, env=env), of.pod, exists=exists).markers
        assert (found["NRI_GPU_CLAIM_A"], found["NRI_GPU_CLAIM_B"], len(found)) == ("v=1", "", 3)
        assert max(len(part) for pair in found.items() for part in pair) == 512
    flood = [f"NRI_GPU_CLAIM_{number}=x" for number in range(convert.ENTRIES_MAX)]
    assert len(convert.read_markers(flood)) == MARKERS_MAX + 1
    # The same one again and again hides no other.
    assert set(convert.read_markers(["NRI_GPU_CLAIM_A=x"] * 999 + ["NRI_GPU_CLAIM_B=y"])) == {
        "NRI_GPU_CLAIM_A",
        "NRI_GPU_CLAIM_B",
    }


@pytest.mark.parametrize("needle", ["NRI_GPU_CLAIM_X=1", "gpu.nri.io/x"])
def test_what_may_ask(needle: str) -> None:
    assert convert.may_ask(needle.encode(), lambda: False)
    assert not convert.may_ask(needle[1:].encode(), lambda: False)


CONCERNING = {
    "nothing": (make.container(), False, False),
    "the variable, where it is to be disarmed": (make.container(env={"NVIDIA_VISIBLE_DEVICES": "all"}), True, True),
    "the variable, where it is not": (make.container(env={"NVIDIA_VISIBLE_DEVICES": "all"}), False, False),
    "a marker of a claim": (make.container(markers={"NRI_GPU_CLAIM_X": ""}), False, True),
    "another node": (make.container(devices=(DeviceRef("/dev/fuse", 10, 229),)), True, False),
}


@pytest.mark.parametrize(("container", "disarm", "found"), CONCERNING.values(), ids=CONCERNING)
def test_what_may_concern_us(container: Container, disarm: bool, found: bool) -> None:
    assert may_concern(make.create_payload(container), 195, environment=disarm) is found
