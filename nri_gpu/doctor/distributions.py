"""The files in which a runtime's settings are to be changed, and what restarts the runtime.

Distributions of Kubernetes bring a containerd of their own: they write its file anew at each start, and run it in units
of their own. Sources: the pages on containerd of K3s, RKE2, MicroK8s, k0s and EKS (nodeadm); canonical/k8s-snap
pkg/k8sd/setup/containerd.go; k3s-io/k3s pkg/agent/templates, pkg/configfilearg/parser.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import is_installed
from nri_gpu.doctor.runtime_settings import TEXT_MAX
from nri_gpu.system.storage import is_there, text_of


class Distribution(Struct, frozen=True, kw_only=True):
    """A distribution that brings its own containerd, or writes its file at each boot."""

    title: str
    mark: str  # in the path of the configuration
    written: frozenset[str]  # names of files that it writes anew
    template: str = ""  # next to such a file, what to write instead; {v3}: `-v3` from configuration version 3 on
    units: tuple[str, ...]  # the first that is installed runs it
    config: str  # its usual main file
    programs: frozenset[str]  # processes that it has if its containerd does not run
    kubelet: str = ""  # the unit that has its kubelet, if that is another unit
    says_so: str = ""  # the first line of a written file, without which it is the user's; empty: all are written
    own: str = ""  # its own configuration, whose `default-runtime` is the one of its containerd
    signs: tuple[str, ...] = ()  # files that show it, if its unit and its file are called as everybody's
    lasts: str = ""  # instead of a template: where a change outlives the next boot


_K3S: Final = 'config{v3}.toml.tmpl, behind {{{{ template "base" . }}}}'
DISTRIBUTIONS: Final = (
    Distribution(
        title="RKE2",
        mark="/rke2/agent/etc/containerd/",
        written=frozenset({"config.toml"}),
        template=_K3S,
        units=("rke2-server", "rke2-agent"),
        config="/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        programs=frozenset({"rke2"}),
        own="/etc/rancher/rke2/config.yaml",
    ),
    Distribution(
        title="K3s",
        mark="/agent/etc/containerd/",
        written=frozenset({"config.toml"}),
        template=_K3S,
        units=("k3s", "k3s-agent"),
        config="/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        programs=frozenset({"k3s", "k3s-server", "k3s-agent"}),
        own="/etc/rancher/k3s/config.yaml",
    ),
    Distribution(
        title="MicroK8s",
        mark="/var/snap/microk8s/",
        written=frozenset({"containerd.toml"}),
        template="containerd-template.toml",
        units=("snap.microk8s.daemon-containerd",),
        kubelet="snap.microk8s.daemon-kubelite",
        config="/var/snap/microk8s/current/args/containerd.toml",
        programs=frozenset({"kubelite"}),
    ),
    Distribution(
        title="k0s",
        mark="/k0s/containerd",
        written=frozenset({"containerd.toml", "containerd-cri.toml"}),
        template="containerd.d/nri-gpu.toml",
        units=("k0sworker", "k0scontroller"),
        config="/etc/k0s/containerd.toml",
        programs=frozenset({"k0s"}),
        says_so="# k0s_managed=true",
    ),
    Distribution(
        title="Canonical Kubernetes",
        mark="/var/snap/k8s/",
        written=frozenset(),
        units=("snap.k8s.containerd",),
        kubelet="snap.k8s.kubelet",
        config="/etc/containerd/config.toml",
        programs=frozenset(),
    ),
    Distribution(
        title="EKS",
        mark="/etc/containerd/",
        written=frozenset({"config.toml"}),
        units=("containerd",),
        kubelet="kubelet",
        config="/etc/containerd/config.toml",
        programs=frozenset(),
        signs=("/etc/eks", "/etc/systemd/system/nodeadm-config.service"),
        lasts="# and in the user data, spec.containerd.config of NodeConfig: EKS writes that file anew at each boot",
    ),
)
_DEFAULT_RUNTIME: Final = re.compile(r"""\s*["']?default-runtime["']?\s*:""")


def is_here(seen: Examined, found: Distribution) -> bool:
    """Return whether files show that the node has the distribution."""
    units = (f"{each}.service" for each in found.units)
    here = (
        any(is_there(seen.at(each)) for each in found.signs)
        if found.signs
        else any(is_installed(seen, each) for each in units)
    )
    return here and is_there(seen.at(found.config))


def distribution_of(seen: Examined, config: str, unit: str = "") -> Distribution | None:
    """Return the distribution of a file, or of a process's unit, since RKE2's file may lie where K3s's does."""
    theirs = (each for each in DISTRIBUTIONS if each.mark in config or unit in each.units)
    return next((each for each in theirs if not each.signs or is_here(seen, each)), None)


def without_default_runtime(seen: Examined, found: Distribution, unit: str) -> Iterator[str]:
    """Yield the lines of a fix that takes `default-runtime` out of a distribution's own configuration."""
    folder = seen.at(f"{found.own}.d")
    dropped = (path.name for path in sorted(folder.glob("*")) if path.suffix.lower() in (".yaml", ".yml"))
    files = (found.own, *(f"{found.own}.d/{name}" for name in dropped))
    lines = ((each, line) for each in files for line in (text_of(seen.at(each), TEXT_MAX, "utf-8") or "").splitlines())
    there = [(each, line.strip()) for each, line in lines if _DEFAULT_RUNTIME.match(line)]
    for each, line in there:
        yield from (f"# in {each}, remove the line:", line)
    if not there:
        yield f"# remove default-runtime from {found.own}, or --default-runtime from the command of {unit}"


def template_of(seen: Examined, found: Distribution, config: str, version: int) -> str:
    """Return what to write instead of a file that is written anew: the template that is there, or a new one.

    version: of the configuration, or 0 if the file cannot be read.
    """
    new, old = (f"{Path(config).parent}/{found.template.format(v3=each)}" for each in ("-v3", ""))
    if version in (1, 2):
        return old
    there = (each for each in (new, old) if is_there(seen.at(each.partition(",")[0])))
    return next(there, new if version else old)


def written_anew(seen: Examined, found: Distribution | None, config: str, files: Iterable[str]) -> Iterator[str]:
    """Yield the files of a runtime in which a change would be lost."""
    if found and (text_of(seen.at(config), 80) or "").startswith(found.says_so):
        yield from (each for each in files if Path(each).name in found.written)
