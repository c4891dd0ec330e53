"""Which compatibility package an image gets on a node, and why it gets none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.decision.cuda_choice import choose, unfit_driver, wanted, with_compat
from nri_gpu.domain.node import CompatPackage
from nri_gpu.policy.model import CompatSettings, Policy
from nri_gpu.request.image_requirements import GpuFacts, RequirementFacts, unmet

DEFAULT, ACROSS = Policy(), Policy(compat=CompatSettings(across_minor=True))
NODE = RequirementFacts("570.26", "12.8", (GpuFacts((9, 0), "nvidia"),))


def package(cuda: str, version: str, drivers: frozenset[int] | None = frozenset({535, 550, 570})) -> CompatPackage:
    major, minor = map(int, cuda.split("."))
    return CompatPackage(cuda=(major, minor), version=version, drivers=drivers, generation=cuda, path=f"/staged/{cuda}")


C129, C130, C131 = package("12.9", "575.57.08"), package("13.0", "580.65.06"), package("13.1", "590.44.01")
ALL = (C131, C130, C129)
# As images of NVIDIA's have it: new enough, or one of the older branches on which the image's own package works.
TYPICAL = "cuda>=13.0 brand=tesla,driver>=535,driver<536 brand=unknown,driver>=535,driver<536"
IMAGE = {"CUDA_VERSION": "13.0.1", "NVIDIA_REQUIRE_CUDA": TYPICAL}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"CUDA_VERSION": "12.4.1"}, (12, 4)),
        ({"CUDA_VERSION": "12"}, (12, 0)),
        ({"CUDA_VERSION": "12.4.1.003"}, (12, 4)),
        ({"CUDA_VERSION": "13.0.1.012-rc1"}, (13, 0)),
        ({"CUDA_VERSION": "12.4.1.0.1"}, None),
        ({"CUDA_VERSION": "12.4.1."}, None),
        ({"CUDA_VERSION": "cu121"}, None),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, (13, 0)),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13"}, (13, 0)),
        (IMAGE, (13, 0)),
        ({"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_CUDA": "cuda>=12.9"}, (12, 9)),
        ({"CUDA_VERSION": "13.1", "NVIDIA_REQUIRE_CUDA": "cuda>=12.9"}, (13, 1)),
        ({"NVIDIA_REQUIRE_CUDA": "cuda<13"}, None),
        ({"NVIDIA_REQUIRE_CUDA": "driver>=535 cuda>=13.0"}, None),
        ({"NVIDIA_REQUIRE_CUDA": "arch>=8.0,cuda>=12.6,cuda<14 cuda>=99"}, (12, 6)),
        ({"NVIDIA_REQUIRE_CUDA": "cuda=>13.0"}, None),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0" + " " * 20_000}, None),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=0"}, None),
    ],
)
def test_what_an_image_wants(env: dict[str, str], expected: tuple[int, int] | None) -> None:
    assert wanted(env) == expected


def test_the_lowest_that_serves_is_taken() -> None:
    assert choose(IMAGE, NODE, ALL, DEFAULT).package is C130
    assert choose({"CUDA_VERSION": "13.1"}, NODE, ALL, DEFAULT).package is C131
    skipping = (C131, replace(C130, drivers=frozenset({535})))
    choice = choose(IMAGE, NODE, skipping, DEFAULT)
    assert choice.package is C131
    assert choice.why == "CUDA 13.1 by libcuda 590.44.01, because CUDA 13.0 is wanted"


def test_within_one_major_cuda_helps_itself_unless_policy_says_otherwise() -> None:
    env = {"CUDA_VERSION": "12.9"}
    assert "compat.across_minor" in choose(env, NODE, ALL, DEFAULT).why
    assert choose(env, NODE, ALL, ACROSS).package is C129


GPU = NODE.gpus[0]
OFF: dict[str, tuple[RequirementFacts, tuple[CompatPackage, ...], str]] = {
    "no package": (NODE, (), "there is none"),
    "only older ones": (NODE, (C129,), "12.9: it is older"),
    "not for this driver": (replace(NODE, driver_version="565.57.01"), ALL, "13.0: it is not made for driver 565"),
    "a brand that it fails on": (replace(NODE, gpus=(replace(GPU, brand="geforce"),)), ALL, "list the GPU's geforce"),
    "one of several GPUs": (replace(NODE, gpus=(GPU, replace(GPU, brand="titan"))), ALL, "list the GPU's titan"),
    "a brand that nobody told": (replace(NODE, gpus=(replace(GPU, brand=""),)), ALL, "(unknown)"),
    "an unknown CUDA": (replace(NODE, cuda_version=""), ALL, "the driver's CUDA version is not known"),
    "not newer than the driver": (replace(NODE, driver_version="580.65.06"), (C130,), "is not newer than the driver"),
    "no note and the same major": (NODE, (package("13.0", "570.99", None),), "does not say for which drivers"),
}


@pytest.mark.parametrize(("facts", "packages", "why"), OFF.values(), ids=OFF)
def test_off_where_it_would_break(facts: RequirementFacts, packages: tuple[CompatPackage, ...], why: str) -> None:
    choice = choose(IMAGE, facts, packages, DEFAULT)
    assert choice.package is None
    assert why in choice.why


OWN = "/usr/local/cuda/compat"
BROUGHT = {
    "CUDA_VERSION": "13.0.1",
    "NVIDIA_REQUIRE_CUDA": "cuda>=13.0 brand=unknown,driver>=570,driver<571",
    "LD_LIBRARY_PATH": f"/usr/local/nvidia/lib:{OWN}:/opt/lib",
}
IMAGES = Policy(compat=CompatSettings(image=True))


def test_a_note_names_the_package_that_an_image_needs() -> None:
    choice = choose(BROUGHT, NODE, (), DEFAULT)
    assert (choice.package, choice.folder) == (None, "")
    assert choice.note == (
        "the image is for CUDA 13.0, and the driver has 12.8, so CUDA may fail in it: put NVIDIA's cuda-compat-13-0 "
        "into compat.dir, or compat.image = true for its own package"
    )
    without = choose(BROUGHT | {"LD_LIBRARY_PATH": "/opt/lib"}, NODE, (), IMAGES)
    assert (without.folder, without.note.endswith("into compat.dir")) == ("", True)
    assert choose(BROUGHT, replace(NODE, cuda_version="13.0"), (), DEFAULT).note == ""


@pytest.mark.parametrize(
    "folder",
    [
        OWN,
        f"{OWN}/",
        f"{OWN}/lib",
        f"{OWN}/lib.real",
        "/usr/local/cuda-13.0/compat",
        "/opt/cuda/compat",
        "/cuda/compat",
        "/opt/conda/cuda-compat",
        "/usr/local//cuda/compat//",
    ],
)
def test_the_images_own_package_by_policy(folder: str) -> None:
    choice = choose(BROUGHT | {"LD_LIBRARY_PATH": f"/opt/lib:{folder}"}, NODE, (), IMAGES)
    assert (choice.folder, choice.note) == (folder, "")
    assert choice.why == "the image's own package, because CUDA 13.0 is wanted"  # no text of its environment
    assert choose(BROUGHT, NODE, ALL, IMAGES).package is C130  # the host's is better known


@pytest.mark.parametrize(
    "folder", ["cuda/compat", "/usr/../cuda/compat", "/usr/local/cuda/lib64", "/compat", "", "/a b/cuda/compat"]
)
def test_what_is_no_folder_of_a_package(folder: str) -> None:
    assert choose(BROUGHT | {"LD_LIBRARY_PATH": folder}, NODE, (), IMAGES).folder == ""


NOT_BY_IT: dict[str, tuple[dict[str, str], RequirementFacts]] = {
    "the driver is as new": ({}, replace(NODE, cuda_version="13.0")),
    "the requirement does not hold": ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, NODE),
    "an older image says it alone": ({"NVIDIA_REQUIRE_CUDA": ""}, NODE),
    "the same major": ({"CUDA_VERSION": "12.9", "NVIDIA_REQUIRE_CUDA": "cuda>=12.9 driver>=535"}, NODE),
    "a GPU that it fails on": ({}, replace(NODE, gpus=(replace(GPU, brand="geforce"),))),
}


@pytest.mark.parametrize(("env", "facts"), NOT_BY_IT.values(), ids=NOT_BY_IT)
def test_the_images_own_serves_only_where_the_requirement_holds_by_it(
    env: dict[str, str], facts: RequirementFacts
) -> None:
    assert choose(BROUGHT | env, facts, (), IMAGES).folder == ""


def test_brands_are_policys_to_widen() -> None:
    quadro = replace(NODE, gpus=(replace(GPU, brand="Quadro"),))
    assert choose(IMAGE, quadro, ALL, DEFAULT).package is None
    assert choose(IMAGE, quadro, ALL, Policy(compat=CompatSettings(brands=("quadro",)))).package is C130


def test_without_a_note_a_newer_major_serves() -> None:
    noteless = package("13.0", "580.65.06", None)
    assert choose(IMAGE, NODE, (noteless,), DEFAULT).package is noteless
    assert not unfit_driver("580.65.06", None, "570.26")
    assert unfit_driver("580.65.06", None, "580.60")


def test_only_cuda_changes_in_what_is_checked() -> None:
    facts = with_compat(NODE, C130)
    assert unmet(IMAGE, NODE)
    assert not unmet(IMAGE, facts)
    another = choose({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0,brand=quadro"}, NODE, (C130,), DEFAULT)
    assert (another.package, "the image's requirements do not hold with it" in another.why) == (None, True)
    assert (facts.driver_version, facts.gpus) == (NODE.driver_version, NODE.gpus)
    for still in ("driver>=580", "brand=tesla", "arch>=10.0"):
        assert unmet({"NVIDIA_REQUIRE_CUDA": f"cuda>=13.0,{still}"}, facts)
