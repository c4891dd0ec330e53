"""Who takes part: bare, ours in its settings, the least that any plugin can do, and programs of others."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import jsonschema  # type: ignore[import-untyped]  # it ships no types
from msgspec import Struct

from bench.process import EIGHT_GPUS
from bench.sites import Added, Contender, Sites
from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.node import Loader
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid
from nri_gpu.dra.claim_cdi import ClaimSpecifications
from nri_gpu.dra.daemon_client import DaemonClient
from nri_gpu.dra.questions import AskPrepare, Prepared
from nri_gpu.inventory.topology_file import load_topology
from tests.support import packages
from tests.support.driver_root import PROGRAMS, make_driver_root
from tests.support.errors import HarnessError
from tests.support.nvml import build_fake_nvml, gpus_of
from tests.support.pods import ContainerSpec

BARE, AGAIN = "bare: NRI off, no GPU", "bare, on a second containerd (noise)"
NOTHING, UNASKED = "a Python plugin that does nothing", "nri-gpu, nothing asked"
ONE, EIGHT = "nri-gpu, 1 GPU", "nri-gpu, 8 GPUs"
TREE, FILES = "nri-gpu, 8 GPUs, loader = tree", "nri-gpu, 8 GPUs, loader = files"
CLAIMED_ONE, CLAIMED_EIGHT = "nri-gpu, 1 GPU of a claim", "nri-gpu, 8 GPUs of a claim"
CDI = "our CDI specification, NRI off"
FLOOR, SAME = "floor: 8 GPUs and one folder, a constant reply", "nri-gpu's reply for 8 GPUs, but constant"
GO_NOTHING, GO_INJECTOR = "a Go plugin that does nothing", "a Go plugin that injects file by file"
HOOKS = "CDI with NVIDIA's hooks"
RUNTIME_CDI, RUNTIME_JIT = "nvidia-container-runtime, cdi", "nvidia-container-runtime, jit-cdi"

ALL: Final = {"gpu.nri.io/pod": "all"}
LAST_NODE: Final = "/dev/nvidia7"
FLOOR_PLACES: Final = ("/usr/local/nvidia",)
# What a server's driver lacks of all that NVIDIA's package has: X, Wayland and its own copies of GLVND.
NOT_OF_A_SERVER: Final = (
    "lib64/libEGL.so.*",
    "lib64/libnvidia-egl-*",
    "lib64/libnvidia-api.so.*",
    "lib64/libnvidia-gtk3*",
    "lib64/libnvidia-sandboxutils*",
    "lib64/xorg/modules/*/*",
    "etc/OpenCL/vendors/*",
    "bin/nvidia-xconfig",
    "bin/nvidia-settings",
)
# Of the nodes that every container with GPUs gets, in a simulated node's numbers.
CONTROL_NODES: Final = {"nvidiactl": (195, 255), "nvidia-uvm": (510, 0), "nvidia-uvm-tools": (510, 1)}
NODES: Final = CONTROL_NODES | {f"nvidia{minor}": (195, minor) for minor in range(8)}
CDI_SCHEMA: Final = json.loads((Path(packages.__file__).parent / "cdi_schema.json").read_text())
HOOKS_OF_NVIDIA: Final = {
    "create-symlinks",
    "disable-device-node-modification",
    "enable-cuda-compat",
    "update-application-profile",
    "update-ldcache",
}
CONFIG: Final = """\
[nvidia-container-cli]
root = "{driver}"
[nvidia-container-runtime]
mode = "{mode}"
runtimes = ["{runc}"]
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{folder}"]
[nvidia-ctk]
path = "{hook}"
"""
Entry = tuple[str, Contender]


class Rival(Struct, frozen=True):
    """Programs of others, which take part where their set of tests/ground is built."""

    set_name: str
    names: Sequence[str]
    make: Callable[[Sites, Path], Iterator[Entry]]


def always(sites: Sites, floors: Sequence[Sequence[str]] = ()) -> Iterator[Entry]:
    """Contenders that need nothing from outside. floors: more of them: where each mounts the folder of libraries."""
    bare = sites.bare()
    nothing, ours, again = sites.constant(), sites.ours(), sites.bare(sites.our_specification())
    claims = sites.ours(dra=True)
    cdi = _prepared(claims_pod := Contender(claims, claims.pod()))
    eight = Contender(ours, ours.pod(ALL), present=(LAST_NODE,))
    yield BARE, (plain := Contender(bare, bare.pod()))
    yield AGAIN, Contender(again, again.pod())
    yield NOTHING, Contender(nothing, nothing.pod())
    yield UNASKED, Contender(ours, ours.pod())
    yield ONE, Contender(ours, ours.pod({"gpu.nri.io/pod": "1"}))
    yield EIGHT, eight
    for name, loader in ((TREE, Loader.TREE), (FILES, Loader.FILES)):
        site = sites.ours(loader)
        yield name, Contender(site, site.pod(ALL), present=(LAST_NODE,))
    for name, devices in ((CLAIMED_ONE, cdi[:1]), (CLAIMED_EIGHT, cdi)):
        yield name, Contender(claims, claims_pod.pod, ContainerSpec(cdi_devices=devices))
    yield CDI, Contender(again, again.pod(), ContainerSpec(cdi_devices=("nvidia.com/gpu=all",)), (LAST_NODE,))
    ours_added = Added.between(eight.oci(), plain.oci())
    constants = {SAME: _reply(ours_added), FLOOR: _reply(ours_added, FLOOR_PLACES)}
    constants |= {f"floor: {', '.join(places)}": _reply(ours_added, places) for places in floors}
    for name, reply in constants.items():
        site = sites.constant(reply)
        yield name, Contender(site, site.pod(), present=(LAST_NODE,))


def _prepared(contender: Contender) -> tuple[str, ...]:
    """The CDI names of a pod's claim to eight GPUs, as `nri-gpu dra` prepares it."""
    metadata, uid = contender.pod.config.metadata, ClaimUid("5a1c9b1e-0d5f-4a63-8f86-0a54a1c7e001")
    claim = AllocatedClaim(
        uid=uid,
        namespace=metadata.namespace,
        name="eight",
        pods={PodUid(metadata.uid): metadata.name},
        results=tuple(AllocatedResult(request=f"gpu-{at}", pool="node", device=f"gpu-{at}") for at in range(8)),
        owned=True,
    )
    answer = asyncio.run(DaemonClient(contender.site.state).ask(AskPrepare(claim)))
    assert isinstance(answer, Prepared), answer
    return ClaimSpecifications(contender.site.node.layout.cdi).write(uid, answer)


