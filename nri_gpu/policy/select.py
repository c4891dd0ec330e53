"""The terms of one container: by its rule if the rule has a setting, else by the whole policy's."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import Container, Pod
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import NO_EXTRAS, Extra, Extras
from nri_gpu.domain.gpu import Capabilities, Capability, GpuUuid, closure
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted, quoted
from nri_gpu.domain.value import Value
from nri_gpu.policy.forms import NOTHING, UNLIMITED
from nri_gpu.policy.model import Otherwise, Policy, Stale
from nri_gpu.policy.rules import Limits, Pool, Rule

_SOURCE_SHOWN_MAX: Final = 160  # characters of the file's path


class Holdings(Struct, frozen=True, kw_only=True):
    """The GPUs held before a container gets its own: distinct GPUs of its pod, its namespace, and all."""

    pod: Set[GpuUuid] = frozenset()
    namespace: Set[GpuUuid] = frozenset()
    namespace_exclusive: Set[GpuUuid] = frozenset()
    node: Set[GpuUuid] = frozenset()


class Terms(Struct, frozen=True, kw_only=True):
    """The terms on which one container may have GPUs."""

    policy: Policy
    rule: Rule | None = None  # what allowed it, or None for a list of namespaces
    path: str = ""  # that rule's key path

    @property
    def mode(self) -> Mode:
        """Return how GPUs are held if the request does not say."""
        return (self.rule and self.rule.default_mode) or self.policy.defaults.mode

    @property
    def capabilities(self) -> Capabilities:
        """Return the parts of the driver that come if the request does not say."""
        return (self.rule and self.rule.default_capabilities) or self.policy.defaults.capabilities

    @property
    def extras(self) -> Extras:
        """Return the extras that come if the request names none."""
        own = self.rule.default_extras if self.rule else None
        asked = self.policy.defaults.extras if own is None else own
        return Extras(asked) if asked else NO_EXTRAS

    @property
    def limits(self) -> Limits:
        """Return the whole policy's limits, with those of the rule in their place."""
        changed = self.rule.limits if self.rule else None
        return replace(self.policy.limits, **dict(changed)) if changed else self.policy.limits

    def limit_path(self, key: str) -> str:
        """Return where the limit that applies is set."""
        changed = dict(self.rule.limits) if self.rule and self.rule.limits else {}
        return f"{self.path}.limits.{key}" if key in changed else f"limits.{key}"

    @property
    def limits_sharing(self) -> bool:
        """Return whether any GPU has a limit of containers at all."""
        pools = self.policy.pool.pools
        return self.limits.containers_per_gpu != UNLIMITED or any(pool.containers_per_gpu for pool in pools)

    def containers_per_gpu(self, pool: Pool | None) -> tuple[int, str]:
        """Return how many containers may share a GPU of that pool, or of no pool, and where that is set."""
        if pool is not None and pool.containers_per_gpu is not None:
            index = self.policy.pool.pools.index(pool)
            return pool.containers_per_gpu, f"pool[{index}].containers_per_gpu"
        return self.limits.containers_per_gpu, self.limit_path("containers_per_gpu")

    def closed_pools(self, inventory: Inventory, namespace: str) -> Mapping[GpuUuid, Pool | None]:
        """Return the GPUs that this container is not offered, each with its pool.

        None instead of a pool: the GPU is in no pool, and the rule wants one.
        """
        if not self.policy.pool.pools:
            return {}
        members = self.policy.pool.members(inventory)
        wanted = self.rule.pool if self.rule else None
        if wanted is None:
            return {uuid: pool for uuid, pool in members.items() if not (pool.namespaces or NOTHING).match(namespace)}
        each = ((unit.uuid, members.get(unit.uuid)) for unit in inventory.units)
        return {uuid: pool for uuid, pool in each if pool is None or pool.name not in wanted.patterns}

    def denied(self, mode: Mode | None, capabilities: Capabilities, extras: frozenset[Extra]) -> Reason | None:
        """Return why a container may not have GPUs in this way, or None. mode: None where it holds none."""
        denied = self.denied_mode(mode) if mode else None
        return denied or self.denied_capabilities(capabilities) or self.denied_extras(extras)

    def denied_mode(self, mode: Mode) -> Reason | None:
        """Return why a container may not have this mode, or None."""
        allowed, path = self._allowed("modes")
        if mode in allowed:
            return None
        known = ", ".join(each for each in Mode if each in allowed)
        return Reason(
            Code.NOT_ALLOWED,
            f"mode {mode} may not be asked for",
            f"{path} in {self.source} lists {known}",
            "ask with one of these, or change that list",
        )

    def denied_capabilities(self, capabilities: Capabilities) -> Reason | None:
        """Return why a container may not have these parts of the driver, or None. capabilities: closed."""
        allowed, path = self._allowed("capabilities")
        if capabilities <= allowed:
            return None
        denied = [each for each in Capability if each in capabilities - allowed]
        brought = [each for each in denied if any(each in closure(frozenset({one})) for one in capabilities - {each})]
        why = f" ({', '.join(brought)} is brought along by another)" if brought else ""
        return Reason(
            Code.NOT_ALLOWED,
            f"capabilities {', '.join(denied)} may not be asked for{why}",
            f"{path} in {self.source} does not list them",
            "change that list, or ask without",
        )

    def denied_extras(self, asked: frozenset[Extra]) -> Reason | None:
        """Return why a container may not have these extras, or None."""
        allowed, path = self._allowed("extras")
        if asked <= allowed:
            return None
        denied = ", ".join(each for each in Extra if each in asked - allowed)
        return Reason(
            Code.NOT_ALLOWED,
            f"extras {denied} may not be asked for",
            f"{path} in {self.source} does not list them",
            "change that list, or ask without",
        )

    def denied_number(
        self, chosen: Set[GpuUuid], held: Holdings, pod: Pod, *, exclusive: bool, claim: bool = False
    ) -> Reason | None:
        """Return why a container may not have so many GPUs, by the narrowest limit, or None.

        claim: why a ResourceClaim may not; its containers may have some of them each.
        """
        none: Set[GpuUuid] = frozenset()
        in_namespace = f"namespace {quoted(pod.namespace)}"
        for key, whose, before, new in (
            ("gpus_per_container", "a container", none, chosen),
            ("gpus_per_pod", f"pod {quoted(pod.name)}", held.pod, chosen),
            ("exclusive_gpus_per_namespace", in_namespace, held.namespace_exclusive, chosen if exclusive else none),
            ("gpus_per_namespace", in_namespace, held.namespace, chosen),
            ("gpus_per_node", "all containers of this node together", held.node, chosen),
        ):
            limit, used, more = getattr(self.limits, key), len(before), len(new - before)
            if not more or used + more <= limit or (claim and key == "gpus_per_container"):
                continue
            most = f"{counted(limit, 'GPU')}{' in exclusive mode' * key.startswith('exclusive')}"
            of_which = f", of which {used} {'is' if used == 1 else 'are'} held already" if used else ""
            wait = "wait until some are free, " if used and more <= limit else ""
            return Reason(
                Code.OVER_LIMIT,
                f"{whose} may have at most {most}{of_which}; this {'claim' if claim else 'container'} asks for "
                f"{more}{' more' * bool(used)} ({self.limit_path(key)} in {self.source})",
                cure=f"{wait}ask for fewer, or raise that limit",
            )
        return None

    @property
    def source(self) -> str:
        """Return the policy's file, fit for a sentence."""
        return shown_source(self.policy)

    def _allowed(self, key: str) -> tuple[frozenset[str], str]:
        """Return what the rule lists under a key, else what the policy does, and where."""
        own = getattr(self.rule, key, None)
        return (getattr(self.policy, key).allowed, f"{key}.allowed") if own is None else (own, f"{self.path}.{key}")


