"""The files in which a runtime's settings are to be changed, and what restarts the runtime.

Distributions of Kubernetes bring a containerd of their own: they write its file anew at each start, and run it in units
of their own. Sources: the pages on containerd of K3s, RKE2, MicroK8s and k0s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.doctor.examined import Examined, is_there
from nri_gpu.system.storage import text_of


class Distribution(Struct, frozen=True, kw_only=True):
    """A distribution that brings its own containerd."""

    title: str
    mark: str  # in the path of the configuration
    written: frozenset[str]  # names of files that it writes anew
    template: str  # next to such a file, what to write instead; {v3}: `-v3` from configuration version 3 on
    units: tuple[str, ...]  # the first that is installed runs it
    config: str  # its usual main file
    programs: frozenset[str]  # processes that it has if its containerd does not run
    kubelet: str = ""  # the unit that has its kubelet, if that is another unit
    says_so: str = ""  # the first line of a written file, without which it is the user's; empty: all are written


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
    ),
    Distribution(
        title="K3s",
        mark="/agent/etc/containerd/",
        written=frozenset({"config.toml"}),
        template=_K3S,
        units=("k3s", "k3s-agent"),
        config="/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        programs=frozenset({"k3s", "k3s-server", "k3s-agent"}),
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
)


def distribution_of(config: str, unit: str = "") -> Distribution | None:
    """Return the distribution of a file, or of a process's unit, since RKE2's file may lie where K3s's does."""
    return next((each for each in DISTRIBUTIONS if each.mark in config or unit in each.units), None)


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
