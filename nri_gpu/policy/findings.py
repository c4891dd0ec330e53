"""Settings that are allowed and probably not meant: warnings of `check`, never faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from nri_gpu.domain.edits import HARMLESS, Extra
from nri_gpu.domain.gpu import closure
from nri_gpu.policy.health_settings import shipped_lists
from nri_gpu.policy.model import Disarm, Otherwise, Policy
from nri_gpu.policy.plugin_settings import REQUEST_BYTES
from nri_gpu.policy.rule_findings import (
    catch_all,
    namespaces_behind_rules,
    other_settings,
    pools_among_themselves,
    rule_terms,
    unreachable_rules,
)

_PUBLIC_FOLDERS: Final = ("/tmp/", "/var/tmp/", "/dev/shm/")


def advise(policy: Policy) -> tuple[str, ...]:
    """One sentence for each setting that an operator should check again, the widest first."""
    return tuple(sentence for part in _PARTS for sentence in part(policy))


def _ignored(policy: Policy) -> Iterator[str]:
    yield from policy.ignored


def _request_size(policy: Policy) -> Iterator[str]:
    size_bytes = policy.plugin.request_bytes
    if not 0 < size_bytes <= REQUEST_BYTES:
        yield (
            f"plugin.request_bytes = {size_bytes} lets containers be created that the runtime cannot list to plugins "
            "(it needs room for 8 of them in 4 MiB): one pod can then keep nri-gpu and its guard from ever connecting, "
            f"and make containerd 2.x panic; {REQUEST_BYTES} is safe"
        )


def _who_may_ask(policy: Policy) -> Iterator[str]:
    rules = policy.namespaces
    if catch_all(policy) is not None or (policy.rule.rules and not rules.allow.patterns):
        return  # rules say who
    if not rules.allow.patterns:
        yield "namespaces.allow is empty: no container can get a GPU"
    elif "*" in rules.deny.patterns:
        yield 'namespaces.deny has "*": no container can get a GPU'
    elif "*" in rules.allow.patterns:
        but = " but those of namespaces.deny" if rules.deny.patterns else ""
        pools = " that are in no pool" if policy.pool.pools else ""
        yield (
            f"every namespace{but} may ask: everyone who can create a pod there can take this node's GPUs{pools} by an "
            "annotation; list the namespaces in namespaces.allow"
        )


def _silence(policy: Policy) -> Iterator[str]:
    if policy.namespaces.otherwise is Otherwise.IGNORE:
        yield (
            'namespaces.otherwise = "ignore": a container that asks and may not starts without GPUs, and only the log '
            "says so"
        )
    if policy.environment.disarm is Disarm.ALL:
        yield (
            'environment.disarm = "all" takes the GPUs of containers that NVIDIA\'s device plugin serves through '
            "NVIDIA_VISIBLE_DEVICES: only for nodes without it"
        )


def _parts(policy: Policy) -> Iterator[str]:
    denied = closure(policy.defaults.capabilities) - policy.capabilities.allowed
    if denied:
        yield (
            f"defaults.capabilities needs {', '.join(sorted(denied))}, which capabilities.allowed does not list: "
            "requests that do not say are refused"
        )


def _extras(policy: Policy) -> Iterator[str]:
    reaching = sorted(policy.extras.allowed - HARMLESS - {Extra.FIRMWARE})
    if reaching and "*" in policy.namespaces.allow.patterns:
        yield (
            f"extras.allowed lists {', '.join(reaching)}, which reach beyond the GPUs granted, and every namespace may "
            "ask: docs/extras.md says what each opens to everyone who can create a pod"
        )


def _external_allocations(policy: Policy) -> Iterator[str]:
    kubelet = policy.kubelet
    if not kubelet.injects_external:
        return
    if not kubelet.podresources:
        yield (
            "kubelet.inject_for and kubelet.reservations need kubelet.podresources: without it every "
            "container that NVIDIA's device plugin allocates GPUs to is refused"
        )
    if kubelet.inject_for.patterns and policy.environment.may_ask.patterns:
        yield (
            "environment.may_ask changes little with kubelet.inject_for: a container that names GPUs in "
            "NVIDIA_VISIBLE_DEVICES gets what the kubelet allocated to it, and nothing else"
        )
    if kubelet.reservations.patterns and not (kubelet.inject_for.patterns or kubelet.enabled):
        yield (
            "kubelet.reservations needs kubelet.inject_for, or nri-gpu's own device plugin (--kubelet): without either "
            "no reservation counts, and pods with a GPU group are refused"
        )
    if "*" in kubelet.reservations.patterns:
        yield (
            'kubelet.reservations has "*": everyone who can create a pod anywhere can share its GPUs with other pods; '
            "name the scheduler's own namespace"
        )


def _folders(policy: Policy) -> Iterator[str]:
    driver = (("driver.root", policy.driver.root), ("driver.stage_dir", policy.driver.stage_dir))
    for path, value in (*driver, ("compat.dir", policy.compat.dir)):
        if f"{value}/".startswith(_PUBLIC_FOLDERS):
            yield f'{path} = "{value}" is in a folder that anyone can write to: containers load libraries from it'


def _xids(policy: Policy) -> Iterator[str]:
    yield from shipped_lists(policy.health)


_PARTS: Final[tuple[Callable[[Policy], Iterator[str]], ...]] = (
    _ignored,
    _request_size,
    _who_may_ask,
    unreachable_rules,
    namespaces_behind_rules,
    rule_terms,
    pools_among_themselves,
    _parts,
    _extras,
    _silence,
    other_settings,
    _external_allocations,
    _xids,
    _folders,
)