def shown_source(policy: Policy) -> str:
    """Return the policy's file, fit for a sentence."""
    return quoted(policy.source, _SOURCE_SHOWN_MAX)[1:-1]


def stale_fault(policy: Policy, age_s: float) -> str:
    """Return why nothing can be granted by an inventory of this age (seconds), or empty."""
    settings = policy.inventory
    if settings.stale is Stale.SERVE or age_s <= settings.stale_after_s:
        return ""
    return (
        f"the driver last answered {age_s:.0f} s ago, more than inventory.stale_after_s = {settings.stale_after_s} in "
        f"{shown_source(policy)} allows: see `nvidia-smi` and nri-gpu's log on the node, and try again."
    )


class Allowed(Value, frozen=True):
    """A permission to ask. rule: what allowed it, `namespaces.allow[0]`. terms: what the container may have."""

    aside: ClassVar = ("terms",)

    rule: str
    terms: Terms


class Denied(Struct, frozen=True):
    """A denial: the container must not be created. sentence: why, and what to change."""

    sentence: str


class Ignored(Struct, frozen=True):
    """A denial after which the container starts as if it had not asked. sentence: why."""

    sentence: str


Verdict = Allowed | Denied | Ignored


def select(policy: Policy, container: Container) -> Verdict:
    """Return what policy says of a container with a request."""
    for index, rule in enumerate(policy.rule.rules):
        if rule.matches(container):
            return _by_rule(policy, container, index)
    namespace = container.pod.namespace
    rules = policy.namespaces
    denied = rules.deny.first(namespace)
    if denied is not None:
        return _may_not(policy, namespace, f'namespaces.deny[{denied}] = "{rules.deny.patterns[denied]}" denies it')
    allowed = rules.allow.first(namespace)
    if allowed is None:
        return _may_not(policy, namespace, _not_listed(len(rules.allow.patterns)))
    return Allowed(f"namespaces.allow[{allowed}]", Terms(policy=policy))


