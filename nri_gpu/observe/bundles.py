"""The containers of each runtime of the table, read from the folders where it keeps them. It runs in the child."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.errors import UnseenError, cause_of
from nri_gpu.domain.text import shown
from nri_gpu.observe.looks import DeviceRequest, Unseen
from nri_gpu.observe.runtime_table import (
    CONTAINERD,
    CRIO,
    DOCKER,
    MOBY,
    PODMAN,
    Layout,
    folders_of,
    mounted_folders,
)
from nri_gpu.system.cgroups import cgroups_of
from nri_gpu.system.storage import below, is_there
from nri_gpu.system.untrusted_files import folders_in, opened_folder, read_in
from nri_gpu.verify.oci_bundles import STATES, Bundle, read_bundles, read_pid, with_spec
from nri_gpu.verify.oci_spec import Spec, spec_decoder

ASKED, CAPABILITIES = "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
VARIABLES: Final = frozenset({ASKED, CAPABILITIES})
DETAILS_MAX: Final = 1 << 20  # bytes of a file of Docker's
FAULTS_MAX: Final = 16  # containers that are named one by one
BUNDLES: Final = "bundles"  # as of `Unseen.what`
_CRIO_CGROUP: Final = "crio-"  # begins the name of a container's cgroup. CRI-O: internal/config/cgmgr, scopePrefix
_DECODER: Final = spec_decoder(VARIABLES)


NO_RUNTIME: Final = (
    "containers: no folder of containerd, Docker, Podman or CRI-O is here; a pod must mount those of its node, and a "
    "containerd of other paths needs --containerd-state"
)


class FoundContainer(Struct, frozen=True, kw_only=True):
    """A container that runs, or is about to. name: Docker's own for it. fault: why name or requests are missing."""

    bundle: Bundle
    runtime: str
    name: str = ""
    requests: tuple[DeviceRequest, ...] = ()
    fault: str = ""


class _Config(Struct, frozen=True):
    """A config.v2.json. All else in it is passed over."""

    name: str = field(name="Name", default="")


class _Request(Struct, frozen=True):
    driver: str | None = field(name="Driver", default="")
    count: int | None = field(name="Count", default=0)
    ids: tuple[str, ...] | None = field(name="DeviceIDs", default=())


class _HostConfig(Struct, frozen=True):
    """A hostconfig.json. All else in it is passed over."""

    requests: tuple[_Request, ...] | None = field(name="DeviceRequests", default=())


def found_containers(states: Sequence[str], root: Path) -> tuple[tuple[FoundContainer, ...], tuple[Unseen, ...]]:
    """Return all containers that run or are about to, each once, and what could not be read.

    states: state folders of containerds beside the usual ones. root: the host's /.
    """
    found, unseen = dict[str, FoundContainer](), list[Unseen]()
    for each in (*_of_containerds(states, root, unseen), *_of_storage(root, unseen)):
        first = found.get(each.bundle.id)
        if first is None or not first.bundle.pid:
            found[each.bundle.id] = each
        elif each.bundle.pid not in (0, first.bundle.pid):
            ids = f"container {shown(each.bundle.id)} of {first.runtime} and of {each.runtime}"
            unseen.append(Unseen(BUNDLES, f"{ids} have the same id: only the first is shown"))
    unread = [each.bundle for each in found.values() if each.bundle.fault and each.bundle.spec == Spec()]
    for bundle in unread[:FAULTS_MAX]:
        unseen.append(Unseen(BUNDLES, f"container {shown(bundle.id)} of {bundle.pod}: {bundle.fault}"))
    if more := unread[FAULTS_MAX:]:
        unseen.append(Unseen(BUNDLES, f"{len(more)} more containers whose bundles cannot be read"))
    if not any(is_there(below(root, each)) for each in (*states, *mounted_folders())):
        unseen.append(Unseen(BUNDLES, NO_RUNTIME))
    return tuple(found.values()), tuple(unseen)


