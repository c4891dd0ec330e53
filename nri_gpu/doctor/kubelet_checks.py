"""The checks of the kubelet: its sockets, its checkpoint, and what it allocates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.doctor.cdi_checks import KUBELETS
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import ON_THE_HOST, running, unit_of
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.domain.finding import Finding, error, ok, unseen, warning
from nri_gpu.domain.text import counted, listed
from nri_gpu.dra.claim_cdi import file_name
from nri_gpu.dra.dra_findings import LOOK, SUBJECT, files_advice, gate_advice, silence
from nri_gpu.kubelet.kubelet_findings import RESOURCES, kubelet_advice
from nri_gpu.policy.kubelet_settings import Registration
from nri_gpu.system.sockets import SocketState, socket_state
from nri_gpu.system.storage import text_of

CHECKPOINT: Final = "kubelet_internal_checkpoint"
CHECKPOINT_MAX: Final = 16 << 20  # bytes
CONFIG_MAX: Final = 1 << 20
ANSWER_S: Final = 0.4  # for PodResources
_CONFIG: Final = "/var/lib/kubelet/config.yaml"


class _CheckpointEntry(Struct, frozen=True):
    resource: str = field(default="", name="ResourceName")


class _CheckpointData(Struct, frozen=True):
    """The checkpoint's data. entries: pods' allocations, the gone pods' too until the kubelet allocates again."""

    registered: dict[str, tuple[str, ...] | None] | None = field(default=None, name="RegisteredDevices")
    entries: tuple[_CheckpointEntry, ...] | None = field(default=None, name="PodDeviceEntries")

    @property
    def resources(self) -> set[str]:
        return {*(self.registered or ()), *(each.resource for each in self.entries or ())}


class _Checkpoint(Struct, frozen=True):
    """The kubelet's checkpoint. Source: Kubernetes pkg/kubelet/cm/devicemanager/checkpoint."""

    data: _CheckpointData = field(name="Data")


def kubelet_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Yield the kubelet's findings; on a machine without a kubelet, a single `ok`."""
    settings = seen.policy.kubelet
    process = next(running(seen.at("/proc"), KUBELETS), None)
    state = socket_state(seen.at(settings.dir) / "kubelet.sock")
    enabled = settings.enabled or bool(seen.status and seen.status.kubelet.enabled)
    yield from claim_findings(seen)
    if process is None and state is SocketState.MISSING and not enabled:
        yield ok("kubelet", "none here; annotations allocate")
        return
    if seen.in_pod and not seen.at(settings.dir).is_dir():
        yield unseen("kubelet", f"{settings.dir} is not mounted in this pod", ON_THE_HOST)
        return
    restart = _restart(seen, runtime)
    yield from _socket(settings.dir, state, restart, enabled=enabled)
    if enabled and settings.registration is Registration.WATCHER and not seen.at(settings.registry_dir).is_dir():
        yield error(
            "kubelet",
            f"{settings.registry_dir} does not exist, where the kubelet should find nri-gpu: the kubelet has a "
            "different root folder",
            "# set kubelet.registry_dir in /etc/nri-gpu/policy.toml to the plugins_registry folder of its --root-dir",
        )
    yield from _resources(seen, restart, enabled=enabled)
    yield from _checkpoint(seen, runtime, enabled=enabled)
    yield from _cgroup_driver(seen, runtime)
    yield from _allocatable(seen)


def kubelet_unit(seen: Examined, runtime: ContainerRuntime | None) -> str:
    """Return the unit that runs the kubelet: distributions run it in their own."""
    ours = runtime.distribution if runtime else None
    usual = (ours.kubelet or runtime.service) if runtime and ours else "kubelet"
    return unit_of(seen, next(running(seen.at("/proc"), KUBELETS), None), (usual,))


def _restart(seen: Examined, runtime: ContainerRuntime | None) -> tuple[str, ...]:
    """Return what starts the kubelet again; in distributions the runtime's restart does so, too."""
    if runtime and (runtime.ends_at_start or runtime.cri_fault):
        return runtime.restart
    return (f"systemctl restart {kubelet_unit(seen, runtime)}    # pods go on running",)


def _socket(folder: str, state: SocketState, restart: tuple[str, ...], *, enabled: bool) -> Iterator[Finding]:
    subject, path = "kubelet", f"{folder}/kubelet.sock"
    if state is SocketState.LIVE:
        yield ok(subject, f"it listens for device plugins at {path}")
    elif state is SocketState.CLOSED:
        yield unseen(subject, f"only root can see whether it listens at {path}", "sudo nri-gpu doctor")
    elif enabled:
        yield error(
            subject,
            f"{path} is {state}, so nri-gpu cannot offer this node's GPUs: the kubelet does not run, or has a "
            "different root folder",
            *restart,
            "# or set kubelet.dir in /etc/nri-gpu/policy.toml to the device-plugins folder of its --root-dir",
        )
    else:
        yield warning(subject, f"{path} is {state}: the kubelet does not run, or has a different root folder", *restart)


def _resources(seen: Examined, restart: tuple[str, ...], *, enabled: bool) -> Iterator[Finding]:
    subject = "device plugin"
    if not enabled:
        yield ok(subject, "off (kubelet.enabled): annotations allocate, and the scheduler does not count the GPUs")
        return
    status = seen.status.kubelet if seen.status else None
    for each in status.resources if status else ():
        if each.since_s is None or each.fault:
            why = each.fault or "the kubelet has not answered"
            yield error(subject, f"{each.resource} is not registered with the kubelet: {why}", *restart)
        else:
            yield ok(subject, f"{each.resource} is registered with the kubelet")
    if status and status.guard_alone:
        yield warning(
            subject,
            "only the guard stops containers to which the kubelet allocated GPUs and that start without them: "
            f"{status.guard_alone}",
            "systemctl enable --now nri-gpu-guard",
        )


