"""Settings that are allowed and probably not meant: warnings of `check`, never faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from nri_gpu.domain.edits import HARMLESS, Extra
from nri_gpu.domain.finding import Finding, in_policy, note
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

ALLOW: Final = "namespaces.allow"
_PUBLIC_FOLDERS: Final = ("/tmp/", "/var/tmp/", "/dev/shm/")


def advise(policy: Policy) -> tuple[Finding, ...]:
    """Return a finding for each setting that an operator should check again, the widest first."""
    return (*policy.ignored, *(finding for part in _PARTS for finding in part(policy)))


def _request_size(policy: Policy) -> Iterator[Finding]:
    size_bytes = policy.plugin.request_bytes
    if not 0 < size_bytes <= REQUEST_BYTES:
        yield in_policy(
            f"plugin.request_bytes = {size_bytes} lets containers be created that the runtime cannot list to plugins "
            "(it needs room for 8 of them in 4 MiB): one pod can then keep nri-gpu and its guard from ever connecting, "
            f"and make containerd 2.x panic; {REQUEST_BYTES} is safe",
            "plugin.request_bytes",
        )


def _who_may_ask(policy: Policy) -> Iterator[Finding]:
    rules = policy.namespaces
    if catch_all(policy) is not None or (policy.rule.rules and not rules.allow.patterns):
        return  # rules say who
    if not rules.allow.patterns:
        yield in_policy("namespaces.allow is empty: no container can get a GPU", "namespaces.allow")
    elif "*" in rules.deny.patterns:
        yield in_policy('namespaces.deny has "*": no container can get a GPU', "namespaces.deny")
    elif "*" in rules.allow.patterns:
        but = " but those of namespaces.deny" if rules.deny.patterns else ""
        pools = " that are in no pool" if policy.pool.pools else ""
        who = f"everyone who can create a pod there can take this node's GPUs{pools} by an annotation"
        if ALLOW in policy.written:
            yield note("policy", f"every namespace{but} may ask, as {ALLOW} in {policy.source} says: {who}")
        else:
            yield in_policy(f"every namespace{but} may ask: {who}; list the namespaces in {ALLOW}", ALLOW)


def _silence(policy: Policy) -> Iterator[Finding]:
    if policy.namespaces.otherwise is Otherwise.IGNORE:
        yield in_policy(
            'namespaces.otherwise = "ignore": a container that asks and may not starts without GPUs, and only the log '
            "says so",
            "namespaces.otherwise",
        )
    if policy.environment.disarm is Disarm.ALL:
        yield in_policy(
            'environment.disarm = "all" takes the GPUs of containers that NVIDIA\'s device plugin serves through '
            "NVIDIA_VISIBLE_DEVICES: only for nodes without it",
            "environment.disarm",
        )


def _parts(policy: Policy) -> Iterator[Finding]:
    denied = closure(policy.defaults.capabilities) - policy.capabilities.allowed
    if denied:
        yield in_policy(
            f"defaults.capabilities needs {', '.join(sorted(denied))}, which capabilities.allowed does not list: "
            "requests that do not say are refused",
            "defaults.capabilities",
        )


def _extras(policy: Policy) -> Iterator[Finding]:
    reaching = sorted(policy.extras.allowed - HARMLESS - {Extra.FIRMWARE})
    if reaching and "*" in policy.namespaces.allow.patterns:
        yield in_policy(
            f"extras.allowed lists {', '.join(reaching)}, which reach beyond the GPUs granted, and every namespace may "
            "ask: docs/extras.md says what each opens to everyone who can create a pod",
            "extras.allowed",
        )


def _external_allocations(policy: Policy) -> Iterator[Finding]:
    kubelet = policy.kubelet
    if not kubelet.injects_external:
        return
    if not kubelet.podresources:
        yield in_policy(
            "kubelet.inject_for and kubelet.reservations need kubelet.podresources: without it every "
            "container that NVIDIA's device plugin allocates GPUs to is refused",
            "kubelet.podresources",
        )
    if kubelet.inject_for.patterns and policy.environment.may_ask.patterns:
        yield in_policy(
            "environment.may_ask changes little with kubelet.inject_for: a container that names GPUs in "
            "NVIDIA_VISIBLE_DEVICES gets what the kubelet allocated to it, and nothing else",
            "environment.may_ask",
        )
    if kubelet.reservations.patterns and not (kubelet.inject_for.patterns or kubelet.enabled):
        yield in_policy(
            "kubelet.reservations needs kubelet.inject_for, or nri-gpu's own device plugin (--kubelet): without either "
            "no reservation counts, and pods with a GPU group are refused",
            "kubelet.reservations",
        )
    if "*" in kubelet.reservations.patterns:
        yield in_policy(
            'kubelet.reservations has "*": everyone who can create a pod anywhere can share its GPUs with other pods; '
            "name the scheduler's own namespace",
            "kubelet.reservations",
        )


def _folders(policy: Policy) -> Iterator[Finding]:
    driver = (("driver.root", policy.driver.root), ("driver.stage_dir", policy.driver.stage_dir))
    for path, value in (*driver, ("compat.dir", policy.compat.dir)):
        if f"{value}/".startswith(_PUBLIC_FOLDERS):
            yield in_policy(
                f'{path} = "{value}" is in a folder that anyone can write to: containers load libraries from it', path
            )


def _metrics(policy: Policy) -> Iterator[Finding]:
    if policy.metrics.public:
        yield in_policy(
            f"metrics.public = true: whoever reaches {policy.metrics.listen or 'metrics.listen'} can read the names of "
            "all pods that have GPUs",
            "metrics.public",
        )


def _guard_index(policy: Policy) -> Iterator[Finding]:
    if policy.guard.index <= policy.plugin.index:
        yield in_policy(
            f'guard.index = "{policy.guard.index}" is not behind plugin.index = "{policy.plugin.index}": starts are '
            "then refused with the guard's sentence, where nri-gpu's own would say more",
            "guard.index",
        )


_PARTS: Final[tuple[Callable[[Policy], Iterator[Finding]], ...]] = (
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
    lambda policy: shipped_lists(policy.health),
    _folders,
    _guard_index,
    _metrics,
)