def _reply(ours: Added, places: Sequence[str] | None = None) -> bytes:
    """Our reply to CreateContainer in its nodes and mounts; or with the folder of libraries at these places instead.

    A place that ends as one of our mounts does gets what that one has.
    """
    sources = {Path(mount["destination"]).name: mount["source"] for mount in ours.mounts}
    at = places if places is not None else [mount["destination"] for mount in ours.mounts]
    folder = ours.mounts[0]["source"]
    mounts = [
        pb.Mount(destination=each, type="bind", source=sources.get(Path(each).name, folder), options=["rbind", "ro"])
        for each in at
    ]
    devices = [
        pb.LinuxDevice(path=node["path"], type="c", major=node["major"], minor=node["minor"]) for node in ours.nodes
    ]
    rules = [
        pb.LinuxDeviceCgroup(
            allow=True, type="c", access="rw", major=pb.OptionalInt64(value=each.major), minor={"value": each.minor}
        )
        for each in devices
    ]
    linux = pb.LinuxContainerAdjustment(devices=devices, resources=pb.LinuxResources(devices=rules))
    adjust = pb.ContainerAdjustment(mounts=mounts, linux=linux)
    return pb.CreateContainerResponse(adjust=adjust).SerializeToString()


def server_driver(root: Path) -> Path:
    """A driver's root as a server has it: 31 libraries of one version, and 5 programs."""
    make_driver_root(root, everything=True)
    for pattern in NOT_OF_A_SERVER:
        for file in root.glob(pattern):
            file.unlink()
    return root


