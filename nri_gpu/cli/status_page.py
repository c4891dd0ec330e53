"""The page of `nri-gpu status`: the holders of each GPU, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import UnsetType

from nri_gpu.cli.page import Column, Grid, Line, Row, Tone
from nri_gpu.cli.render import at, health_lines, lines, of_trouble, transition_lines, unlisted_lines
from nri_gpu.daemon.answers import (
    DaemonStatus,
    ExternalStatus,
    HolderStatus,
    LostStatus,
    NodeStatus,
    StrayStatus,
    UnitStatus,
)
from nri_gpu.decision.overlaps import SEPARATE, conflict_sentence
from nri_gpu.decision.refusals import number_of
from nri_gpu.domain.decision import Refused
from nri_gpu.dra.dra_findings import files_advice, gate_advice, silence
from nri_gpu.health.health_notes import sentences
from nri_gpu.system.runtime_cri import WITHOUT

SHOWN: Final = 5  # refusals; `-o json` has more
UNITS_S: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
MODES: Final = {"exclusive": Tone.HEAD, "": Tone.FAINT}  # others share it
COLUMNS: Final = (
    *map(Column, ("GPU", "MODEL", "MODE", "HELD BY", "CONTAINER", "FOR")),
    Column("UNAVAILABLE", prose=True),
)


def faults(status: DaemonStatus) -> list[str]:
    """Return what keeps the daemon from granting, each as a sentence."""
    runtime, fault = status.runtime, status.policy.fault
    found = [] if runtime.ready else [f"not connected to the runtime: {runtime.fault or 'connecting'}"]
    found += filter(None, (runtime.list_fault, _inventory_fault(status.node), status.node.driver_fault))
    return found + ([f"policy not usable: {fault}"] if fault else [])


def to_mend(status: DaemonStatus) -> list[str]:
    """Return faults of a daemon that grants: a policy file that was not taken, and exclusive GPUs that two pods use."""
    fault = status.policy.rejected
    found = [f"policy file rejected, the previous policy stays in force: {fault}"] if fault else []
    if second := status.runtime.second:
        found.append(f"two nri-gpu serve this runtime, and refuse each other's containers ({second}): stop one of them")
    found += [
        f"GPU {each.gpu_uuid} was granted to {' and '.join(each.pods)}, to one of them exclusively: delete all of "
        "these pods but one"
        for each in status.overlaps
        if each.granted
    ]
    return found + [
        f"{conflict_sentence(each.pod, each.container, each.gpu_uuids, each.holders)}: {SEPARATE}"
        for each in status.conflicts
    ]


def _inventory_fault(node: NodeStatus) -> str:
    """Return the inventory's fault, with its age."""
    if not node.inventory_fault:
        return ""
    sentence = node.inventory_fault + _since_when(node.inventory_fault_since_s)
    if node.inventory_age_s is None or not node.inventory_confirmed:
        return sentence
    return f"{sentence} (its GPUs were last confirmed {ago(node.inventory_age_s)} ago)"


def status_page(status: DaemonStatus, now: float, *, glance: bool = False) -> list[Line | Grid]:
    """Return a headline, a table with a line for each GPU and holder, and faults below it.

    glance: for a terminal, where a count of the GPUs and the faults come first.
    """
    runtime, node = status.runtime, status.node
    name = f"{runtime.name or 'runtime'} {runtime.version}".strip() if runtime.joined else "no runtime"
    at_node = f"{node.name}: " if node.name else ""  # an older daemon does not say
    headline = f"{at_node}{name}, driver {node.driver_version or '?'}, policy: {status.policy.source}"
    wrong = [*lines(faults(status) + to_mend(status), Tone.BAD)]
    rows = tuple(row for gpu in status.gpus for row in _rows(gpu, status, now))
    return [
        Line(headline, Tone.HEAD),
        *([Line(counted(status)), *wrong] if glance else []),
        Grid(COLUMNS, rows) if rows else Line("no GPUs"),
        *lines(_notes(status), Tone.WARN),
        *lines(_stray_lines(status.stray, now), Tone.BAD),
        *lines(_of_kubelet(status, now), Tone.PLAIN),
        *lines(_of_dra(status), Tone.PLAIN),
        *lines(health_lines({gpu.place: gpu.health for gpu in status.gpus}), Tone.WARN),
        *lines(_health_notes(status), Tone.WARN),
        *([] if glance else wrong),
        *lines(_refusal_lines(status), Tone.WARN),
        *lines(transition_lines(status.transitions), Tone.FAINT),
    ]