def _of_containerds(states: Sequence[str], root: Path, unseen: list[Unseen]) -> Iterator[FoundContainer]:
    for state in dict.fromkeys((*states, *STATES)):
        try:
            bundles = read_bundles([below(root, state)], starting=True, variables=VARIABLES)
        except UnseenError as error:
            if error.denied or state in states:
                unseen.append(Unseen(BUNDLES, str(error)))
            continue
        for bundle in bundles:
            found = FoundContainer(bundle=bundle, runtime=CONTAINERD)
            yield _with_details(found, root) if bundle.namespace == MOBY else found


def _with_details(found: FoundContainer, root: Path) -> FoundContainer:
    """Add what Docker says of its container: its name, and the devices that it was asked for."""
    [details] = folders_of(Layout.DETAILS)
    found = replace(found, runtime=DOCKER)
    try:
        with opened_folder(below(root, details)) as above, opened_folder(found.bundle.id, above) as folder:
            config = msgspec.json.decode(read_in(folder, "config.v2.json", DETAILS_MAX)[0], type=_Config)
            found = replace(found, name=config.name.removeprefix("/"))
            content, _ = read_in(folder, "hostconfig.json", DETAILS_MAX)
            requests = msgspec.json.decode(content, type=_HostConfig).requests or ()
    except FileNotFoundError:  # it is gone by now, or Docker keeps them in another folder
        return found
    except OSError as error:
        return replace(found, fault=f"Docker's {error.filename} for it cannot be read: {cause_of(error)}")
    except (ValueError, RecursionError) as error:
        return replace(found, fault=f"Docker's files for it cannot be understood: {error}")
    made = (DeviceRequest(driver=e.driver or "", count=e.count or 0, ids=e.ids or ()) for e in requests)
    return replace(found, requests=tuple(made))


def _of_storage(root: Path, unseen: list[Unseen]) -> Iterator[FoundContainer]:
    """Yield the containers of Podman and CRI-O that have a process; others may stay after their end, for long."""
    running, *kept = (below(root, each) for each in folders_of(Layout.STORAGE))
    try:
        with opened_folder(running) as above:
            for id_, folder in folders_in(above):
                if found := _of_userdata(id_, folder, kept):
                    yield found
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        unseen.append(Unseen(BUNDLES, f"{running} cannot be listed: {cause_of(error)}; be root"))


def _of_userdata(id_: str, above: int, kept: Iterable[Path]) -> FoundContainer | None:
    """Return the container of a folder if it has a process. kept: folders where its spec may lie as well."""
    bundle = Bundle(id_, PODMAN)
    try:
        with opened_folder("userdata", above) as folder:
            bundle = replace(bundle, pid=read_pid(folder, "pidfile"))
            cgroups = cgroups_of(bundle.pid).values()
            if not any(id_ in path for path in cgroups):
                return None  # another process has the pid of one that has ended
            if any(f"{_CRIO_CGROUP}{id_}" in path for path in cgroups):
                bundle = replace(bundle, namespace=CRIO)
            with suppress(FileNotFoundError):
                return _named(with_spec(bundle, folder, _DECODER))
        for path in kept:
            with (
                suppress(FileNotFoundError),
                opened_folder(path) as stored,
                opened_folder(id_, stored) as inner,
                opened_folder("userdata", inner) as folder,
            ):
                return _named(with_spec(bundle, folder, _DECODER))
    except (FileNotFoundError, UnseenError):  # it does not run, or no more
        return None
    except OSError as error:
        return _named(replace(bundle, fault=f"its {error.filename} cannot be read: {cause_of(error)}"))
    except (ValueError, RecursionError) as error:
        return _named(replace(bundle, fault=f"its bundle cannot be understood: {error}"))
    return _named(replace(bundle, fault="its config.json is not in the folders that are looked at"))


def _named(bundle: Bundle) -> FoundContainer:
    """Return the container with its runtime, by its cgroup: Podman takes any annotation that its user gives."""
    return FoundContainer(bundle=bundle, runtime=bundle.namespace)
