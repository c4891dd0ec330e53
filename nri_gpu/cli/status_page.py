"""The page of `nri-gpu status`: the holders of each GPU, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.cli.gpu_troubles import name_of, trouble_lines
from nri_gpu.cli.observed_page import given_counts, observed_lines, observed_table
from nri_gpu.cli.page import Grid, Line, Tone
from nri_gpu.cli.render import SHOWN, Times, lines, unlisted_lines
from nri_gpu.cli.status_table import pod_of, status_table
from nri_gpu.daemon.answers import DaemonStatus, HolderStatus, LostStatus, NodeStatus
from nri_gpu.decision.overlaps import SEPARATE, conflict_sentence
from nri_gpu.domain import text
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.health import Happened, TransitionKind
from nri_gpu.domain.names import INSTALL, NOT_FOUND, SOUGHT
from nri_gpu.dra.dra_findings import files_advice, gate_advice, silence
from nri_gpu.system.runtime_cri import WITHOUT

HOUR_S: Final = 3600.0
REFRESH_S: Final = 60  # between two samples, of a daemon that does not say
DIGEST_SHOWN: Final = 12  # hexadecimal digits of a policy's SHA-256
LATE_S: Final = 5.0  # a sample may come so much later
SAMPLING: Final = (
    "a process samples held GPUs each second and holds NVML open: no GPU can be reset, and no driver unloaded, until "
    "nobody watches"
)


def faults(status: DaemonStatus, times: Times) -> list[str]:
    """Return what keeps the daemon from granting, each as a sentence."""
    runtime, node, fault = status.runtime, status.node, status.policy.fault
    found = [] if runtime.ready else [f"not connected to the runtime: {runtime.fault or 'connecting'}"]
    found += filter(None, (runtime.list_fault, _inventory_fault(node, times)))
    if node.driver_fault and not node.inventory_fault.startswith(NOT_FOUND):  # there is none, which is said
        found.append(node.driver_fault)
    found += [f"policy not usable: {fault}"] if fault else []
    return found + ([f"nothing new is granted: {status.cordon_fault}"] if status.cordon_fault else [])


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


def _inventory_fault(node: NodeStatus, times: Times) -> str:
    """Return the inventory's fault, with its age."""
    if not node.inventory_fault:
        return ""
    said = f"inventory not refreshed{times.lasting(node.inventory_fault_since_s)}"
    if node.inventory_age_s is not None and node.inventory_confirmed:
        said += f", last confirmed {times.ago(times.now_s - node.inventory_age_s)}"
    return f"{said}: {without_folders(node.inventory_fault)}"


def without_folders(sentence: str) -> str:
    """Return a sentence about a missing driver without the folders where it was searched for."""
    told, sought, rest = sentence.partition(f": {SOUGHT}")
    _, fix, how = rest.partition(INSTALL)
    return f"{told}{fix}{how} (`nri-gpu driver` says where it was searched for)" if sought and fix else sentence


def status_page(
    status: DaemonStatus, times: Times, *, glance: bool = False, wide: bool = False, nothing: str = "no GPUs"
) -> list[Line | Grid]:
    """Return a headline, a table with a line for each GPU and holder, and faults below it.

    glance: for a terminal, where a count of the GPUs and the faults come first. wide: with all that is known of GPUs.
    nothing: what stands for an empty table.
    """
    wrong = [*lines(faults(status, times) + to_mend(status), Tone.BAD)]
    if observer := status.observer:
        return [
            Line(headline(status), Tone.HEAD),
            *([Line(given_counts(status, observer)), *wrong] if glance else []),
            observed_table(status, observer, times, wide=wide)
            if status.gpus or observer.allocations
            else Line(nothing),
            *observed_lines(status, observer, times, wide=wide),
            *_faults_of_gpus(status, times),
            *lines(_of_samples(status, times), Tone.WARN),
            *lines(_notes(status, times), Tone.WARN),
            *([] if glance else wrong),
            *lines(_changes(status, times), Tone.FAINT),
        ]
    return [
        Line(headline(status), Tone.HEAD),
        *([Line(counted(status)), *wrong] if glance else []),
        status_table(status, times, wide=wide) if status.gpus else Line(nothing),
        *_troubles(status, times),
        *lines(_of_samples(status, times), Tone.WARN),
        *lines(_notes(status, times), Tone.WARN),
        *lines(_stray_lines(status, times), Tone.BAD),
        *lines(_of_kubelet(status, times), Tone.PLAIN),
        *lines(_of_dra(status), Tone.PLAIN),
        *([] if glance else wrong),
        *lines(_refusal_lines(status, times), Tone.WARN),
        *lines(_changes(status, times), Tone.FAINT),
    ]


