"""The choice of a newer CUDA than the node's driver has, from a compatibility package on the host.

It is made only where an image needs it: an older libcuda in front of a newer driver's, or a libcuda on a GPU that it
does not support, breaks programs that would run (CUDA's errors 803 and 804).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.node import CompatPackage, CudaVersion
from nri_gpu.domain.text import shown
from nri_gpu.injection.driver_mounts import LIBRARY_PATH
from nri_gpu.policy.model import Policy
from nri_gpu.request.image_requirements import (
    CUDA_VERSION,
    REQUIRE_CUDA,
    TOTAL_MAX,
    Malformed,
    Property,
    RequirementFacts,
    Version,
    legacy_version,
    parse_requirement,
    unmet,
    version_of,
)

_ABOVE: Final = (">=", ">", "=")


class CompatChoice(Struct, frozen=True):
    """The CUDA that a container gets."""

    package: CompatPackage | None = None  # None: the container uses the driver's own libraries, or those of `folder`
    why: str = ""  # a clause for people, or empty if the image wants nothing newer than the driver has
    folder: str = ""  # in the image, of its own package
    note: str = ""  # what the operator could do for the image, or empty


DRIVERS_OWN: Final = CompatChoice()


def choose(
    env: Mapping[str, str], facts: RequirementFacts, packages: Sequence[CompatPackage], policy: Policy
) -> CompatChoice:
    """Return the package for an image of this environment, on these GPUs.

    If several serve, take the lowest CUDA: it is closest to what the image was tested with, and to the kernel module.
    One on the host comes before the image's own.
    """
    want, have = wanted(env), version_of(facts.cuda_version)
    if want is None or not facts.gpus or (have and want <= _pair(have)):
        return DRIVERS_OWN
    called = "CUDA {}.{}".format(*want)
    if not have or not version_of(facts.driver_version):
        return CompatChoice(why=f"{called} is wanted, and the driver's CUDA version is not known")
    if want[0] == have[0] and not policy.compat.across_minor:
        return CompatChoice(
            why=f"{called} is wanted, of the driver's own major version, and compat.across_minor is false"
        )
    for brand in (gpu.brand for gpu in facts.gpus):
        if brand.lower() not in policy.compat.brands:
            return CompatChoice(
                why=f"{called} is wanted, and compat.brands does not list the GPU's {shown(brand or '(unknown)')}"
            )
    unfit = []
    for package in sorted(packages, key=lambda each: each.cuda):
        why = _unfit(package, want, facts) or _not_met(env, with_compat(facts, package), policy)
        if not why:
            return CompatChoice(
                package, f"CUDA {package.cuda_version} by libcuda {package.version}, because {called} is wanted"
            )
        unfit.append(f"{package.cuda_version}: {why}")
    folder = _folder_of_image(env)
    if folder and policy.compat.image and not _not_met(env, facts, policy):
        return CompatChoice(why=f"the image's own package, because {called} is wanted", folder=folder)
    name = "cuda-compat-{}-{}".format(*want)
    own = ", or compat.image = true for its own package" if folder and not policy.compat.image else ""
    return CompatChoice(
        why=f"{called} is wanted, and no package serves ({', '.join(unfit) or 'there is none'})",
        note=f"the image is for {called}, and the driver has {facts.cuda_version}, so CUDA may fail in it: "
        f"put NVIDIA's {name} into compat.dir{own}",
    )


# Where NVIDIA's images have the package of their CUDA, and conda's: /opt/conda/cuda-compat.
_IMAGES_OWN: Final = re.compile(r"(?:/+[\w+-][\w.+-]*)*/+cuda(?:-[\d.]+)?[/-]compat(?:/lib(?:\.real)?)?/*")


def _folder_of_image(env: Mapping[str, str]) -> str:
    """Return the folder of an image's own package, as its LD_LIBRARY_PATH names it, or empty."""
    return next(filter(_IMAGES_OWN.fullmatch, env.get(LIBRARY_PATH, "").split(":")), "")


def with_compat(facts: RequirementFacts, package: CompatPackage) -> RequirementFacts:
    """Return the facts with the package's CUDA, on the same driver and GPUs."""
    return replace(facts, cuda_version=package.cuda_version)


def wanted(env: Mapping[str, str]) -> CudaVersion | None:
    """Return the CUDA that an image is for: the higher of CUDA_VERSION and what its first alternative asks for.

    The other alternatives are for older drivers, where the image brings its own compatibility package.
    """
    found = [
        version
        for version in (legacy_version(env.get(CUDA_VERSION, "")), *_required(env.get(REQUIRE_CUDA, "")))
        if version
    ]
    return max(map(_pair, found), default=None)


@lru_cache(maxsize=32)  # a node's images are few, and NVIDIA's say 1 kB, which takes a tenth of a millisecond
def _required(text: str) -> tuple[Version, ...]:
    alternatives = parse_requirement(text) if 0 < len(text) <= TOTAL_MAX else ()
    if isinstance(alternatives, Malformed) or not alternatives:
        return ()
    return tuple(
        condition.operand
        for condition in alternatives[0]
        if condition.property is Property.CUDA and condition.operator in _ABOVE and isinstance(condition.operand, tuple)
    )


def unfit_driver(version: str, drivers: frozenset[int] | None, driver_version: str) -> str:
    """Return why a package's libcuda does not run on a driver, or empty. drivers: as in `CompatPackage`."""
    own, driver = version_of(version), version_of(driver_version)
    if not own or not driver:
        return "the driver's version is not known"
    if own <= driver:
        return f"its libcuda {version} is not newer than the driver"
    if drivers is None:
        # Without a list, NVIDIA's own rule holds (nvidia-container-toolkit: cmd/nvidia-cdi-hook/cudacompat).
        return "" if own[0] > driver[0] else "it does not say for which drivers it is"
    return "" if driver[0] in drivers else f"it is not made for driver {driver[0]}"


def _unfit(package: CompatPackage, want: CudaVersion, facts: RequirementFacts) -> str:
    too_old = "it is older" if package.cuda < want else ""
    return too_old or unfit_driver(package.version, package.drivers, facts.driver_version)


def _not_met(env: Mapping[str, str], facts: RequirementFacts, policy: Policy) -> str:
    """Return that the image's requirements do not hold with its CUDA, or empty: an image may set an upper bound."""
    if not policy.requirements.check or not unmet(env, facts, may_disable=policy.requirements.may_disable):
        return ""
    return "the image's requirements do not hold with it"


def _pair(version: Version) -> CudaVersion:
    major, minor, *_ = (*version, 0, 0)
    return major, minor
