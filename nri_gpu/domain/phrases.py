"""What to do about a warning that lasts for minutes: it is logged as an error with its fix (`system/tasks.py`).

Those of docs/messages.md, which has the cause and fix of all that is logged and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FIXES: Final[Mapping[str, str]] = {
    "runtime not reached, trying again": (
        "Start containerd, switch NRI on in its configuration, or set plugin.socket in the policy to its NRI socket."
    ),
    "connection ended, reconnecting": (
        "Find out in the runtime's own log (journalctl -u containerd) why it drops the plugin or restarts."
    ),
    "runtime does not list its containers yet": (
        "Let the pod with the long grace end, or kill its process; if none is ending, restart containerd."
    ),
    "key not read: no signed grant is valid": (
        "Run the guard as root with the daemon's --state-dir, and restart the daemon if others could read the key."
    ),
    "stray use not looked for": "Mend what the line says; until then nobody is told who uses GPUs without a grant.",
    "stray use is looked for in part": (
        "Install the systemd drop-in stray.conf, or set the chart's stray.enabled (docs/stray.md)."
    ),
    "`nri-gpu check` will not see this guard": (
        "Make room or give it rights to the folder that the line names; it guards all the same."
    ),
    "policy file still has a fault": "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    "inventory not refreshed": (
        "Load the driver's modules (`nri-gpu prepare`), and see in the kernel's log why they do not answer."
    ),
    "not listening for errors of the GPUs; trying again": (
        "See in the kernel's log what is wrong with the driver; restart it if nothing is."
    ),
    "MPS daemon not up": (
        "See the daemon's own log in the folder that docs/mps.md names, and whether another program holds the GPU."
    ),
    "driver files not found": (
        "Install the driver's libraries, or set driver.root; `nri-gpu driver` shows what is found."
    ),
    "CUDA compatibility packages left out": "Unpack the package that the line names again, or remove it.",
    "not registered with the kubelet, trying again": (
        "Start the kubelet, remove other device plugins of that resource, or set kubelet.dir to the kubelet's folder."
    ),
    "daemon not reached, trying again": (
        "Start `nri-gpu run` with `--dra` (policy: dra.enabled) and the same --state-dir."
    ),
    "prepared ResourceClaims not compared with the API server": (
        "Mend what the line says about the API server or the daemon."
    ),
    "CDI specification of a prepared claim not written, trying again": (
        "Make room in that folder and let `nri-gpu dra` write there."
    ),
    "DRA driver not registered, trying again": (
        "Start the kubelet, or set dra.dir and kubelet.registry_dir to its folders."
    ),
    "device plugin not started yet": "Give nri-gpu root's rights to that folder (the drop-in kubelet.conf).",
    "what the kubelet allocated to monitors is not known": (
        "Start the kubelet, or set kubelet.podresources to its socket."
    ),
    "PodResources not answered, trying again": "Start the kubelet, or set kubelet.podresources to its socket.",
    "required CDI device not written, containers can start without nri-gpu": (
        "Let nri-gpu write kubelet.cdi_dir, or run the guard."
    ),
    "ResourceSlices not published, trying again": (
        "Mend what the line names: the way to the API server, the rights of the service account, or the node's name."
    ),
    "node labels not written": "Make its folder, or set labels.file.",
    "ledger.json not written; the grants on the containers hold": "Make room under /run, or mend what the line names.",
    "journal not written; the grants on the containers hold": "Make room under /run, or mend what the line names.",
    "snapshot not written; a restart will wait for the driver": "Make room under /run, or mend what the line names.",
    "audit log not written; nothing else depends on it": "Make room, or set audit.dir to a folder that can be written.",
    "socket accepts no connections": (
        "End what keeps connections to the socket that the line names open, or raise LimitNOFILE=."
    ),
    "liveness file not written": "Make room in the folder of --run-dir, or mend what the line names.",
    "metrics are not served": "Correct metrics.listen, or install nri-gpu again, as the line says.",
}
