"""Every capability in a real container: its libraries load by every name, and no others do; its nodes and files."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import Capability, closure
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch
from tests.support.driver_root import (
    GRAPHICS,
    LIBRARIES,
    NGX,
    OWN_VERSIONS,
    VIDEO,
    make_driver_root,
)
from tests.support.image import Entry, ImageSpec
from tests.support.loader_images import Programs, files_32
from tests.support.marks import on_newest

pytestmark = [
    on_newest,
    pytest.mark.usefixtures("shared_daemon"),
]

V = "580.95.05"
UTILITY = {"libnvidia-ml", "libnvidia-cfg"}
BOTH = {"libnvidia-gpucomp", "libnvidia-allocator"}
OF: dict[Capability, set[str]] = {
    Capability.UTILITY: UTILITY,
    Capability.COMPUTE: LIBRARIES.keys() - UTILITY,
    Capability.VIDEO: set(VIDEO),
    Capability.GRAPHICS: GRAPHICS.keys() | BOTH,
    Capability.DISPLAY: set(),
    Capability.NGX: set(NGX),
    Capability.COMPAT32: set(),
}
SONAMES = LIBRARIES | VIDEO | GRAPHICS | NGX
FURTHER = {
    "libcuda": {"libcuda.so"},
    "libnvidia-ml": {"libnvidia-ml.so"},
    "libnvidia-opticalflow": {"libnvidia-opticalflow.so"},
    "libGLX_nvidia": {"libGLX_indirect.so.0"},
}
FILES = {
    Capability.COMPUTE: {"/etc/OpenCL/vendors/nvidia.icd"},
    Capability.GRAPHICS: {
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share/nvidia/nvoptix.bin",
        "/usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so",
    },
    Capability.DISPLAY: {
        "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
        "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
        "/usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so",
    },
}
GPU_NODES = {"/dev/nvidia1", "/dev/nvidiactl"}
UVM_NODES = {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
DRM_NODES = {
    "/dev/nvidia-modeset",
    "/dev/dri/card1",
    "/dev/dri/renderD129",
    "/dev/dri/by-path/pci-0000:41:00.0-card",
    "/dev/dri/by-path/pci-0000:41:00.0-render",
}


def names(library: str) -> set[str]:
    """What programs open a library by; those in the vdpau folder only by what leads there."""
    if library.startswith("vdpau/"):
        return {"libvdpau_nvidia.so.1", "libvdpau_nvidia.so"}
    return {f"{library}.so.{V}", SONAMES[library].format(V=V)} | FURTHER.get(library, set())


EVERY_NAME = {name for library in SONAMES for name in names(library)} | {soname for soname, _ in OWN_VERSIONS.values()}


def names_of(capability: Capability) -> set[str]:
    wanted = closure(frozenset({capability}))
    found = {name for each in wanted for library in OF[each] for name in names(library)}
    own = {soname for soname, _ in OWN_VERSIONS.values()} if Capability.GRAPHICS in wanted else set()
    return found | own


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    driver = make_driver_root(tmp_path_factory.mktemp("compiled") / "driver", V, compiled=True, everything=True)
    return replace(module_launch, driver_root=driver)


@pytest.fixture(scope="module")
def image(module_node: Containerd, probe: dict[str, Entry], tmp_path_factory: pytest.TempPathFactory) -> str:
    programs = Programs(tmp_path_factory.mktemp("programs"))
    spec = ImageSpec("localhost/nri-gpu/capabilities:1", extra=probe | files_32(programs))
    module_node.import_image(spec)
    return spec.name


def granted(node: Containerd, image: str, capabilities: str, **fields: Any) -> ContainerId:  # noqa: ANN401
    return node.cri.run_asking(f"device=1; mode=shared; capabilities={capabilities}", image=image, **fields)


def lines(node: Containerd, container: ContainerId, *command: str) -> list[str]:
    done = node.cri.execute(container, *command)
    assert done.code == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("capability", [each for each in Capability if each is not Capability.COMPAT32])
def test_its_libraries_files_and_nodes_and_no_others(node: Containerd, image: str, capability: Capability) -> None:
    container = granted(node, image, capability)
    wanted = closure(frozenset({capability}))
    found = lines(node, container, "/bin/probe", *sorted(EVERY_NAME))
    assert {line.partition(" -> ")[0] for line in found if " -> " in line} == names_of(capability)

    every_file = {path for files in FILES.values() for path in files}
    there = lines(
        node, container, "/bin/sh", "-c", f"for f in {' '.join(every_file)}; do [ -s $f ] && echo $f; done; :"
    )
    assert set(there) == {path for each in wanted for path in FILES.get(each, set())}

    nodes = lines(
        node, container, "/bin/find", "/dev", "-type", "c", "(", "-name", "nvidia*", "-o", "-path", "*dri*", ")"
    )
    uvm = UVM_NODES if Capability.COMPUTE in wanted else set()
    drm = DRM_NODES if Capability.GRAPHICS in wanted else set()
    assert set(nodes) == GPU_NODES | uvm | drm


def test_somebody_who_is_not_root_may_draw(node: Containerd, image: str) -> None:
    container = granted(node, image, "graphics", user=1000)
    seen = lines(node, container, "/bin/ls", "-l", "/dev/dri/card1", "/dev/dri/renderD129")
    assert all(line.startswith("crw-rw-rw-") for line in seen)
    # No driver answers to the number of a simulated node: what is refused is not the access.
    opened = node.cri.execute(container, "/bin/sh", "-c", ": < /dev/dri/renderD129")
    assert "No such device" in opened.stdout + opened.stderr


def test_32_bit_programs(node: Containerd, image: str) -> None:
    for capability in ("utility", "video", "graphics"):
        container = granted(node, image, f"{capability},compat32")
        found = set(lines(node, container, "/bin/probe32", *sorted(EVERY_NAME)))
        # Libraries with versions of their own come in packages that this driver has for 64 bits only.
        own = {soname for soname, _ in OWN_VERSIONS.values()}
        assert found == names_of(Capability(capability)) - own - {"libnvidia-ml.so"}
        native = lines(node, container, "/bin/probe", *sorted(EVERY_NAME))
        assert {line.partition(" -> ")[0] for line in native if " -> " in line} == names_of(Capability(capability))


def test_without_compat32_there_is_nothing_for_them(node: Containerd, image: str) -> None:
    container = granted(node, image, "compute,utility,graphics")
    assert lines(node, container, "/bin/probe32", *sorted(EVERY_NAME)) == []
