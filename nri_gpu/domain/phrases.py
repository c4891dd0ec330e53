"""The log's phrases at WARNING and ERROR, each with its cause, and what to do about it.

docs/messages.md is made of them (`make generate`). A warning that lasts for minutes is logged as an error with its fix
(`system/tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REPORT: Final = "Report it with the traceback that the log has."
MAKE_ROOM: Final = "Make room under /run, or fix what the line names."

# Section of docs/messages.md -> phrase -> cause and fix, a sentence each.
CATALOGUE: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Connection to the runtime": {
        "runtime not reached, trying again": (
            "The runtime's NRI socket does not answer, so containers start without GPUs.",
            "Start containerd, switch NRI on in its configuration, or set plugin.socket in the policy to its "
            "NRI socket.",
        ),
        "runtime does not list its containers yet": (
            "containerd is stopping a container with a long grace; it accepts no plugin and creates no "
            "container before that ends.",
            "Let the pod with the long grace end, or kill its process; if none is ending, restart containerd.",
        ),
        "connection ended, reconnecting": (
            "The runtime closed the connection or stopped answering, or nri-gpu needs another list of containers.",
            "Find out in the runtime's own log (journalctl -u containerd) why it drops the plugin or restarts.",
        ),
        "bug: connection to the runtime ended": ("A bug in nri-gpu ended the connection.", REPORT),
        "no connection survives Synchronize": (
            "The runtime cannot send its list of containers: it is too large, or a label or annotation is not UTF-8.",
            "Remove the pods that the line names; docs/list-size.md says how to find them where it names none.",
        ),
        "the list of containers is too large for the runtime": (
            "If the runtime had to connect again, it could not send its list of containers.",
            "Remove the pods that the line names, or make their environments and annotations smaller.",
        ),
        "CRI does not tell which pods are over": (
            "Pods of before a restart of containerd count for its list, and its CRI does not tell which are gone.",
            "Set guard.cri_socket to the runtime's CRI socket, or restart nri-gpu, which counts anew.",
        ),
        "whether being away opens nothing is not written": (
            "The file that lets the guard put off a registration cannot be written or removed.",
            MAKE_ROOM,
        ),
        "container is too large to be created again": (
            "A container runs whose description is larger than plugin.request_bytes.",
            "Set enableServiceLinks: false for its pod, or mount as a volume what comes by envFrom.",
        ),
        "launched by a runtime that will not synchronize": (
            "containerd 1.7 started nri-gpu itself and never lists its containers to such plugins.",
            "Take nri-gpu out of the runtime's plugin folder and run it as a service.",
        ),
        "request failed": (
            "A request of the runtime was late, too large or malformed, and was answered with an error.",
            "Look up the code in its reason under Refusals.",
        ),
        "another nri-gpu serves this runtime": (
            "Two daemons are registered with one runtime, and each refuses the containers that the other granted GPUs.",
            "Stop one of them: `nri-gpu doctor` names them, and a simulation joins no runtime without --socket.",
        ),
        "request rejected": (
            "The runtime sent a message that the protocol does not allow.",
            "Report it with the runtime's version.",
        ),
        "answer too large": (
            "The answer for one container is larger than a message can be, so the container was refused.",
            "Let the container ask for fewer GPUs or extras, and report it.",
        ),
        "bug in a handler": ("A bug in nri-gpu; the container was refused.", REPORT),
        "exiting to be restarted": (
            "A folder that nri-gpu has mounted was removed and re-created; only a new process can mount the new one.",
            "Nothing, if a service manager or the kubelet starts it again; else start it.",
        ),
        "bug: a follower of changes failed; the rest goes on": (
            "A part of nri-gpu, `follower` in the line, failed when the node, the policy or the grants changed.",
            "Report it with the traceback that the log has; until then restart nri-gpu if that part matters.",
        ),
        "bug: a task ended by an exception, so nri-gpu ends": ("A bug in nri-gpu.", REPORT),
        "a library logged a message": (
            "A library that nri-gpu uses, named by the line, reports something.",
            "Report it if it comes again.",
        ),
        "log lines lost": (
            "The reader of the log was too slow, and this many lines were dropped.",
            "Find out what keeps journald, or the reader of stderr, from reading.",
        ),
    },
    "Containers": {
        "container asked for GPUs but was created without nri-gpu: delete its pod to have it granted": (
            "The container was created while nri-gpu was not connected.",
            "Delete its pod, and run the guard so that such containers do not start.",
        ),
        "container runs without the GPUs it asked for": (
            "The container was created and started while neither the daemon nor the guard was connected.",
            "Delete its pod so that it is re-created, or set guard.stop_ungranted = true.",
        ),
        "container runs on GPUs that another pod holds": (
            "Its GPUs went to another pod before it was started, with nobody connected; it is killed through CRI.",
            "Delete its pod if a further line says that the container was not stopped.",
        ),
        "container runs with a grant that is not valid": (
            "Its grant was signed with another key, or is forged.",
            "Delete its pod so that it is re-created.",
        ),
        "container never started and its cgroup is not seen: it keeps its GPUs until it is removed": (
            "The runtime heeds no refused start, so the container may run, and its cgroup cannot be read.",
            "Let nri-gpu see the host's cgroups (`nri-gpu doctor`), or delete the pod.",
        ),
        "cgroups not walked: containers that the runtime does not list keep their GPUs": (
            "A cgroup of the host cannot be looked into in time, so nobody knows whether such a container still runs.",
            "Mend what the line names, or raise LimitNOFILE= or TasksMax=; nri-gpu tries again each second.",
        ),
        "process of a container cannot be watched": (
            "The kernel refused nri-gpu to watch a container, so its GPU may stay held if containerd is killed "
            "just as it ends.",
            "Restart nri-gpu; if the line comes again, take what it names out of the unit's SystemCallFilter= "
            "or raise LimitNOFILE=.",
        ),
        "signed grant ignored": (
            "The grant on a container was signed with another key, or is forged.",
            "Delete the pod so that it is re-created, and find out who may write pods with the annotation "
            "gpu.nri.io/grant.",
        ),
        "new signing key: grants signed with the old one are not valid any more": (
            "The key file was damaged, or users other than root could have read or written it.",
            "Delete the pods whose grants are reported as not valid, and find out who changed the file.",
        ),
        "key not read: no signed grant is valid": (
            "The guard may not read the daemon's key, or other users could, so it refuses every container that "
            "requests GPUs.",
            "Run the guard as root with the daemon's --state-dir; restart the daemon if other users could read it.",
        ),
        "a container has NVIDIA's hooks": (
            "Something else injects GPUs on this node too: a runtime, a CDI specification or a plugin of NVIDIA's.",
            "Remove what `nri-gpu check` names.",
        ),
        "GPU granted, with something to know": (
            "The line says what the program does not see of its grant or may miss, or what it can use beyond it.",
            "Change what the line names, in the image, in the pod or on the node.",
        ),
        "container that requests no GPU can open GPUs": (
            "A container without a request can open GPUs: it is privileged, or its device rules allow all devices.",
            "Take those rights from the pod.",
        ),
        "container holds an unhealthy GPU": (
            "A GPU failed under a container that holds it.",
            'Delete the pod, or all pods of its claim, so that it gets another GPU, or set health.containers = "stop".',
        ),
        "stray GPU use": (
            "A process has NVIDIA's device nodes open, and its container or the host was not granted the GPU.",
            "Do what the line says: end the process, request a GPU for it, or list it in stray.exceptions.",
        ),
        "scan for stray GPU use failed": (
            "A scan of the host's processes failed.",
            "Fix what the line names; until then no use of GPUs without a grant is reported.",
        ),
        "scan for stray GPU use is incomplete": (
            "nri-gpu may not see every process of the host, or the kubelet does not report its allocations.",
            "Run `nri-gpu enable stray`, or set the chart's stray.enabled (docs/stray.md).",
        ),
        "bug: scan for stray GPU use failed": ("A bug in nri-gpu.", REPORT),
        "observer finding": (
            "An observer holds what was given against what is used, and the two differ: the line says how.",
            "Do what the line says.",
        ),
        "GPU usage not sampled": (
            "NVML did not tell what GPUs do; inventory, grants and health do not depend on that.",
            "See `dmesg | grep NVRM` for a call that hangs, or set samples = false in the policy's [usage].",
        ),
        "bug: a sample of GPU usage was lost": ("A bug in nri-gpu.", REPORT),
        "container stopped": (
            "nri-gpu stopped the container, as the policy asks; the line has the reason.",
            "Nothing: the pod's controller starts it again.",
        ),
        "container not stopped": (
            "The runtime refused to stop a container.",
            "Stop it with `crictl stop`, and see the runtime's log.",
        ),
        "containers not stopped": (
            "The runtime's CRI socket does not answer.",
            "Set guard.cri_socket to the runtime's CRI socket.",
        ),
        "guard status not written": (
            "The guard cannot write its status file.",
            "Make room or give it rights to the folder that the line names; it guards all the same.",
        ),
    },
    "Policy": {
        "policy not usable": (
            "The policy file has a fault, at the line that is named, or is gone; or an option of `run` contradicts it.",
            "Fix the file or put it back until `nri-gpu check` accepts it, then reload nri-gpu.",
        ),
        "policy not reloaded, the old one stays": (
            "The policy file has a fault or is gone, or the runtime "
            "sends no policy any more; the policy from before holds on.",
            "Fix it or put it back, then reload nri-gpu; for the defaults run `nri-gpu check --forget` before.",
        ),
        "policy not taken, observing goes on": (
            "What an observer reads of the policy file has a fault, so it goes on with the last good policy, else with "
            "the defaults.",
            "Fix the line that is named; then `systemctl reload nri-gpu-observe`, or send the process SIGHUP.",
        ),
        "policy has a table without a key": (
            "The table has its defaults, and a reload would reject it: perhaps the file was cut off.",
            "Give the table a key, or take its heading out.",
        ),
        "policy has settings that are ignored": (
            "The policy file has settings that this version has no longer.",
            "Remove what the line names; the next version rejects it.",
        ),
        "policy lets more namespaces ask for GPUs": (
            "The new policy allows namespaces that the previous policy denied; the line names them.",
            "Nothing, if that is intended; else narrow the policy and reload nri-gpu.",
        ),
        "policy has lost restrictions": (
            "The new policy lacks rules, limits, pools or other restrictions of the previous one; the line names them.",
            "Nothing, if that is intended; if the file was cut off, put it back and reload nri-gpu.",
        ),
        "started on the last good policy": (
            "The policy file has a fault or is gone, so the last one without a fault is in force.",
            "Fix the file until `nri-gpu check` accepts it, then reload nri-gpu.",
        ),
        "policy file still has a fault": (
            "The policy file has had a fault for minutes; another policy, or none, is in force.",
            "Fix the file until `nri-gpu check` accepts it, then reload nri-gpu.",
        ),
        "last good policy not usable either": (
            "The policy that is kept for this case cannot be read, or this version does not accept it.",
            "Fix the policy file, then reload nri-gpu.",
        ),
        "no good policy is kept: every container that requests GPUs is refused": (
            "The policy file has a fault or is gone, and no policy was good since the last boot.",
            "Fix the file until `nri-gpu check` accepts it, then reload nri-gpu.",
        ),
        "policy not usable: every container that requests GPUs needs a valid grant": (
            "The guard can read no policy, so it exempts no container from having a grant.",
            "Fix the policy file; the guard reads it again by itself.",
        ),
        "policy not kept for the next start": (
            "The policy, or that it is in force, could not be written, so that the next start may refuse all "
            "or take the defaults.",
            "Make room there, or fix what the line names.",
        ),
        "reloaded policy changes settings that need a restart": (
            "The new policy changes settings that hold for the life of the process; the field `settings` names them.",
            "Restart nri-gpu when it suits: containers keep their GPUs.",
        ),
    },
    "GPUs": {
        "inventory not refreshed": (
            "The driver does not answer, or is not loaded.",
            "Load the driver's modules (`nri-gpu prepare`), and see in the kernel's log why they do not answer.",
        ),
        "topology file has tables that are ignored": (
            "The topology file has tables that this version has no longer.",
            "Remove what the line names; the next version rejects it.",
        ),
        "not listening for GPU errors, trying again": (
            "The driver's events cannot be waited for, so errors are seen only at the next refresh.",
            "See in the kernel's log what is wrong with the driver; restart it if nothing is.",
        ),
        "cannot listen for errors of this GPU": (
            "The driver has no events for this GPU.",
            "Nothing: its health is checked at each refresh.",
        ),
        "event names no GPU: refreshing all GPUs": (
            "The driver reported an error without naming the GPU.",
            "Nothing: all GPUs are checked again.",
        ),
        "GPU health changed": (
            "A GPU failed or shows signs of failing; the line has the reason.",
            "Follow docs/health.md for that reason; the GPU is granted again once it recovers.",
        ),
        "XID is not in the catalogue": (
            "The driver reported an XID that NVIDIA's catalogue does not have; each number is logged once.",
            "Look the number up; put it into health.fatal_xids or health.ignored_xids if you know better.",
        ),
        "root reported a GPU as reset": (
            "Root ran `nri-gpu repaired`; the line has the reason for the reset.",
            "Nothing, if it was reset; else take it out of use: `nri-gpu cordon`.",
        ),
        "GPUs out of use not known, so nothing new is granted": (
            "The file with the GPUs that root took out of use is damaged, not root's, or cannot be read.",
            "Do what the line says, then reload nri-gpu.",
        ),
        "GPUs out of use not written": (
            "The file with the GPUs that root took out of use could not be brought up to date.",
            "Make room in its folder, or fix what the line names.",
        ),
        "GPU cannot be described": (
            "The driver answers for this GPU with errors.",
            "See the kernel's log; reset the GPU, or reboot.",
        ),
        "node changed": (
            "A GPU, MIG device or module went away, or got worse.",
            "Nothing, if you did this; else see the kernel's log.",
        ),
        "unusual capability minors, used as they are": (
            "The driver numbers its MIG capability nodes in an unknown way.",
            "Nothing, if containers work on MIG devices; else report it.",
        ),
        "saved health not read": ("The file with the GPUs' health is damaged.", "Nothing: health is checked again."),
        "health not saved": (
            "The GPUs' health could not be written to the state folder, so a restart forgets it.",
            MAKE_ROOM,
        ),
        "MPS daemon not up": (
            "NVIDIA's control daemon of a GPU does not start, so containers in mode=mps wait.",
            "See the daemon's own log in the folder that docs/mps.md names, and whether another program holds the GPU.",
        ),
        "MPS daemon ended by itself": (
            "NVIDIA's control daemon ended, and the containers that used it lost the GPU.",
            "Delete their pods so that they are re-created.",
        ),
        "folder of an ended MPS daemon not removed": (
            "A folder of a daemon that ended cannot be removed.",
            "Remove it once no container uses it.",
        ),
        "bug: MPS daemon not controlled any more": ("A bug in nri-gpu.", REPORT),
    },
    "Driver": {
        "driver files not found": (
            "The driver's libraries are not in the folders that nri-gpu searches, or cannot be staged.",
            "Install the driver's libraries, or set driver.root; `nri-gpu driver` shows what is found.",
        ),
        "driver lacks a library that containers need": (
            "The driver has no libcuda or no libnvidia-ml, so requests for compute or utility are refused.",
            "Install that part of the driver (libcuda1, nvidia-driver-cuda); `nri-gpu driver` lists what is there.",
        ),
        "driver files left out": (
            "Some files of the driver cannot be mounted into containers.",
            "Fix the files that the line names, or reinstall the driver; `nri-gpu driver` lists them.",
        ),
        "driver files do not fit the kernel module: containers get the staged ones that do": (
            "The driver's files were upgraded, are half installed or gone, and the old kernel module is loaded.",
            "Finish the installation; load the new module while no process uses a GPU, or reboot.",
        ),
        "GPU granted to several pods, to one exclusively": (
            "One of them started without daemon and guard, or has a number that is another GPU's now.",
            "Delete all of these pods but one; until then no other pod is granted that GPU.",
        ),
        "container opens GPUs that another pod has exclusively": (
            "Another component gave it their nodes, or it is no longer a monitor.",
            "List its pod in foreign.monitors if it only watches; else part them ([foreign.md](foreign.md#conflicts)).",
        ),
        "container has ended for the runtime, but its processes still hold its GPUs": (
            "Its processes outlive the first one, or the runtime lists it no more (paused at a restart, its "
            "shim hangs or is dead).",
            "End the processes that it names, or thaw a paused container ([handover.md](handover.md)).",
        ),
        "staged driver files were changed outside nri-gpu": (
            "Another program removed or changed files in the stage folder.",
            "Find out which program; the files are staged again.",
        ),
        "old driver files not removed": (
            "Staged files of an earlier driver cannot be removed.",
            "Remove the folder that the line names once no container has it mounted.",
        ),
        "CUDA compatibility packages left out": (
            "Some packages in compat.dir cannot be used.",
            "Unpack the package that the line names again, or remove it.",
        ),
    },
    "Kubelet": {
        "not registered with the kubelet, trying again": (
            "The kubelet does not know the device plugin, so it offers no GPUs of this node.",
            "Start the kubelet, remove other device plugins of that resource, or set kubelet.dir to the "
            "kubelet's folder.",
        ),
        "device plugin not started yet": (
            "The key in the kubelet's folder cannot be read or made.",
            "Give nri-gpu root's rights to that folder (`nri-gpu enable kubelet`).",
        ),
        "device plugin cannot be served": (
            "Python cannot import grpcio: this installation is broken.",
            "Install nri-gpu again, with all that it depends on (docs/install.md).",
        ),
        "MIG devices are not offered to the kubelet": (
            "GPUs in MIG mode are in the pools of two resources of kubelet.resources with one prefix.",
            "Put GPUs in MIG mode into one of these pools, or give the other resource another prefix.",
        ),
        "PodResources cannot be asked": (
            "Python cannot import grpcio: this installation is broken.",
            "Install nri-gpu again, with all that it depends on (docs/install.md).",
        ),
        "kubelet allocations of monitors are unknown": (
            "The kubelet does not report which GPUs the pods of foreign.monitors hold, so only their grants count.",
            "Start the kubelet, or set kubelet.podresources to its socket.",
        ),
        "PodResources does not answer, trying again": (
            "The kubelet does not say what other device plugins allocated, nor what was allocated before nri-gpu came.",
            "Start the kubelet, or set kubelet.podresources to its socket.",
        ),
        "PodResources names devices of gpu.nvidia.com that this node does not have": (
            "NVIDIA's DRA driver prepared a device whose name or pool is no GPU's of this node, so it holds none.",
            "Compare that driver's ResourceSlice with `nri-gpu gpus`, and restart its pod on this node.",
        ),
        "PodResources not read because of a bug in nri-gpu": ("A bug in nri-gpu.", REPORT),
        "kubelet allocation not valid": (
            "The kubelet allocated GPUs to a container that cannot be granted.",
            "Delete the pod, or all pods of its claim, so that its replacement is admitted again.",
        ),
        "required CDI device not written, containers can start without nri-gpu": (
            "The CDI file that keeps unseen containers from starting cannot be written.",
            "Let nri-gpu write kubelet.cdi_dir, or run the guard.",
        ),
        "node labels not written": (
            "The file for node-feature-discovery cannot be written.",
            "Make its folder, or set labels.file.",
        ),
        "bug: device plugin not up to date": ("A bug in nri-gpu.", REPORT),
        "bug: no preferred allocation": ("A bug in nri-gpu; the kubelet chooses by itself.", REPORT),
        "bug: kubelet session ended": ("A bug in nri-gpu; it registers again.", REPORT),
    },
    "Dynamic Resource Allocation": {
        "DRA driver not registered, trying again": (
            "The kubelet does not know the driver, so it prepares no ResourceClaims on this node.",
            "Start the kubelet, or set dra.dir and kubelet.registry_dir to its folders.",
        ),
        "daemon not reached, trying again": (
            "The daemon does not answer `nri-gpu dra`, so no claim is prepared or unprepared; running "
            "containers go on.",
            "Start `nri-gpu run` with `--dra` (policy: dra.enabled) and the same --state-dir.",
        ),
        "prepared ResourceClaims not compared with the API server": (
            "A second pod of a claim waits, and claims that were deleted since then keep their GPUs.",
            "Fix what the line reports about the API server or the daemon.",
        ),
        "CDI specification of a prepared claim was missing, written again": (
            "Something on the node removed or changed a file in kubelet.cdi_dir without which containers with "
            "claims do not start.",
            "Find what cleans that folder, and have it leave files of nri-gpu alone.",
        ),
        "CDI specification of a prepared claim not written, trying again": (
            "A file without which containers of that claim do not start again is missing, and cannot be written.",
            "Make room in that folder and let `nri-gpu dra` write there.",
        ),
        "waiting for another nri-gpu dra to exit": (
            "Two processes serve one driver on this node, as in an update; one at a time does.",
            "Nothing in an update; else end the process that the line names.",
        ),
        "ResourceClaim released although the kubelet did not unprepare it": (
            "A prepared claim was deleted or freed while the kubelet or nri-gpu was away.",
            "Nothing: its GPUs are free again.",
        ),
        "bug: request for a ResourceClaim failed": ("A bug in nri-gpu; the kubelet tries that claim again.", REPORT),
        "ResourceSlices not published, trying again": (
            "The API server is away or refuses the slices, so the scheduler does not learn what this node offers now.",
            "Fix what the line names: the route to the API server, the rights of the service account, or the "
            "node's name.",
        ),
        "events of the Node not written": (
            "The API server is away, or refuses events of this Node; nothing else depends on them.",
            "Fix what the line names; after `forbidden`, apply the chart's Role and RoleBinding in the namespace "
            "default.",
        ),
        "feature gates are off on the API server, publishing without them": (
            "Feature gates that the line names are off, so taints, shared devices or counters are not "
            "published (docs/dra.md).",
            "Switch them on in API server, scheduler and controller manager, or accept what is published.",
        ),
    },
    "The observer": {
        "bug: a look at the node failed": ("A bug in nri-gpu; the observer shows what it saw before.", REPORT),
        "capabilities not set aside": (
            "The kernel or a sandbox forbids it, so the whole process keeps rights that only its child needs.",
            "Allow the process capset(2), as the shipped unit and the chart do.",
        ),
    },
    "State, control socket, metrics and audit log": {
        "state folder removed or replaced while nri-gpu runs": (
            "The guard finds no key there now, so no container with a GPU starts; `nri-gpu status` finds no socket.",
            "Restart nri-gpu, and find out what removed the folder that the line names.",
        ),
        "ledger.json not written; signed grants on containers stay valid": (
            "The state folder cannot be written.",
            MAKE_ROOM,
        ),
        "many containers wait to be removed": (
            "Containers that never started lost their GPUs to others, and are remembered until they are removed.",
            "Remove containers that stay in state Created (`crictl ps -a --state Created`), or their pods.",
        ),
        "journal not written; signed grants on containers stay valid": (
            "The state folder cannot be written, so a crash may lose the grants of the last seconds.",
            MAKE_ROOM,
        ),
        "bug in the journal; signed grants on containers stay valid": (
            "A bug in nri-gpu kept a grant out of the journal; one that takes another container's GPUs is refused.",
            REPORT,
        ),
        "last ledger not read; recently released GPUs are unknown": (
            "ledger.json is damaged.",
            "Nothing: the runtime lists who holds what.",
        ),
        "prepared claims dropped": (
            "The file claims.json is damaged, or from before the last start of this machine.",
            "If a container is refused when it starts again, delete all pods of its claim: it is then prepared anew.",
        ),
        "prepared claims not written; the claim is not changed": (
            "The state folder cannot be written, so the claim is neither prepared nor released; the kubelet "
            "tries again.",
            MAKE_ROOM,
        ),
        "claim released while containers have its GPUs": (
            "A claim was unprepared, or is gone from the API server, before its containers ended: they keep its GPUs.",
            "Nothing if they end soon; else delete their pods, or the containers, which a kubelet may have forgotten.",
        ),
        "DRA driver process not served": (
            "The daemon cannot answer `nri-gpu dra`, for the reason that the line names.",
            "Fix it and restart nri-gpu; until then no claim is prepared.",
        ),
        "snapshot not written; a restart will wait for the driver": ("The state folder cannot be written.", MAKE_ROOM),
        "snapshot ignored": (
            "The snapshot of the daemon before this one is damaged or not ours.",
            "Nothing: the driver is asked.",
        ),
        "audit log not written; nothing else depends on it": (
            "The audit log's file cannot be written.",
            "Make room, or set audit.dir to a folder that can be written.",
        ),
        "usage not recorded; nothing else depends on it": (
            "The record of who had which GPU cannot be written; what is held is written once it can.",
            "Make room, or set usage.dir to a folder of root's that can be written, or to off.",
        ),
        "bug in the audit log; nothing else depends on it": (
            "A record could not be made or written; grants go on, and the next record begins with node, policy "
            "and ledger.",
            REPORT,
        ),
        "audit log: decisions lost": (
            "Decisions came faster than the disk could write them, or it wrote none for a while.",
            "Put audit.dir on a faster disk, or one with room.",
        ),
        "no control socket: nri-gpu status does not work": (
            "The socket in the state folder cannot be made.",
            "Fix what the line names, then restart nri-gpu.",
        ),
        "socket accepts no connections": (
            "The process has no free file descriptor, or no memory.",
            "End what keeps connections to the socket that the line names open, or raise LimitNOFILE=.",
        ),
        "too many connections at once": (
            "A user or an address (`peer`) has as many connections to a socket as it may have, so idle "
            "ones are closed.",
            "End what keeps connections to the socket that the line names open.",
        ),
        "only root can ask for status": (
            "The group of control.group does not exist, or the daemon may not give it the socket.",
            "Make the group, and set Group= to it in a drop-in of the unit.",
        ),
        "liveness file not written": (
            "The file `alive` in the folder of `--run-dir` cannot be made or written; the chart's probes go by it.",
            "Make room in the folder of --run-dir, or fix what the line names.",
        ),
        "metrics are not served": (
            "The address of metrics.listen cannot be used, or this installation is broken.",
            "Correct metrics.listen, or install nri-gpu again, as the line says.",
        ),
        "bug in an answer": ("A bug in nri-gpu.", REPORT),
        "option was removed and is ignored": (
            "A command line has an option that this version has no longer.",
            "Remove it and do what the line says instead; the next version rejects it.",
        ),
    },
}
FIXES: Final[Mapping[str, str]] = {
    phrase: fix for phrases in CATALOGUE.values() for phrase, (_, fix) in phrases.items()
}
