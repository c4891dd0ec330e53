"""The part of a container that is shown."""

from __future__ import annotations

from typing import Any

import pytest

from nri_gpu.observe.bundles import FoundContainer
from nri_gpu.observe.container_seen import NAMES_MAX, NODES_MAX, TEXT_MAX, Numbers, seen_container
from nri_gpu.observe.looks import DeviceRequest, SeenContainer
from nri_gpu.observe.runtime_table import CONTAINERD, DOCKER, PODMAN
from nri_gpu.verify.oci_bundles import NAME_MAX, Bundle
from nri_gpu.verify.oci_spec import (
    Spec,
    SpecDevice,
    SpecHook,
    SpecLinux,
    SpecMount,
    SpecProcess,
    SpecResources,
    SpecRule,
    Variables,
)

ID = "ab" * 32
ZERO, ONE, CTL, CAP, DRAWS = (195, 0), (195, 1), (195, 255), (236, 7), (226, 1)
NUMBERS = Numbers([195, 236], [ZERO, ONE, CTL, DRAWS])
POD = {"sandbox-namespace": "research", "sandbox-name": "train", "sandbox-uid": "7d2e", "container-name": "main"}
ANNOTATIONS = {f"io.kubernetes.cri.{key}": value for key, value in POD.items()}
HAS = {"linux": SpecLinux((SpecDevice("/dev/x", "c", *ZERO),))}


def seen(runtime: str = CONTAINERD, opens: Any = (), fault: str = "", **fields: Any) -> SeenContainer | None:  # noqa: ANN401
    """Such a container. fields: of Found, of its bundle and of its spec."""
    faults = fields.pop("fault_of_docker", ""), fields.pop("fault_of_bundle", "")
    of_found = {key: fields.pop(key) for key in ("name", "requests") if key in fields}
    of_bundle = {key: fields.pop(key) for key in ("pid", "written_s") if key in fields}
    bundle = Bundle(ID, fields.pop("namespace", "k8s.io"), Spec(**fields), fault=faults[1], **of_bundle)
    return seen_container(
        FoundContainer(bundle=bundle, runtime=runtime, fault=faults[0], **of_found), opens, fault, NUMBERS
    )


def sure(**fields: Any) -> SeenContainer:  # noqa: ANN401
    found = seen(**fields)
    assert found
    return found


def test_a_container_of_a_pod() -> None:
    found = sure(annotations=ANNOTATIONS, pid=7, written_s=5.0, opens=(ZERO,), **HAS)
    assert (found.namespace, found.pod, found.pod_uid, found.name) == ("research", "train", "7d2e", "main")
    assert (found.id, found.runtime, found.pid, found.began_s) == (ID, CONTAINERD, 7, 5.0)
    assert (found.nodes, found.allowed, found.opens) == ((ZERO,), (), (ZERO,))


@pytest.mark.parametrize(("runtime", "name"), [(DOCKER, "train"), (PODMAN, ID[:12])])
def test_who_runs_docker_or_podman_names_no_pod(runtime: str, name: str) -> None:
    """Their annotations are whatever the command line says."""
    found = sure(runtime=runtime, name=name if runtime == DOCKER else "", annotations=ANNOTATIONS, **HAS)
    assert (found.namespace, found.pod, found.pod_uid, found.name) == ("", "", "", name)


def test_who_runs_a_container_by_containerd_alone_names_no_pod() -> None:
    """`nerdctl --annotation` takes any."""
    found = sure(namespace="default", annotations=ANNOTATIONS, **HAS)
    assert (found.namespace, found.pod, found.name) == ("", "", ID[:12])