def counted(status: DaemonStatus) -> str:
    """Return `8 GPUs: 3 held, 4 free, 1 unavailable`; a GPU with MIG devices counts as these."""
    with_parts = {gpu.place.partition(":")[0] for gpu in status.gpus if gpu.kind == "mig"}
    units = [gpu for gpu in status.gpus if gpu.place not in with_parts]
    held = sum(bool(gpu.mode or gpu.foreign or gpu.opened_by) for gpu in units)
    free = sum(not gpu.unavailable and not (gpu.mode or gpu.foreign or gpu.opened_by) for gpu in units)
    kind = "GPUs and MIG devices" if with_parts else "GPUs"
    return f"{len(units)} {kind}: {held} held, {free} free, {len(units) - held - free} unavailable"


def _notes(status: DaemonStatus) -> Iterator[str]:
    """Yield a sentence for each oddity of the node's GPUs and of their holders."""
    node = status.node
    yield from unlisted_lines(status.unlisted, node.inventory_fault)
    if status.runtime.cri_fault:
        yield f"CRI cannot be asked ({status.runtime.cri_fault}): {WITHOUT}"
    if not node.inventory_confirmed:
        yield f"from the last snapshot, {ago(node.inventory_age_s or 0)} old: the driver has not answered yet"
    yield from (f"{pod_of(holder)} holds a GPU that is gone: {', '.join(holder.gpu_uuids)}" for holder in status.gone)
    for gpu in status.gpus:
        yield from (
            f"{pod_of(each)}, container {each.container}: {each.restart}" for each in gpu.holders if each.restart
        )
    yield from map(_lost_line, status.lost)
    yield from (f"{each.clause}{_since_when(each.since_s)}: no second one is started" for each in status.unkilled)
    if unseen := [each for gpu in status.gpus for each in gpu.holders if each.unseen]:
        names = ", ".join(dict.fromkeys(map(pod_of, unseen)))
        yield f"the cgroups of {names} are not seen: their GPUs are free once the runtime reports that they ended"
    for fault in status.faults:
        yield f"GPU {fault.index} cannot be described{_since_when(fault.since_s)}: {fault.reason}"


def _health_notes(status: DaemonStatus) -> Iterator[str]:
    """Yield what is known of whole GPUs beside their state."""
    for gpu in status.gpus:
        yield from sentences(gpu.place, gpu.uuid, gpu.notes, at(gpu.notes.xid_at_s or 0))


def _lost_line(lost: LostStatus) -> str:
    """Return what an operator can do about a container that is over for the runtime and holds its GPUs."""
    place = f" in cgroup {lost.cgroup}" if lost.cgroup else ""
    if lost.sought:
        return (
            f"{lost.pod}, container {lost.container}: not listed by the runtime{_since_when(lost.since_s)}; it holds "
            "its GPUs while its cgroup is being looked for (see the log if this lasts)"
        )
    return (
        f"{lost.pod}, container {lost.container}: ended for the runtime{_since_when(lost.since_s)}, but holds its GPUs "
        f"until its processes{place} are gone ({lost.shown_pids}): end them, or thaw a paused container; a process "
        "that hangs in the driver ends with a reboot"
    )


def _refusal_lines(status: DaemonStatus) -> Iterator[str]:
    if status.refusals:
        yield f"{status.refusals[-1].number} refused since the daemon started, the last:"
        yield from (f"  {at(each.at_s)}  {refusal_words(each)}" for each in status.refusals[-SHOWN:])


def refusal_words(refused: Refused) -> str:
    container = f", container {refused.container}" if refused.container else ""
    return f"{refused.namespace}/{refused.pod}{container}: {refused.what} [{refused.code}]: {refused.reason}"


def _stray_lines(stray: StrayStatus, now: float) -> Iterator[str]:
    for each in stray.findings:
        age = f" for {ago(now - each.since_s)}" if each.since_s is not None else ""
        yield f"stray use{age}: {each.message}"
    if stray.fault:
        yield f"stray use may be missing here: {stray.fault}"


def _since_when(seconds: float | UnsetType | None) -> str:
    return f" since {at(seconds)}" if isinstance(seconds, float) else ""