def _by_rule(policy: Policy, container: Container, index: int) -> Verdict:
    rule = policy.rule.rules[index]
    name = policy.rule.called(index)
    if rule.allow:
        return Allowed(name, Terms(policy=policy, rule=rule, path=f"rule[{index}]"))
    pod = container.pod
    who = f"container {quoted(container.name)} of pod {quoted(f'{pod.namespace}/{pod.name}')}"
    why = f"{who} may not ask for GPUs: {name} in {shown_source(policy)} denies it{rule.reason and f' ({rule.reason})'}"
    if rule.otherwise is Otherwise.IGNORE:
        return Ignored(f"{why}, and has its request ignored.")
    return Denied(f"{why}; change that rule, or what it matches the pod by.")


def allocates_all(policy: Policy) -> bool:
    """Return whether only the kubelet or claims allocate, all GPUs: no annotation and no variable gets a container any.

    By the policy alone, whatever GPUs there are: each pool is theirs, one has every GPU, and no rule opens one.
    """
    ours = {
        *(policy.kubelet.pools if policy.kubelet.enabled else ()),
        *((policy.dra.pool,) if policy.dra.enabled else ()),
    }
    pools, environment = policy.pool.pools, policy.environment.may_ask.patterns
    opened = {name for rule in policy.rule.rules if rule.pool for name in rule.pool.patterns}
    closed = all(each.name in ours - opened and not each.namespaces for each in pools)
    every = any(
        each == Pool(name=each.name, model=each.model) and "*" in (each.model or NOTHING).patterns for each in pools
    )
    return closed and every and not (policy.fault or environment or policy.kubelet.injects_external)


def is_opened(policy: Policy, pool: Pool | None) -> bool:
    """Return whether some container may have GPUs of that pool, or of no pool, by an annotation."""
    rules, lists = [rule for rule in policy.rule.rules if rule.allow], policy.namespaces
    if pool and any(rule.pool and pool.name in rule.pool.patterns for rule in rules):
        return True
    if pool and not (pool.namespaces or NOTHING).patterns:
        return False
    return any(rule.pool is None for rule in rules) or bool(lists.allow.patterns and "*" not in lists.deny.patterns)


def _not_listed(patterns: int) -> str:
    if patterns == 0:
        return "namespaces.allow is empty"
    return (
        "the pattern of namespaces.allow does not match it"
        if patterns == 1
        else (f"none of the {patterns} patterns of namespaces.allow matches it")
    )


def _may_not(policy: Policy, namespace: str, why: str) -> Denied | Ignored:
    source = shown_source(policy)
    who = f"namespace {quoted(namespace)} may not ask for GPUs: {why}"
    if policy.namespaces.otherwise is Otherwise.IGNORE:
        return Ignored(f"{who} in {source}, and namespaces.otherwise is ignore.")
    return Denied(f"{who} in {source}; change that list, or run the pod in a namespace that may ask.")
