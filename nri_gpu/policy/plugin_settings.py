"""Settings of the two NRI plugins (daemon and guard), and of the files they write."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.policy.forms import FILE_OR_NONE, FOLDER_OR_NONE, SOCKET, about, text

# The runtime's own rule since NRI 0.12 (containerd/nri: pkg/api/validate.go).
_NAME: Final = text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_INDEX: Final = text(r"[0-9]{2}", 'two digits in quotes, such as "10"', 2)
# shadow-utils' rule for names, and nothing at all.
_GROUP: Final = text(r"(?:[A-Za-z_][A-Za-z0-9_.-]*)?", "a group's name", 32)


# A runtime that splits its list always sends 8 objects in one message of 4 MiB: 512 KiB each, less what plugins add.
REQUEST_BYTES: Final = 448 << 10


class PluginSettings(Struct, frozen=True, kw_only=True):
    """The name, place and connection by which nri-gpu registers with the container runtime, and its limits."""

    name: Annotated[
        str,
        _NAME,
        about("Name the runtime and its log know the plugin by.", flag="--plugin-name"),
    ] = "nri-gpu"
    index: Annotated[
        str,
        _INDEX,
        about("Place among NRI plugins: lower numbers are asked first.", flag="--index"),
    ] = "10"
    socket: Annotated[str, SOCKET, about("The runtime's NRI socket.", flag="--socket")] = "/var/run/nri/nri.sock"
    request_bytes: Annotated[
        int,
        Meta(ge=0, le=16 << 20),
        about(
            "Bytes in which the runtime may describe a pod or container; a larger one is refused, with or without a "
            "request. 0: no limit. Large ones can keep the runtime from listing the node's containers to nri-gpu, "
            "which then cannot serve."
        ),
    ] = REQUEST_BYTES
    max_pods: Annotated[
        int,
        Meta(ge=1, le=4096),
        about(
            "Pods that the node may run: the kubelet's maxPods. Each pod has an equal share of one of the runtime's "
            "messages; in a pod above its share, a container with which the runtime could not send its list is "
            "refused."
        ),
    ] = 110


class AuditSettings(Struct, frozen=True, kw_only=True):
    """The audit log: every decision with all that decided it, for `nri-gpu replay`."""

    max_mib: Annotated[
        int,
        Meta(ge=0, le=1024),
        about(
            "Size of the log in MiB; one earlier log of that size is kept. 0: no log. A pod may fill an eighth of it, "
            "then its decisions are only counted; of a request over 32 KiB it has the names and the annotation alone. "
            "`nri-gpu replay` names both, and passes over them."
        ),
    ] = 4
    dir: Annotated[
        str,
        FOLDER_OR_NONE,
        about(
            "Folder for it; empty: the state folder, which a reboot empties. In the systemd unit it must be writable."
        ),
    ] = ""


class ControlSettings(Struct, frozen=True, kw_only=True):
    """Users that may query the daemon."""

    group: Annotated[
        str,
        _GROUP,
        about(
            "Group that may run `nri-gpu status`, in addition to root; empty: root alone. The systemd unit needs it as "
            "its Group= too."
        ),
    ] = ""


class LabelSettings(Struct, frozen=True, kw_only=True):
    """Labels of this node's GPUs, for the cluster's scheduler."""

    file: Annotated[
        str,
        FILE_OR_NONE,
        about(
            "File for Node Feature Discovery with the node's labels, in the names of NVIDIA's feature discovery; its "
            "folder must exist. Empty: none.",
            flag="--labels",
        ),
    ] = ""


class GuardSettings(Struct, frozen=True, kw_only=True):
    """The second process, `nri-gpu guard`: its NRI name, and what it does about containers that run ungranted."""

    name: Annotated[str, _NAME, about("Name the runtime and its log know the guard by.")] = "nri-gpu-guard"
    index: Annotated[
        str, _INDEX, about("Its place among NRI plugins: behind every plugin that may refuse a start.")
    ] = "90"
    stop_ungranted: Annotated[
        bool,
        about("Stop containers that run without the GPUs they asked for, when the guard finds some as it connects."),
    ] = False
    stop_grace_s: Annotated[int, Meta(ge=0, le=300), about("Seconds that such a container has to end on its own.")] = 10
    cri_socket: Annotated[str, SOCKET, about("The runtime's CRI socket, through which they are stopped.")] = (
        "/run/containerd/containerd.sock"
    )