def injected(driver: Path) -> Mapping[str, str]:
    """The annotation that makes the injector add a driver's files, one by one, and the nodes of 8 GPUs."""
    files = [*sorted((driver / "lib64").rglob("*.so.*.*")), *(driver / "bin" / name for name in PROGRAMS)]
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    mounts = [
        {"source": str(each), "destination": f"/usr/{each.relative_to(driver)}", "type": "bind", "options": options}
        for each in files
    ]
    devices = [
        {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor, "fileMode": {"value": 0o666}}
        for name, (major, minor) in NODES.items()
    ]
    return {"nri-gpu.bench/adjustment": json.dumps({"mounts": mounts, "linux": {"devices": devices}})}


def _go_plugins(sites: Sites, folder: Path) -> Iterator[Entry]:
    site = sites.plugin(folder / "noop")
    yield GO_NOTHING, Contender(site, site.pod())
    site = sites.plugin(folder / "injector")
    yield GO_INJECTOR, Contender(site, site.pod(injected(sites.driver)), present=(LAST_NODE, "/usr/bin/nvidia-smi"))


def _toolkit(sites: Sites, folder: Path) -> Iterator[Entry]:
    """What NVIDIA's toolkit makes of a driver that is made up, but that its tools can ask."""
    gpus, ancestors = gpus_of(load_topology(EIGHT_GPUS))
    driver = server_driver(sites.folder / "nvidia")  # one of its own: a driver that changes is staged anew by ours
    build_fake_nvml(driver, gpus, ancestors=ancestors, lib_dir="lib64")
    (driver / "dev").mkdir()
    for name, (major, minor) in NODES.items():
        os.mknod(driver / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    cdi, hook = sites.folder / "nvidia-cdi", folder / "nvidia-cdi-hook"
    cdi.mkdir()
    specification = specify(folder / "nvidia-ctk", driver, hook, cdi / "nvidia.json")
    present = (LAST_NODE, "/etc/ld.so.cache", "/lib64/libcuda.so.1")
    site = sites.bare(specification)
    yield HOOKS, Contender(site, site.pod(), ContainerSpec(cdi_devices=("nvidia.com/gpu=all",)), present)
    asking = ContainerSpec(env={"NVIDIA_VISIBLE_DEVICES": "all"})
    for name, mode in ((RUNTIME_CDI, "cdi"), (RUNTIME_JIT, "jit-cdi")):
        config = sites.folder / f"nvidia-{mode}.toml"
        config.write_text(CONFIG.format(driver=driver, mode=mode, runc=packages.runc(), folder=cdi, hook=hook), "ascii")
        environment = {"NVIDIA_CTK_CONFIG_FILE_PATH": str(config)}
        site = sites.wrapped(folder / "nvidia-container-runtime", environment)
        yield name, Contender(site, site.pod(), asking, present)


def specify(program: Path, driver: Path, hook: Path, file: Path) -> Path:
    """The file that `nvidia-ctk cdi generate` writes. Raises: HarnessError: none, not CDI's, or without its hooks."""
    options = {"--mode": "nvml", "--driver-root": driver, "--nvidia-cdi-hook-path": hook, "--output": file}
    command = [str(program), "cdi", "generate", *(str(word) for pair in options.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise HarnessError(f"{program} cdi generate failed: {done.stderr.strip()[-1000:]}")
    document = json.loads(file.read_text())
    edits = [each.get("containerEdits", {}) for each in (document, *document.get("devices", []))]
    hooks = [hook for each in edits for hook in each.pop("hooks", [])]  # the schema is of specifications without
    try:
        jsonschema.validate(document, CDI_SCHEMA)
    except jsonschema.ValidationError as fault:
        raise HarnessError(f"{program} wrote what is no CDI specification: {fault.message}") from None
    if missing := HOOKS_OF_NVIDIA.difference(*(hook["args"] for hook in hooks)):
        raise HarnessError(f"{program} wrote no hooks for {', '.join(sorted(missing))}")
    return file


RIVALS: Final = (
    Rival("nri-plugins", (GO_NOTHING, GO_INJECTOR), _go_plugins),
    Rival("nvidia", (HOOKS, RUNTIME_CDI, RUNTIME_JIT), _toolkit),
)