def _rows(gpu: UnitStatus, status: DaemonStatus, now: float) -> Iterator[Row]:
    """Yield a row for each holder of a GPU, and for each container that opens it; the first row has the GPU too."""
    place = Line(f"{'  ' if gpu.kind == 'mig' else ''}{gpu.place}", Tone.HEAD)
    first = (place, gpu.model, Line(gpu.mode or "-", MODES.get(gpu.mode, Tone.LINK)))
    holders: list[tuple[str, str, str | Line]] = [
        (pod_of(each), each.container, _since(each, now)) for each in gpu.holders
    ]
    shifted = {(each.pod, each.container) for each in gpu.opened_by}
    external = [each for each in status.external if gpu.uuid in each.gpu_uuids]
    rows = [_opening(each, gpu, status) for each in external if (each.pod, each.container) not in shifted]
    holders += rows or [(pod, "-", "-") for pod in gpu.foreign]  # an older daemon names pods alone
    holders += [(each.pod, each.container, "by its number") for each in gpu.opened_by]
    why = gpu.withheld if holders else gpu.unavailable  # the columns show who holds it
    holders += [(each.pod, each.container, "watches") for each in status.external if gpu.uuid in each.watched]
    yield (*first, *(holders[0] if holders else ("-", "-", "-")), Line(why, of_trouble(why)))
    for holder in holders[1:]:
        yield ("", "", "", *holder, "")


def _opening(other: ExternalStatus, gpu: UnitStatus, status: DaemonStatus) -> tuple[str, str, str | Line]:
    """Return a holder's columns of a container that opens a GPU, marked if another pod has the GPU exclusively."""
    opens = f"claims {other.prepared}" if other.prepared else f"opens {number_of(other.gpu_uuids)}"
    if any(other.container_id == each.container_id and gpu.uuid in each.gpu_uuids for each in status.conflicts):
        return other.pod, other.container, Line(f"{opens}, in conflict", Tone.BAD)
    return other.pod, other.container, opens


def _of_kubelet(status: DaemonStatus, now: float) -> Iterator[str]:
    """Yield `kubelet: nvidia.com/gpu registered for 3m` for each resource, or nothing without a device plugin."""
    for each in status.kubelet.resources:
        if each.since_s is not None:
            yield f"kubelet: {each.resource} registered for {ago(now - each.since_s)}"
        else:
            yield f"kubelet: {each.resource} not registered: {each.fault or 'connecting'}"
    if status.kubelet.enabled:
        yield f"kubelet: {fail_closed(status)}"


def _of_dra(status: DaemonStatus) -> Iterator[str]:
    """Yield the driver process, and a line for each claim, or nothing if it is off and no claim is prepared."""
    dra = status.dra
    if dra.enabled:
        fault = dra.fault or silence(dra.asked_s, dra.silent_s) or dra.report.unwritten or dra.report.fault
        yield f"dra: {fault}" if fault else f"dra: {dra.driver} publishes {dra.report.published} devices"
        yield from (f"dra: {each.meaning}" for each in (*files_advice(dra.report), *gate_advice(dra.report)))
    for claim in status.claims:
        devices = ", ".join(f"{each.device} ({'admin' if each.admin else each.mode})" for each in claim.devices)
        pods = (", ".join(claim.pods) or "no pod") + (f" of PodGroup {', '.join(claim.groups)}" * bool(claim.groups))
        yield f"dra: claim {claim.namespace}/{claim.name} has {devices}, for {pods}"


def fail_closed(status: DaemonStatus) -> str:
    """Return what keeps a container with kubelet-allocated GPUs from starting without them."""
    if why := status.kubelet.guard_alone:
        return f"only the guard stops containers that start without their GPUs: {why}"
    return "containers with GPUs cannot start without nri-gpu, whether daemon and guard run or not"


def holder_words(holder: HolderStatus) -> str:
    """Return `held by ml/train, container main`, or `reserved` while the container does not exist yet."""
    return "reserved" if holder.reserved else f"held by {pod_of(holder)}, container {holder.container}"


def pod_of(holder: HolderStatus) -> str:
    return f"{holder.namespace}/{holder.pod}"


def _since(holder: HolderStatus, now: float) -> str:
    phase = "" if holder.running else f" ({'reserved' if holder.reserved else holder.phase})"
    return ("?" if holder.since_s is None else ago(now - holder.since_s)) + phase


def ago(seconds: float) -> str:
    """Return a duration as kubectl writes ages: `3d4h`, `12m`, `7s`; two units at most."""
    left = max(0, int(seconds))
    words: list[str] = []
    for unit, size in UNITS_S:
        if left >= size and len(words) < 2:
            words.append(f"{left // size}{unit}")
            left %= size
        elif words:
            break
    return "".join(words) or "0s"
