"""A newer CUDA than the driver's: required, chosen, in front of the driver's libraries, and named by the grant."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Inject
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.node import DriverTree, Node
from nri_gpu.policy.model import CompatSettings, Policy
from tests.support import builders as make
from tests.support.loading import LIBRARIES
from tests.unit.decision.deciding import injected, refused

PACKAGE = make.package()
PLACE, TREE = "/opt/nri-gpu/compat", LIBRARIES
POLICY = Policy(compat=CompatSettings(dir="/packages"))
NODE = replace(
    make.node([make.gpu(0, brand="nvidia")], driver_version="580.95.05", cuda_version="13.0"), compat=(PACKAGE,)
)
WISH = {"NVIDIA_REQUIRE_CUDA": "cuda>=14.0 brand=tesla,driver>=535,driver<536", "CUDA_VERSION": "14.0.1"}


def decided(container: Container, node: Node = NODE, policy: Policy = POLICY) -> Inject:
    return injected(container, node, policy=policy)


def test_a_package_counts_as_libcuda_where_it_is_chosen() -> None:
    node = replace(NODE, driver=make.driver(lacks={Capability.COMPUTE: "libcuda.so"}))
    assert decided(make.container("1", env=WISH), node).compat
    assert "no libcuda.so for compute" in refused(make.container("1"), node, policy=POLICY).sentence


def sentence(container: Container, node: Node = NODE, policy: Policy = POLICY) -> str:
    reason = refused(container, node, policy=policy)
    assert reason.code is Code.REQUIREMENT_NOT_MET
    return reason.sentence


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ("/app", f"{PLACE}:{TREE}:/app"),
        ("", f"{PLACE}:{TREE}"),
        (TREE, f"{PLACE}:{TREE}"),
        (f"{PLACE}:{TREE}", None),
        ("/usr/local/cuda/compat/lib", f"{PLACE}:{TREE}:/usr/local/cuda/compat/lib"),
    ],
)
def test_what_the_container_has_comes_behind(present: str, expected: str | None) -> None:
    edits = decided(make.container("1", env=WISH | {"LD_LIBRARY_PATH": present})).edits
    path = edits.env.get("LD_LIBRARY_PATH")
    assert (path or present).split(":")[:2] == [PLACE, TREE]
    if expected:
        assert path == expected


@pytest.mark.parametrize("env", [{}, {"CUDA_VERSION": "13.0"}, {"CUDA_VERSION": "12.1.1"}])
def test_an_image_that_the_driver_serves_gets_the_drivers_own(env: dict[str, str]) -> None:
    decision = decided(make.container("1", env=env))
    assert PLACE not in decision.edits.mounts
    assert decision.edits == decided(make.container("1", env=env), policy=Policy()).edits
    assert (decision.compat, decision.grant.generations) == ("", (make.GENERATION,))


def test_where_policy_names_no_folder_or_no_compute_is_asked_none_is_given() -> None:
    assert "no compatibility package" not in sentence(make.container("1", env=WISH), policy=Policy())
    utility = make.container("1; capabilities=utility", env={"CUDA_VERSION": "14.0", "NVIDIA_REQUIRE_CUDA": "arch>=1"})
    assert decided(utility).compat == ""


def test_a_refusal_says_why_no_package_helps() -> None:
    said = sentence(make.container("1", env=WISH), replace(NODE, compat=()))
    assert said.endswith(
        "; no compatibility package helps: CUDA 14.0 is wanted, and no package serves (there is none)."
    )
    many = tuple(replace(PACKAGE, path=str(each), drivers=frozenset({each})) for each in range(40))
    assert sentence(make.container("1", env=WISH), replace(NODE, compat=many))


IN_THE_WAY: dict[str, dict[str, Any]] = {
    "a volume at the place": {"mounts": frozenset({PLACE})},
    "a volume above it": {"mounts": frozenset({"/opt"})},
    "a volume in it": {"mounts": frozenset({f"{PLACE}/x"})},
    "a variable of image and pod both": {"env_twice": frozenset({"LD_LIBRARY_PATH"})},
}


@pytest.mark.parametrize("fields", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_where_it_could_not_win_it_does_not_count(fields: dict[str, Any]) -> None:
    env = WISH | {"LD_LIBRARY_PATH": "/pod"}
    assert "no compatibility package helps: " in sentence(make.container("1", env=env, **fields))
    careless = make.container("1", env=env | {"NVIDIA_DISABLE_REQUIRE": "1"}, **fields)
    decision = decided(careless)
    assert PLACE not in decision.edits.mounts
    assert decision.compat


def test_a_mig_device_has_its_gpus_brand() -> None:
    cut = make.mig_gpu(0, brand="nvidia")
    node = replace(make.node([cut], driver_version="580.95.05", cuda_version="13.0"), compat=(PACKAGE,))
    decision = decided(make.container("mig=1g.5gb", env=WISH), node)
    assert PLACE in decision.edits.mounts


OWN = "/usr/local/cuda/compat"
BROUGHT = {
    "NVIDIA_REQUIRE_CUDA": "cuda>=14.0 brand=unknown,driver>=580,driver<581",
    "LD_LIBRARY_PATH": f"/usr/local/nvidia/lib:{OWN}",
}


def test_the_images_own_package_comes_first_by_policy_alone() -> None:
    container, node = make.container("1", env=BROUGHT), replace(NODE, compat=())
    by_default = decided(container, node, Policy())
    assert by_default.edits.env["LD_LIBRARY_PATH"] == f"{TREE}:{BROUGHT['LD_LIBRARY_PATH']}"
    assert "put NVIDIA's cuda-compat-14-0 into compat.dir" in by_default.note
    assert by_default.compat == ""
    allowed = Policy(compat=CompatSettings(image=True))
    chosen = decided(container, node, allowed)
    assert chosen.edits.env["LD_LIBRARY_PATH"] == f"{OWN}:{TREE}:{BROUGHT['LD_LIBRARY_PATH']}"
    assert (chosen.note, chosen.grant.generation) == ("", node.generation)
    assert chosen.compat == "the image's own package, because CUDA 14.0 is wanted"
    both = decided(make.container("1", env=BROUGHT, env_twice=frozenset({"LD_LIBRARY_PATH"})), node, allowed)
    assert "image and pod both set LD_LIBRARY_PATH" in both.note


def graphics_node(*places: str) -> Node:
    files = tuple((place, f"extra{place}") for place in places)
    tree = DriverTree("/staged", files=files, libraries=(("lib64/libGLX_nvidia.so.1", ("libGLX_nvidia.so.0",)),))
    return make.node(staged=make.driver(trees=dict.fromkeys(make.trees(), tree)))


VULKAN, EGL = "/etc/vulkan/icd.d/nvidia_icd.x86_64.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"


@pytest.mark.parametrize(
    ("places", "note"),
    [
        ((VULKAN, EGL), ""),
        (
            ("/etc/vulkan/icd.d/nvidia_layers.json", EGL),
            "graphics is without Vulkan: this node's driver has no usable file for its loader",
        ),
        ((EGL,), "graphics is without Vulkan: this node's driver has no usable file for its loader"),
        ((), "graphics is without Vulkan and EGL: this node's driver has no usable file for their loaders"),
    ],
)
def test_a_grant_says_what_graphics_lacks(places: tuple[str, ...], note: str) -> None:
    node = graphics_node(*places)
    asks = make.container("1; capabilities=graphics")
    assert injected(asks, node).note.partition(", see")[0] == note
    assert injected(make.container("1"), node).note == ""