def headline(status: DaemonStatus) -> str:
    """Return `node-7: containerd 2.1.9, driver 580.95.05, policy: /etc/policy.toml (3f9c01d2e4b7)`, or `observed`."""
    runtime, node, policy = status.runtime, status.node, status.policy
    name = f"{runtime.name or 'runtime'} {runtime.version}".strip() if runtime.joined else "no runtime"
    name = "observed" if status.observer else name
    simulated = "SIMULATED node, " if node.simulated else ""
    said = f"{simulated}{name}, driver {node.driver_version or '?'}, policy: {policy.source}"
    said += f" ({policy.digest[:DIGEST_SHOWN]})" if policy.digest else ""
    return f"{node.name}: {said}" if node.name else said  # an older daemon does not say


def refusals_page(status: DaemonStatus, times: Times) -> list[Line | Grid]:
    """Return the refusals that the daemon keeps, the oldest first."""
    told = status.refusals
    none = "an observer refuses nothing" if status.observer else "nothing refused since the daemon started"
    return [
        Line(headline(status), Tone.HEAD),
        Line(f"the last refusals, {len(told)}:" if told else none),
        *(Line(f"  {times.ago(each.at_s)}  {refusal_words(each, times)}", Tone.WARN) for each in told),
    ]


def counted(status: DaemonStatus) -> str:
    """Return `8 GPUs: 3 held, 4 free, 1 unavailable`; a GPU with MIG devices counts as these.

    A GPU is free if a new pod could have it. What policy offers to nobody is counted apart.
    """
    with_parts = {gpu.place.partition(":")[0] for gpu in status.gpus if gpu.kind == "mig"}
    units = [gpu for gpu in status.gpus if gpu.place not in with_parts]
    held = sum(bool(gpu.mode or gpu.foreign or gpu.opened_by) for gpu in units)
    idle = [gpu for gpu in units if not gpu.unavailable and not (gpu.mode or gpu.foreign or gpu.opened_by)]
    kept = sum(gpu.offered_to == () for gpu in idle)
    all_ = f"{len(units)} GPUs and MIG devices" if with_parts else text.counted(len(units), "GPU")
    nobodys = f", {kept} offered to nobody" if kept else ""
    unavailable = len(units) - held - len(idle)
    return f"{all_}: {held} held, {len(idle) - kept} free, {unavailable} unavailable{nobodys}"


def _notes(status: DaemonStatus, times: Times) -> Iterator[str]:
    """Yield a sentence for each oddity of the node's GPUs and of their holders."""
    node = status.node
    yield from unlisted_lines(status.unlisted, node.inventory_fault)
    if status.runtime.cri_fault:
        yield f"CRI cannot be asked ({status.runtime.cri_fault}): {WITHOUT}"
    if not node.inventory_confirmed and (status.gpus or not node.inventory_fault):
        when = times.ago(times.now_s - (node.inventory_age_s or 0))
        yield f"from the last snapshot, of {when}: the driver has not answered yet"
    yield from (f"{pod_of(holder)} holds a GPU that is gone: {', '.join(holder.gpu_uuids)}" for holder in status.gone)
    for gpu in status.gpus:
        yield from (
            f"{pod_of(each)}, container {each.container}: {each.restart}" for each in gpu.holders if each.restart
        )
        if gpu.unavailable and not (gpu.withheld or gpu.mode or gpu.foreign or gpu.opened_by):  # no row shows why
            yield f"{name_of(gpu)}: {gpu.unavailable}"
    yield from (_lost_line(each, times) for each in status.lost)
    yield from (f"{each.clause}{times.lasting(each.since_s)}: no second one is started" for each in status.unkilled)
    if unseen := [each for gpu in status.gpus for each in gpu.holders if each.unseen]:
        names = ", ".join(dict.fromkeys(map(pod_of, unseen)))
        yield f"the cgroups of {names} are not seen: their GPUs are free once the runtime reports that they ended"


def _troubles(status: DaemonStatus, times: Times) -> Iterator[Line]:
    """Yield a block for each GPU in trouble."""
    gpus = {gpu.place: gpu for gpu in status.gpus if gpu.kind != "mig"}
    for gpu in status.gpus:
        whole = gpus.get(gpu.place.partition(":")[0]) if gpu.kind == "mig" else None
        yield from trouble_lines(gpu, whole, times)
    yield from _faults_of_gpus(status, times)


def _faults_of_gpus(status: DaemonStatus, times: Times) -> Iterator[Line]:
    for fault in status.faults:
        lasting, why = times.lasting(fault.since_s), times.aged(fault.reason)
        yield Line(f"GPU {fault.index} cannot be described{lasting}: {why}", Tone.BAD)