@pytest.mark.parametrize(
    "fields",
    [
        HAS,
        {"linux": SpecLinux((SpecDevice("/dev/x", "c", *CAP),))},  # of a major of NVIDIA's, whatever the minor
        {"linux": SpecLinux((SpecDevice("/dev/x", "c", *DRAWS),))},  # of a major of others'
        {"linux": SpecLinux(None, SpecResources((SpecRule(True, "c", *ZERO, "rw"),)))},
        {"opens": (ZERO,)},
        {"process": SpecProcess(Variables(NVIDIA_VISIBLE_DEVICES="all"))},
        {"annotations": {"cdi.k8s.io/x": "vendor.com/nic=0,nvidia.com/gpu=0"}},
        {"requests": (DeviceRequest(driver="nvidia", count=-1),)},
        {"requests": (DeviceRequest(driver="cdi", ids=("vendor.com/nic=0", "nvidia.com/gpu=0")),)},
        {"hooks": {"prestart": (SpecHook("/usr/bin/nvidia-container-runtime-hook"),)}},
        {"mounts": (SpecMount("/usr/lib/libcuda.so.580.95.05"),)},
    ],
)
def test_who_has_to_do_with_nvidias_devices(fields: dict[str, Any]) -> None:
    found = sure(**fields)
    assert "vendor.com" not in repr((found.cdi, found.requests))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"linux": SpecLinux((SpecDevice("/dev/x", "c", 226, 0), SpecDevice("/dev/y", "b", *ZERO)))},
        {"opens": None, "fault": "no rules"},
        {"annotations": {"cdi.k8s.io/x": "vendor.com/nic=0", "note": "nvidia.com/gpu=0"}},
        {"requests": (DeviceRequest(driver="cdi", ids=("vendor.com/nic=0",)),)},
        {"hooks": {"prestart": (SpecHook("/usr/bin/other"),)}},
        {"process": SpecProcess(Variables(NVIDIA_DRIVER_CAPABILITIES="all"))},
    ],
)
def test_who_has_not(fields: dict[str, Any]) -> None:
    assert seen(**fields) is None


def test_a_privileged_container_may_open_all() -> None:
    found = sure(linux=SpecLinux(None, SpecResources((SpecRule(allow=True, access="rwm"),))))
    assert (found.privileged, found.allowed) == (True, NUMBERS.known)


def test_the_drivers_files() -> None:
    paths = (
        "/usr/lib/libcuda.so.580.95.05",
        "/usr/lib/libnvidia-ml.so.1",
        "/opt/590.1-0a1b2c3d.1/lib64",
        "/a/580.95.05",
    )
    assert sure(mounts=tuple(map(SpecMount, paths))).driver_versions == ("580.95.05", "590.1")


def test_every_fault_is_told_and_of_a_bundle_that_is_unread_only_that() -> None:
    assert sure(opens=None, fault="no rules", fault_of_docker="no name", **HAS).fault == "no name; no rules"
    assert sure(opens=None, fault="no rules", fault_of_bundle="no pid", **HAS).fault == "no pid"


def test_texts_and_lists_have_an_end() -> None:
    long = "x" * 100_000
    names = tuple(f"nvidia.com/gpu={at}{long}" for at in range(NAMES_MAX + 9))
    found = sure(
        annotations={**ANNOTATIONS, "cdi.k8s.io/x": ",".join(names), "io.kubernetes.cri.sandbox-name": long},
        process=SpecProcess(Variables(NVIDIA_VISIBLE_DEVICES=long, NVIDIA_DRIVER_CAPABILITIES=long)),
        requests=(DeviceRequest(driver="cdi", ids=names),) * 1000,
        linux=SpecLinux(tuple(SpecDevice("/dev/x", "c", 195, minor) for minor in range(5000))),
    )
    assert (len(found.nodes), len(found.asked), len(found.capabilities)) == (NODES_MAX, TEXT_MAX, TEXT_MAX)
    assert (len(found.pod), len(found.cdi), len(found.cdi[0])) == (NAME_MAX, NAMES_MAX, NAME_MAX)
    assert sum(len(name) for each in found.requests for name in each.ids) < 300_000