def claim_findings(seen: Examined) -> Iterator[Finding]:
    """Check whether the driver process serves claims, and what keeps it from that."""
    dra = seen.status.dra if seen.status else None
    if dra is None or not dra.enabled:
        return
    away = dra.fault or silence(dra.asked_s, dra.silent_s)
    if fault := away or dra.report.unwritten or dra.report.fault:
        yield error(SUBJECT, fault, *LOOK)
    else:
        yield ok(SUBJECT, f"{dra.driver} publishes {counted(dra.report.published, 'device')}")
    yield from files_advice(dra.report)
    yield from _missing_files(seen)
    yield from gate_advice(dra.report)


def _missing_files(seen: Examined) -> Iterator[Finding]:
    """Report missing specifications of prepared claims, as far as their folder is seen from here."""
    folder = seen.at(seen.policy.kubelet.cdi_dir)
    claims = seen.status.claims if seen.status and folder.is_dir() else ()
    missing = [
        f"{each.namespace}/{each.name}" for each in claims if not (folder / file_name(ClaimUid(each.uid))).exists()
    ]
    if missing:
        yield warning(
            SUBJECT,
            f"{seen.policy.kubelet.cdi_dir} lacks the CDI specification of claim {listed(missing)}: its containers do "
            "not start again until `nri-gpu dra` has written it",
            *LOOK,
        )


def _checkpoint(seen: Examined, runtime: ContainerRuntime | None, *, enabled: bool) -> Iterator[Finding]:
    subject, shown = "kubelet checkpoint", f"{seen.policy.kubelet.dir}/{CHECKPOINT}"
    path = seen.at(shown)
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(CHECKPOINT_MAX), type=_Checkpoint)
    except OSError:
        yield unseen(subject, f"only root can read {shown}", "sudo nri-gpu doctor")
    except (ValueError, RecursionError) as fault:
        yield error(
            subject,
            f"{shown} is damaged ({fault}): the kubelet does not know which pods have which GPUs, and does not start",
            f"mv {shown} {shown}.broken    # and delete the pods that have GPUs once the kubelet runs",
            *_restart(seen, runtime),
        )
    else:
        prefixes = tuple(f"{name.partition('/')[0]}/" for name in seen.policy.kubelet.names)
        ours = sorted(each for each in found.data.resources if each.startswith(prefixes))
        if ours and not enabled and _serves_claims(seen):
            yield warning(
                subject,
                f"{shown} has {listed(ours)} of a device plugin, and claims allocate on this node: a pod that gets "
                "such a resource by a claim (dra.extendedResource) stays in CreateContainerConfigError",
                "# drain the node, so that no pod has a device of a plugin, then:",
                f"systemctl stop {kubelet_unit(seen, runtime)}",
                f"rm {shown}",
                f"systemctl start {kubelet_unit(seen, runtime)}",
            )
            return
        counts = {name: len(ids or ()) for name, ids in (found.data.registered or {}).items()}
        yield ok(subject, listed(f"{count} of {name}" for name, count in sorted(counts.items())) or "no devices in it")


def _serves_claims(seen: Examined) -> bool:
    return seen.policy.dra.enabled or bool(seen.status and seen.status.dra.enabled)


def _cgroup_driver(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check the cgroup driver in the kubelet's own file, if it has one; a kubelet of 1.34 asks the runtime instead.

    Distributions have another file, and set both sides themselves.
    """
    subject = "cgroup driver"
    if runtime is None or runtime.containerd is None or runtime.dockers or runtime.distribution:
        return
    lines = (text_of(seen.at(_CONFIG), CONFIG_MAX, "utf-8") or "").splitlines()
    said = next((line.partition(":")[2].strip(" \"'") for line in lines if line.startswith("cgroupDriver:")), "")
    theirs = "systemd" if runtime.containerd.cri.systemd_cgroup else "cgroupfs"
    if said and said != theirs:
        yield warning(
            subject,
            f"the kubelet uses {said}, but containerd {theirs}: under load they undo each other's limits and device "
            "rules",
            *runtime.edit(
                f"cri.containerd.runtimes.{runtime.default_handler}.options",
                "in the options table of the default runtime",
                f"SystemdCgroup = {'true' if said == 'systemd' else 'false'}",
            ),
            *(_restart(seen, runtime) if not runtime.ends_at_start else ()),
        )
    elif said:
        yield ok(subject, f"{said}, for kubelet and containerd")


def _allocatable(seen: Examined) -> Iterator[Finding]:
    """Report what `check` advises about the kubelet's allocatable resources."""
    settings = seen.policy.kubelet
    if not settings.podresources:
        return
    path = seen.at(settings.podresources)
    state = socket_state(path)
    if state is SocketState.CLOSED:
        yield unseen(RESOURCES, f"only root may query {settings.podresources}", "sudo nri-gpu doctor")
    elif state is SocketState.LIVE:
        policy = replace(seen.policy, kubelet=replace(settings, podresources=str(path)))
        yield from kubelet_advice(policy, ANSWER_S)
