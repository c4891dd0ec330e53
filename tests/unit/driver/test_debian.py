"""What is found of NVIDIA's own driver, in three versions and two side by side, as Debian packages it."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.gpu import Capability
from nri_gpu.driver.driver_scan import DriverFile, FoundDriver, changed, folder_signatures, scan
from nri_gpu.driver.search import DriverSearch, machine_of
from nri_gpu.inventory.library import Library
from tests import ground
from tests.support.debian_driver import DRIVERS, debian_driver, version_of

pytestmark = [
    pytest.mark.driver,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers of these tests are for x86-64"),
]

# Of what a driver of each version has: not fetched (NVVM, OptiX and its compiler), and in no package of Debian's.
MISSING: Final = {
    "470": {"compute": [], "graphics": ["libnvidia-rtcore", "libnvoptix", "libnvidia-egl-wayland"]},
    "535": {
        "compute": ["libnvidia-nvvm", "libnvidia-pkcs11"],
        "graphics": ["libnvidia-rtcore", "libnvoptix", "libnvidia-egl-gbm", "libnvidia-egl-wayland"],
    },
    "550": {"compute": ["libnvidia-nvvm", "libnvidia-pkcs11"], "graphics": ["libnvidia-rtcore", "libnvoptix"]},
}


def names(files: tuple[DriverFile, ...], capability: Capability) -> set[str]:
    return {file.name for file in files if capability in file.capabilities}


def found_in(name: str) -> tuple[Path, FoundDriver]:
    root = debian_driver(name)
    return root, scan(root)


@pytest.mark.parametrize("name", DRIVERS)
def test_every_capability_has_its_files(name: str) -> None:
    root, found = found_in(name)
    v = version_of(root, name)
    assert found.version == v
    assert {f"{each}.so.{v}" for each in ("libcuda", "libnvidia-opencl", "libnvidia-ptxjitcompiler")} <= names(
        found.libraries, Capability.COMPUTE
    )
    assert names(found.libraries, Capability.UTILITY) == {f"libnvidia-ml.so.{v}", f"libnvidia-cfg.so.{v}"}
    assert {
        f"libnvcuvid.so.{v}",
        f"vdpau/libvdpau_nvidia.so.{v}",
        f"libnvidia-encode.so.{v}",
        f"libnvidia-opticalflow.so.{v}",
    } <= names(found.libraries, Capability.VIDEO)
    assert {
        f"{each}.so.{v}" for each in ("libGLX_nvidia", "libEGL_nvidia", "libnvidia-glcore", "libnvidia-tls")
    } <= names(found.libraries, Capability.GRAPHICS)
    assert names(found.libraries, Capability.NGX) == {f"libnvidia-ngx.so.{v}"}
    assert {"nvidia-smi", "nvidia-debugdump"} <= names(found.binaries, Capability.UTILITY)
    assert {place for file in found.singles for place in file.places} >= {
        "/etc/OpenCL/vendors/nvidia.icd",
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
        "/usr/lib64/gbm/nvidia-drm_gbm.so",
    }
    assert (found.unknown, found.left_out, found.others) == ((), (), ())


@pytest.mark.parametrize("name", DRIVERS)
def test_what_a_driver_of_its_version_never_had_is_not_missed(name: str) -> None:
    _, found = found_in(name)
    missing = {each.value: list(names) for each, names in found.missing.items() if names}
    compatible = missing.pop("compat32")
    assert missing == {each: [f"{library}.so" for library in names] for each, names in MISSING[name].items() if names}
    if name == "550":  # of its 32-bit packages four were fetched
        assert {"libnvidia-opencl.so", "libGLX_nvidia.so", "libnvidia-ml.so"} <= set(compatible)
        assert {"libcuda.so", "libnvcuvid.so", "libvdpau_nvidia.so", "libcudadebugger.so"}.isdisjoint(compatible)
    else:
        assert compatible == ["every 32-bit library"]


@pytest.mark.parametrize("name", DRIVERS)
def test_nvml_is_of_the_same_driver(name: str) -> None:
    root, found = found_in(name)
    assert Library(root).find().name == f"libnvidia-ml.so.{found.version}"


@pytest.mark.parametrize(
    ("module", "wins", "other"), [("", "535", "550"), ("535", "535", "550"), ("550", "550", "535")]
)
def test_of_two_the_loaded_modules_wins_with_its_own_programs(module: str, wins: str, other: str) -> None:
    """Whatever the alternative says, which an administrator set to 535."""
    root = debian_driver("550", "535", alternative="535")
    version, folder = version_of(root, wins), DRIVERS[wins].folder
    loaded = version_of(root, module) if module else ""
    found = scan(root, module=loaded)
    assert found.version == version
    assert [str(each) for each in found.others] == [
        f"{version_of(root, other)} in usr/lib/x86_64-linux-gnu/nvidia/{DRIVERS[other].folder}"
    ]
    sources = {file.name: file.source.relative for file in found.files}
    assert sources["nvidia-smi"] == f"usr/lib/nvidia/{folder}/nvidia-smi"
    assert sources["usr/lib/xorg/modules/drivers/nvidia_drv.so"] == f"usr/lib/nvidia/{folder}/nvidia_drv.so"
    strangers = {path for path in sources.values() if version_of(root, other) in path or DRIVERS[other].folder in path}
    assert strangers == set()
    nvml = DriverSearch.below(root, machine_of()).nvml(loaded)
    assert nvml and nvml.name == f"libnvidia-ml.so.{version}"


def test_another_alternative_shows(tmp_path: Path) -> None:
    """Only links below /etc/alternatives change."""
    before = folder_signatures(debian_driver("550", "535", alternative="535"))
    assert before != folder_signatures(debian_driver("550", "535"))
    root, found = found_in("550")
    assert not changed(root, (), folder_signatures(root), found)


def test_nothing_that_nvidias_own_tool_finds_is_lost(tmp_path: Path) -> None:
    root, found = found_in("550")
    ctk = ground.need("nvidia") / "nvidia-ctk"
    (tmp_path / "dev").mkdir()
    for name, minor in {"nvidia0": 0, "nvidiactl": 255}.items():  # it describes no driver without a device
        os.mknod(tmp_path / "dev" / name, stat.S_IFCHR | 0o600, os.makedev(195, minor))
    arguments = ("cdi", "generate", "--mode=management", f"--driver-root={root}", f"--dev-root={tmp_path}")
    described = subprocess.run([ctk, *arguments, "--format=json"], capture_output=True, text=True, check=True).stdout
    theirs = {Path(mount["hostPath"]) for mount in json.loads(described)["containerEdits"]["mounts"]}
    files = {path for path in theirs if path.is_relative_to(root)}  # and one of its own, by which others know it
    assert len(files) == len(theirs) - 1 > 20
    assert files <= {root / file.source.path for file in (*found.libraries, *found.binaries, *found.singles)}
