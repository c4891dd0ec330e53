"""Cause and fix of every warning and error of the log, by its phrase. A line's field `fault` says more.

A warning that lasts for minutes is logged as an error with its fix (`system/tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.remedies import Remedy

_BUG: Final = "Report it with the traceback that the log has."

CONNECTION: Final[Mapping[str, Remedy]] = {
    "runtime not reached, trying again": Remedy(
        "Nobody answers on the runtime's NRI socket, so containers start without GPUs.",
        "Start containerd, switch NRI on in its configuration, or set plugin.socket in the policy to its NRI socket.",
    ),
    "connection ended, reconnecting": Remedy(
        "The runtime closed the connection or stopped answering.",
        "Find out in the runtime's own log (journalctl -u containerd) why it drops the plugin or restarts.",
    ),
    "connection ended by a bug of ours": Remedy("A bug in nri-gpu ended the connection.", _BUG),
    "no connection survives Synchronize": Remedy(
        "The runtime cannot send its list of containers, so no container is granted a GPU.",
        "Remove the pods with the largest environments and annotations, which the line names.",
    ),
    "the list of containers is too large for the runtime": Remedy(
        "If the runtime had to connect again, it could not send its list of containers.",
        "Remove the pods that the line names, or make their environments and annotations smaller.",
    ),
    "its next creation will be refused": Remedy(
        "A container runs whose description is larger than plugin.request_bytes.",
        "Set enableServiceLinks: false for its pod, or mount as a volume what comes by envFrom.",
    ),
    "launched by a runtime that will not synchronize": Remedy(
        "containerd 1.7 started nri-gpu itself and never lists its containers to such plugins.",
        "Take nri-gpu out of the runtime's plugin folder and run it as a service.",
    ),
    "request failed": Remedy(
        "A request of the runtime came too late, too large or not as it should be, and was answered with an error.",
        "Look the code in its reason up under Refusals.",
    ),
    "request rejected": Remedy(
        "The runtime sent a message that the protocol does not allow.",
        "Report it with the runtime's version.",
    ),
    "answer too large": Remedy(
        "The answer for one container is larger than a message can be, so the container was refused.",
        "Let the container ask for fewer GPUs or extras, and report it.",
    ),
    "bug in a handler": Remedy("A bug in nri-gpu; the container was refused.", _BUG),
    "ending, to be started again": Remedy(
        "nri-gpu sees a folder that was removed and made anew, and only a new process can see the new one.",
        "Nothing, if a service manager or the kubelet starts it again; else start it.",
    ),
    "bug: a task ended by an exception, so nri-gpu ends": Remedy("A bug in nri-gpu.", _BUG),
    "a library logged a message": Remedy(
        "A library that nri-gpu uses, named by the line, reports something.",
        "Report it if it comes again.",
    ),
    "log lines lost": Remedy(
        "Whoever reads the log was too slow, and so many lines were dropped.",
        "Find out what keeps journald, or the reader of stderr, from reading.",
    ),
}

CONTAINERS: Final[Mapping[str, Remedy]] = {
    "container asked for GPUs but was created without nri-gpu: delete its pod to have it granted": Remedy(
        "The container was created while nri-gpu was not connected.",
        "Delete its pod, and run the guard so that such containers do not start.",
    ),
    "container runs without the GPUs it asked for": Remedy(
        "The container was created and started while neither the daemon nor the guard was connected.",
        "Delete its pod so that it is made anew, or set guard.stop_ungranted = true.",
    ),
    "container runs with a grant that is not valid": Remedy(
        "Its grant was signed with another key, or somebody forged it.",
        "Delete its pod so that it is made anew.",
    ),
    "signed grant ignored": Remedy(
        "The grant on a container was signed with another key, or somebody forged it.",
        "Delete the pod so that it is made anew, and find out who may write pods with the annotation gpu.nri.io/grant.",
    ),
    "new signing key: grants signed with the old one are not valid any more": Remedy(
        "The key file was damaged, or somebody else than root could have read or written it.",
        "Delete the pods whose grants are reported as not valid, and find out who changed the file.",
    ),
    "key not read: no signed grant is valid": Remedy(
        "The guard may not read the daemon's key, or others could have, so it refuses every container that asks.",
        "Run the guard as root with the daemon's --state-dir, and restart the daemon if others could read the key.",
    ),
    "a container has NVIDIA's hooks": Remedy(
        "Something else injects GPUs on this node too: a runtime, a CDI specification or a plugin of NVIDIA's.",
        "Remove what `nri-gpu check` names.",
    ),
    "granted, but not all of it reaches the program": Remedy(
        "Image or pod set a variable or a path that hides a part of what was granted.",
        "Change in image or pod what the line names.",
    ),
    "container passed that can use GPUs": Remedy(
        "A container that asked for nothing can open GPUs, as it is privileged or its device rules allow all.",
        "Take those rights from the pod.",
    ),
    "container is on a bad gpu": Remedy(
        "A GPU failed under a container that holds it.",
        'Delete the pod so that it gets another GPU, or set health.containers = "stop".',
    ),
    "stray gpu use": Remedy(
        "A process has NVIDIA's device nodes open, and nobody granted it to its container or to the host.",
        "Do what the line says: end it, have it ask for a GPU, or list it in stray.exceptions.",
    ),
    "stray use not looked for": Remedy(
        "A look at the processes of the host failed.",
        "Mend what the line says; until then nobody is told who uses GPUs without a grant.",
    ),
    "stray use is looked for in part": Remedy(
        "nri-gpu may not see every process of the host, or the kubelet does not say what it allocated.",
        "Install the systemd drop-in stray.conf, or set the chart's stray.enabled (docs/stray.md).",
    ),
    "bug: stray use not looked for": Remedy("A bug in nri-gpu.", _BUG),
    "container stopped": Remedy(
        "The policy has nri-gpu stop such containers, and it did; the line has the reason.",
        "Nothing: a controller of the pod starts it again.",
    ),
    "container not stopped": Remedy(
        "The runtime refused to stop a container.",
        "Stop it with `crictl stop`, and see the runtime's log.",
    ),
    "containers not stopped": Remedy(
        "The runtime's CRI socket does not answer.",
        "Set guard.cri_socket to the runtime's CRI socket.",
    ),
    "setting has no effect": Remedy(
        "The setting that the line names needs grpcio, which is not installed.",
        "Install it: pip install 'nri-gpu[cri]'.",
    ),
    "`nri-gpu check` will not see this guard": Remedy(
        "The guard cannot write its status file.",
        "Make room or give it rights to the folder that the line names; it guards all the same.",
    ),
}

POLICY: Final[Mapping[str, Remedy]] = {
    "policy not usable": Remedy(
        "The policy file has a fault, at the line that is named.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    ),
    "policy not reloaded, the old one stays": Remedy(
        "The policy file has a fault, and the policy from before holds on.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu again.",
    ),
    "started on the last good policy": Remedy(
        "The policy file has a fault, so the last one without a fault is in force.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    ),
    "policy file still has a fault": Remedy(
        "The policy file has a fault for minutes now, and another policy, or none, is in force.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    ),
    "last good policy not usable either": Remedy(
        "The policy that was kept for this case cannot be read, or this version does not accept it.",
        "Mend the policy file, then reload nri-gpu.",
    ),
    "no good policy is kept: every container that asks will be refused": Remedy(
        "The policy file has a fault, and none was ever good since the last boot.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    ),
    "policy not usable: whatever asks needs a grant": Remedy(
        "The guard can read no policy, so it excuses no container from having a grant.",
        "Mend the policy file; the guard reads it again by itself.",
    ),
    "policy not kept for the next start": Remedy(
        "The policy could not be written to the state folder, so a start with a faulty file would refuse everybody.",
        "Make room under /run, or mend what the line names.",
    ),
    "socket, folders, audit log, refresh interval, [kubelet] and [metrics] change with a restart only": Remedy(
        "The new policy changes a setting that holds for the life of the process.",
        "Restart nri-gpu when it suits: containers keep their GPUs.",
    ),
}

GPUS: Final[Mapping[str, Remedy]] = {
    "inventory not refreshed": Remedy(
        "The driver does not answer, or is not loaded.",
        "Load the driver's modules (`nri-gpu prepare`), and see in the kernel's log why they do not answer.",
    ),
    "not listening for errors of the GPUs; trying again": Remedy(
        "The driver's events cannot be waited for, so errors are seen only at the next refresh.",
        "See in the kernel's log what is wrong with the driver; restart it if nothing is.",
    ),
    "cannot listen for errors of this gpu": Remedy(
        "The driver has no events for this GPU.",
        "Nothing: its health is looked at with each refresh.",
    ),
    "event without its gpu: refreshing all gpus": Remedy(
        "The driver reported an error and did not say of which GPU.",
        "Nothing: all GPUs are looked at again.",
    ),
    "gpu health changed": Remedy(
        "A GPU failed or shows signs of failing; the line has the reason.",
        "Follow docs/health.md for that reason; the GPU is granted again once it recovers.",
    ),
    "gpu cannot be described": Remedy(
        "The driver answers for this GPU with errors.",
        "See the kernel's log; reset the GPU, or reboot.",
    ),
    "node changed": Remedy(
        "A GPU, MIG device or module went away, or got worse.",
        "Nothing, if you did it; else see the kernel's log.",
    ),
    "unusual capability minors, used as they are": Remedy(
        "The driver numbers its MIG capability nodes otherwise than known.",
        "Nothing, if containers work on MIG devices; else report it.",
    ),
    "saved health not read": Remedy(
        "The file with the GPUs' health is damaged.",
        "Nothing: health is looked at anew.",
    ),
    "health not saved": Remedy(
        "The GPUs' health could not be written to the state folder, so a restart forgets it.",
        "Make room under /run, or mend what the line names.",
    ),
    "MPS daemon not up": Remedy(
        "NVIDIA's control daemon of a GPU does not start, so containers in mode=mps wait.",
        "See the daemon's own log in the folder that docs/mps.md names, and whether another program holds the GPU.",
    ),
    "MPS daemon ended by itself": Remedy(
        "NVIDIA's control daemon ended, and the containers that used it lost the GPU.",
        "Delete their pods so that they are made anew.",
    ),
    "folder of an ended MPS daemon not removed": Remedy(
        "A folder of a daemon that ended cannot be removed.",
        "Remove it once no container uses it.",
    ),
    "bug: MPS daemon not controlled any more": Remedy("A bug in nri-gpu.", _BUG),
}

DRIVER: Final[Mapping[str, Remedy]] = {
    "driver files not found": Remedy(
        "The driver's libraries are not where they are looked for, or cannot be staged.",
        "Install the driver's libraries, or set driver.root; `nri-gpu driver` shows what is found.",
    ),
    "driver files left out": Remedy(
        "Some files of the driver cannot be given to containers.",
        "Mend those that the line names, or reinstall the driver; `nri-gpu driver` lists them.",
    ),
    "the new driver's kernel module is not loaded: containers get the old one's staged files until it is": Remedy(
        "The driver's files were upgraded and the old kernel module is still loaded.",
        "Load the new module, which needs that nobody uses a GPU, or reboot.",
    ),
    "staged driver files were changed by others": Remedy(
        "Somebody removed or changed files in the stage folder.",
        "Find out who; the files are staged again.",
    ),
    "old driver files not removed": Remedy(
        "Staged files of an earlier driver cannot be removed.",
        "Remove the folder that the line names once no container has it mounted.",
    ),
    "application profiles not written": Remedy(
        "The driver's application profiles cannot be written to the stage folder.",
        "Make room, or mend the rights of the folder that the line names.",
    ),
    "CUDA compatibility packages left out": Remedy(
        "Some packages in compat.dir cannot be used.",
        "Unpack the package that the line names again, or remove it.",
    ),
    "CDI specification not written": Remedy(
        "The CDI specification cannot be written.",
        "Make room, or mend the rights of the folder that the line names.",
    ),
    "CDI specification removed, nothing to describe": Remedy(
        "There is no GPU, or no driver, to describe.",
        "Load the driver; the specification is written again by itself.",
    ),
    "other CDI specification describes the same devices": Remedy(
        "A file of somebody else describes GPUs by the same names, and a runtime refuses those or takes either.",
        "Remove one of the two files.",
    ),
}

KUBELET: Final[Mapping[str, Remedy]] = {
    "not registered with the kubelet, trying again": Remedy(
        "The kubelet does not know the device plugin, so it offers no GPUs of this node.",
        "Start the kubelet, remove other device plugins of that resource, or set kubelet.dir to the kubelet's folder.",
    ),
    "device plugin not started yet": Remedy(
        "The key in the kubelet's folder cannot be read or made.",
        "Give nri-gpu root's rights to that folder (the drop-in kubelet.conf).",
    ),
    "device plugin cannot be served": Remedy(
        "grpcio is not installed.",
        "Install it: pip install 'nri-gpu[kubernetes]'.",
    ),
    "PodResources cannot be asked": Remedy(
        "grpcio is not installed.",
        "Install it: pip install 'nri-gpu[kubernetes]'.",
    ),
    "PodResources not answered, trying again": Remedy(
        "The kubelet's PodResources socket does not answer, so allocations of others are not known.",
        "Start the kubelet, or set kubelet.podresources to its socket.",
    ),
    "PodResources not read because of a bug in nri-gpu": Remedy("A bug in nri-gpu.", _BUG),
    "kubelet allocation not valid": Remedy(
        "What the kubelet says it gave a container cannot be granted.",
        "Delete the pod so that it is admitted anew.",
    ),
    "required CDI device not written, containers can start without nri-gpu": Remedy(
        "The CDI file that keeps unseen containers from starting cannot be written.",
        "Let nri-gpu write kubelet.cdi_dir, or run the guard.",
    ),
    "node labels not written": Remedy(
        "The file for node-feature-discovery cannot be written.",
        "Make its folder, or set labels.file.",
    ),
    "bug: device plugin not up to date": Remedy("A bug in nri-gpu.", _BUG),
    "bug: no preferred allocation": Remedy("A bug in nri-gpu; the kubelet chooses by itself.", _BUG),
    "bug: kubelet session ended": Remedy("A bug in nri-gpu; it registers again.", _BUG),
}

STATE: Final[Mapping[str, Remedy]] = {
    "ledger.json not written; the grants on the containers hold": Remedy(
        "The state folder cannot be written.",
        "Make room under /run, or mend what the line names.",
    ),
    "journal not written; the grants on the containers hold": Remedy(
        "The state folder cannot be written, so a crash may forget grants of the last seconds.",
        "Make room under /run, or mend what the line names.",
    ),
    "last ledger not read; which GPUs were just released is not known": Remedy(
        "ledger.json is damaged.",
        "Nothing: the runtime lists who holds what.",
    ),
    "snapshot not written; a restart will wait for the driver": Remedy(
        "The state folder cannot be written.",
        "Make room under /run, or mend what the line names.",
    ),
    "snapshot ignored": Remedy(
        "The snapshot of the daemon before this one is damaged or not ours.",
        "Nothing: the driver is asked.",
    ),
    "audit log not written; nothing else depends on it": Remedy(
        "The audit log's file cannot be written.",
        "Make room, or set audit.dir to a folder that can be written.",
    ),
    "audit log: decisions lost": Remedy(
        "Decisions came faster than the disk takes them, or it took none for a while.",
        "Put audit.dir on a faster disk, or one with room.",
    ),
    "no control socket: nri-gpu status does not work": Remedy(
        "The socket in the state folder cannot be made.",
        "Mend what the line names, then restart nri-gpu.",
    ),
    "socket accepts no connections": Remedy(
        "The process has no free file descriptor, or no memory.",
        "End what keeps connections to the socket that the line names open, or raise LimitNOFILE=.",
    ),
    "only root can ask for status": Remedy(
        "The group of control.group does not exist, or the daemon may not give it the socket.",
        "Make the group, and set Group= to it in a drop-in of the unit.",
    ),
    "metrics are not served": Remedy(
        "The address of metrics.listen cannot be used, or prometheus-client is not installed.",
        "Correct metrics.listen, or install the library: pip install 'nri-gpu[metrics]'.",
    ),
    "bug in the metrics": Remedy("A bug in nri-gpu.", _BUG),
    "bug in an answer": Remedy("A bug in nri-gpu.", _BUG),
}

SUBJECTS: Final[Mapping[str, Mapping[str, Remedy]]] = {
    "Connection to the runtime": CONNECTION,
    "Containers": CONTAINERS,
    "Policy": POLICY,
    "GPUs": GPUS,
    "Driver and CDI": DRIVER,
    "Kubelet": KUBELET,
    "State, control socket, metrics and audit log": STATE,
}
LOG: Final[Mapping[str, Remedy]] = {phrase: each for subject in SUBJECTS.values() for phrase, each in subject.items()}
