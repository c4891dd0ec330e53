from __future__ import annotations

import pytest

from nri_gpu.injection.env import disarmed, library_path, visible_devices
from tests.support import builders as make

FOLDER = "/usr/local/nvidia/lib64"
PATHS: dict[str, tuple[dict[str, str], str | None]] = {
    "none before": ({}, FOLDER),
    "empty before": ({"LD_LIBRARY_PATH": ""}, FOLDER),
    "one before": ({"LD_LIBRARY_PATH": "/a"}, f"{FOLDER}:/a"),
    "several before": ({"LD_LIBRARY_PATH": "/a:/b"}, f"{FOLDER}:/a:/b"),
    "ours leads already": ({"LD_LIBRARY_PATH": f"{FOLDER}:/a"}, None),
    "ours alone already": ({"LD_LIBRARY_PATH": FOLDER}, None),
    "ours is there but does not lead": ({"LD_LIBRARY_PATH": f"/a:{FOLDER}"}, f"{FOLDER}:/a:{FOLDER}"),
    "one that only begins like ours": ({"LD_LIBRARY_PATH": f"{FOLDER}-old"}, f"{FOLDER}:{FOLDER}-old"),
    "an empty element of the image's own stays its own": ({"LD_LIBRARY_PATH": ":/a"}, f"{FOLDER}::/a"),
}


@pytest.mark.parametrize(("env", "value"), PATHS.values(), ids=PATHS)
def test_the_loaders_path(env: dict[str, str], value: str | None) -> None:
    assert library_path([FOLDER], env.get("LD_LIBRARY_PATH", "")) == (
        {} if value is None else {"LD_LIBRARY_PATH": value}
    )


def test_the_loaders_path_with_32_bit_libraries() -> None:
    folders = [FOLDER, "/usr/local/nvidia/lib32"]
    assert library_path(folders, "/a") == {"LD_LIBRARY_PATH": f"{FOLDER}:/usr/local/nvidia/lib32:/a"}
    assert library_path(folders, ":".join([*folders, "/a"])) == {}
    assert library_path(folders, FOLDER) == {"LD_LIBRARY_PATH": ":".join([*folders, FOLDER])}


def test_programs_read_the_granted_uuids() -> None:
    gpus = (make.gpu(0), make.gpu(3))
    listed = f"{make.uuid(0)},{make.uuid(3)}"
    assert visible_devices(gpus, void=False) == {"NVIDIA_VISIBLE_DEVICES": listed}
    assert visible_devices(gpus, void=True) == {"NVIDIA_VISIBLE_DEVICES": "void", "NRI_GPU_UUIDS": listed}


DISARMED = {
    "not set": ({}, False),
    "void already": ({"NVIDIA_VISIBLE_DEVICES": "void"}, False),
    "all": ({"NVIDIA_VISIBLE_DEVICES": "all"}, True),
    "none, which still brings the driver": ({"NVIDIA_VISIBLE_DEVICES": "none"}, True),
    "empty": ({"NVIDIA_VISIBLE_DEVICES": ""}, True),
    "another variable": ({"LD_LIBRARY_PATH": "all"}, False),
}


@pytest.mark.parametrize(("env", "armed"), DISARMED.values(), ids=DISARMED)
def test_disarming_overrides_whatever_an_nvidia_hook_would_obey(env: dict[str, str], armed: bool) -> None:
    assert disarmed(env) == ({"NVIDIA_VISIBLE_DEVICES": "void"} if armed else {})
