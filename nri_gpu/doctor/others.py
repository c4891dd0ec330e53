"""Other components that give GPUs to containers, and images that would get them past the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from nri_gpu.doctor.cdi import DOCKER, docker_settings
from nri_gpu.doctor.finding import DoctorFinding, Examined, error, ok, policy_lines, unseen, warning
from nri_gpu.doctor.runtime import ContainerRuntime
from nri_gpu.domain.text import listed
from nri_gpu.host.advice import ComponentKind, components, node_advice
from nri_gpu.policy.model import Disarm

BLOBS: Final = "io.containerd.content.v1.content/blobs/sha256"
CONFIG_MAX: Final = 256 << 10  # bytes; an image's configuration is mostly below 20 kB
LOOK_S: Final = 0.3
_VARIABLE: Final = b"NVIDIA_VISIBLE_DEVICES"
_NOBODY: Final = ("", "void", "none")


class _ImageProcess(Struct, frozen=True):
    Env: tuple[str, ...] | None = None


class _ImageConfig(Struct, frozen=True):
    """An image's configuration (OCI image-spec, config.md)."""

    config: _ImageProcess | None = None

    @property
    def visible_devices(self) -> str:
        variables = (each.partition("=") for each in (self.config and self.config.Env) or ())
        return next((value for name, _, value in variables if name == _VARIABLE.decode()), "")


def other_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[DoctorFinding]:
    """NVIDIA's runtime, hooks, device plugins and DRA driver, CDI specifications with hooks, and images."""
    advice = node_advice(seen.policy, seen.root)
    for sentence in advice:
        yield warning("other injectors", sentence, *policy_lines(sentence))
    default = runtime.default_handler if runtime and "nvidia" in runtime.default_handler else ""
    disarmed = seen.policy.environment.disarm is Disarm.ALL
    if runtime and default and not disarmed:
        yield error(
            "default runtime",
            f"{default} is the default runtime of {runtime.name}: any image that sets NVIDIA_VISIBLE_DEVICES gets "
            "GPUs, past nri-gpu and its policy",
            *_runc(runtime),
        )
    yield from _docker(seen)
    found = tuple(components(seen.root, seen.policy.kubelet.dir, str(Path(seen.policy.kubelet.registry_dir).parent)))
    if not advice and not default:
        yield ok("other injectors", "no other component that gives GPUs to containers" if not found else "provided for")
    obeys = bool(default) or any(each.kind is ComponentKind.RUNTIME for each in found)
    yield from _images(seen, runtime, obeys=obeys and not disarmed)


def _runc(runtime: ContainerRuntime) -> tuple[str, ...]:
    if runtime.containerd is None:
        return runtime.edit("runtime", "below [crio.runtime]", 'default_runtime = "crun"')
    return runtime.edit("cri.containerd", "below the CRI plugin's [containerd] table", 'default_runtime_name = "runc"')


def _docker(seen: Examined) -> Iterator[DoctorFinding]:
    """Docker's containers never come to NRI: NVIDIA's runtime is theirs alone to use or not."""
    settings = docker_settings(seen)
    if settings and "nvidia" in settings.default_runtime:
        yield warning(
            "Docker",
            f"{DOCKER} makes {settings.default_runtime} Docker's default runtime: any image that sets "
            "NVIDIA_VISIBLE_DEVICES gets GPUs there, and nri-gpu does not know of it",
            f"# in {DOCKER}, remove the line:",
            f'"default-runtime": "{settings.default_runtime}"',
            "systemctl reload docker    # then give GPUs by `nri-gpu cdi generate` and --device",
        )


def _images(seen: Examined, runtime: ContainerRuntime | None, *, obeys: bool) -> Iterator[DoctorFinding]:
    """Images in containerd's store that ask for GPUs by themselves. obeys: somebody here does what they say."""
    subject = "images"
    if runtime is None or runtime.containerd is None:
        return
    if not obeys:
        yield ok(subject, "nobody here obeys NVIDIA_VISIBLE_DEVICES in an image")
        return
    folder = seen.at(runtime.containerd.root) / BLOBS
    try:
        found, whole = _asking(folder, time.monotonic() + LOOK_S)
    except OSError as fault:
        yield unseen(
            subject,
            f"the images below {runtime.containerd.root} cannot be read: {fault.strerror}",
            "sudo nri-gpu doctor",
        )
        return
    if not whole:
        yield unseen(
            subject, f"{runtime.containerd.root} has more than can be read in {LOOK_S} s; those read count below"
        )
    if found:
        yield warning(
            subject,
            f"{len(found)} image{'s set' if len(found) > 1 else ' sets'} NVIDIA_VISIBLE_DEVICES, and NVIDIA's runtime "
            f"obeys it: {listed(found)}",
            *policy_lines('set environment.disarm = "all"'),
            f"crictl images --no-trunc | grep -e {found[0]}    # its name",
        )
    elif whole:
        yield ok(subject, "no image here sets NVIDIA_VISIBLE_DEVICES")


def _asking(folder: Path, until: float) -> tuple[list[str], bool]:
    """IDs of images that name devices, and whether all were read. Raises: OSError."""
    found: list[str] = []
    for path in sorted(folder.iterdir()):
        if time.monotonic() > until:
            return found, False
        try:
            if path.stat().st_size > CONFIG_MAX or not path.is_file():
                continue
            content = path.read_bytes()
        except FileNotFoundError:  # the runtime has removed it since
            continue
        if _VARIABLE in content and names_devices(content):
            found.append(f"sha256:{path.name[:12]}")
    return found, True


def names_devices(content: bytes) -> bool:
    try:
        return msgspec.json.decode(content, type=_ImageConfig).visible_devices not in _NOBODY
    except (ValueError, RecursionError):  # an image's author wrote it
        return False