def _of_samples(status: DaemonStatus, times: Times) -> Iterator[str]:
    """Yield what is to be known of the samples: who makes them, and that they are old."""
    if status.sampling.each_second:
        yield SAMPLING
    if status.sampling.fault:
        yield f"no newer sample of the GPUs: {status.sampling.fault}"
    late_s = (status.node.refresh_s or REFRESH_S) + LATE_S
    sampled = {gpu.place: gpu.usage.sampled_s for gpu in status.gpus if gpu.usage}
    if old := {place: at_s for place, at_s in sampled.items() if times.now_s - at_s > late_s}:
        which = "" if len(old) == len(sampled) else f" of GPU {', '.join(old)}"
        yield f"the last sample{which} is of {times.ago(min(old.values()))}"


def _lost_line(lost: LostStatus, times: Times) -> str:
    """Return what an operator can do about a container that is over for the runtime and holds its GPUs."""
    place = f" in cgroup {lost.cgroup}" if lost.cgroup else ""
    if lost.sought:
        return (
            f"{lost.pod}, container {lost.container}: not listed by the runtime{times.lasting(lost.since_s)}; it holds "
            "its GPUs while its cgroup is being looked for (see the log if this lasts)"
        )
    when = f" {times.ago(lost.since_s)}" if lost.since_s is not None else ""
    return (
        f"{lost.pod}, container {lost.container}: ended for the runtime{when}, but holds its "
        f"GPUs until its processes{place} are gone ({lost.shown_pids}): end them, or thaw a paused container; a "
        "process that hangs in the driver ends with a reboot"
    )


def _refusal_lines(status: DaemonStatus, times: Times) -> Iterator[str]:
    """Yield how many were refused within an hour, and the last of them."""
    late = [each for each in status.refusals if times.now_s - each.at_s < HOUR_S]
    if late:
        more = "at least " if late[0].number > 1 and late[0] is status.refusals[0] else ""
        rest = "the last " * (len(late) > 1)
        yield f"{more}{len(late)} refused in the last hour, {rest}{times.ago(late[-1].at_s)} (all: --refusals):"
        yield f"  {refusal_words(late[-1], times)}"


def refusal_words(refused: Refused, times: Times) -> str:
    container = f", container {refused.container}" if refused.container else ""
    why = times.aged(refused.reason)
    return f"{refused.namespace}/{refused.pod}{container}: {refused.what} [{refused.code}]: {why}"


def _changes(status: DaemonStatus, times: Times) -> Iterator[str]:
    """Yield how often the node changed since the daemon started, and the last changes that nothing above tells."""
    history = status.transitions
    if history is None or not history.total:
        return
    told = {gpu.uuid for gpu in status.gpus if gpu.health.changes or gpu.health.signs or gpu.withheld}
    last = [each for each in history.last if times.absolute or not _is_told(each, status, told)][-SHOWN:]
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(history.counts.items()))
    end = "" if not last else ", the last:" if len(last) < history.total else ":"
    span = f"{'since' if times.absolute else 'in'} {times.since(history.began_s)}"
    yield f"{text.counted(history.total, 'change')} {span} ({counts}){end}"
    yield from (f"  {times.ago(each.at_s)}  {without_folders(each.what)}" for each in last)


def _is_told(change: Happened, status: DaemonStatus, told: set[str]) -> bool:
    """Return whether the page tells the change by what is wrong now."""
    if change.kind == TransitionKind.ANSWER:
        return bool(status.node.inventory_fault)
    return change.uuid in told if change.uuid else any(each.index == change.index for each in status.faults)


def _stray_lines(status: DaemonStatus, times: Times) -> Iterator[str]:
    for each in status.stray.findings:
        yield f"stray use{times.lasting(each.since_s)}: {each.message}"
    if status.stray.fault:
        yield f"stray use may be missing here: {status.stray.fault}"


def _of_kubelet(status: DaemonStatus, times: Times) -> Iterator[str]:
    """Yield `kubelet: nvidia.com/gpu registered for 3m` for each resource, or nothing without a device plugin."""
    for each in status.kubelet.resources:
        if each.since_s is not None:
            yield f"kubelet: {each.resource} registered{times.lasting(each.since_s)}"
        else:
            yield f"kubelet: {each.resource} not registered: {each.fault or 'connecting'}"
    if status.kubelet.enabled:
        yield f"kubelet: {fail_closed(status)}"


def _of_dra(status: DaemonStatus) -> Iterator[str]:
    """Yield the driver process, and a line for each claim, or nothing if it is off and no claim is prepared."""
    dra = status.dra
    if dra.enabled:
        fault = dra.fault or silence(dra.asked_s, dra.silent_s) or dra.report.unwritten or dra.report.fault
        yield (
            f"dra: {fault}" if fault else f"dra: {dra.driver} publishes {text.counted(dra.report.published, 'device')}"
        )
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
