"""A feature, enabled or disabled: the plan for this node, done unless it is a dry run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import is_enabled
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.text import listed
from nri_gpu.enable.features import FEATURES, Feature
from nri_gpu.enable.installation import ETC_UNITS, Installation
from nri_gpu.enable.node_limits import require_safe_reload, require_service
from nri_gpu.enable.unit_changes import do, read_files, systemctl
from nri_gpu.enable.unit_plan import EnablePlan, plan_disable, plan_enable

HOST: Final = Path("/")


class EnableOptions(Struct, frozen=True):
    """Options of both verbs. now: reload systemd, and start or stop the units."""

    replace: bool = False
    dry_run: bool = False
    now: bool = False


class Enabled(Struct, frozen=True):
    """The plan that was done, or with a dry run is to be done.

    services: that a drop-in changes with their next start. due: systemd has not read the files yet.
    """

    plan: EnablePlan
    services: tuple[str, ...]
    due: bool


def enable(name: str, installation: Installation, options: EnableOptions, root: Path = HOST) -> Enabled:
    """Install and enable what a feature needs. Raises: CommandError; then nothing was changed."""
    feature = FEATURES[name]
    service = require_service(feature, name, root)
    if why := installation.why_unsafe():
        raise CommandError(Exit.PERMISSION, f"systemd would run this installation as root, and {why}")
    wanted = installation.wanted(feature, service, root)
    there = read_files(root, {path.rpartition("/")[0] for path in wanted})
    plan = plan_enable(wanted, there, feature.units, _enabled(feature, root), replace=options.replace)
    if plan.foreign:
        sentence = (
            f"{listed(plan.foreign)}: `nri-gpu enable` did not make it, and it would hide what belongs there; with "
            "--replace it is kept beside, as NAME.old; nothing was changed"
        )
        raise CommandError(Exit.FINDING, sentence)
    return _carry_out(plan, feature, (service,) if feature.drop_in else (), options, root)


def disable(name: str, options: EnableOptions, root: Path = HOST) -> Enabled:
    """Remove what `enable` made for a feature. Raises: CommandError; then nothing was changed."""
    feature = FEATURES[name]
    services = feature.services if feature.drop_in else ()
    paths = [f"{ETC_UNITS}/{unit}" for unit in (*feature.units, *feature.mounts)]
    paths += [f"{ETC_UNITS}/{service}.d/{feature.drop_in}" for service in services]
    there = read_files(root, {path.rpartition("/")[0] for path in paths})
    plan = plan_disable(paths, there, feature.units, _enabled(feature, root))
    having = tuple(service for service in services if f"{ETC_UNITS}/{service}.d/{feature.drop_in}" in there)
    return _carry_out(plan, feature, having or services, options, root, stop=True)


def _carry_out(
    plan: EnablePlan,
    feature: Feature,
    services: tuple[str, ...],
    options: EnableOptions,
    root: Path,
    *,
    stop: bool = False,
) -> Enabled:
    if options.dry_run:
        return Enabled(plan, services, due=bool(plan.steps))
    if options.now:
        asyncio.run(require_safe_reload(root))
    do(plan.steps, root)
    if options.now and plan.disabled:
        systemctl(root, "stop", *plan.disabled)
    due = bool(plan.steps) or _needs_reload(feature, services, root, gone=stop)
    if options.now and due:
        systemctl(root, "daemon-reload")
        due = False
    if options.now and not stop and feature.units:
        systemctl(root, "start", "--no-block", *feature.units)
    return Enabled(plan, services, due)


def _needs_reload(feature: Feature, services: Iterable[str], root: Path, *, gone: bool) -> bool:
    """Return whether systemd has read older files than these. Only the manager of / knows.

    Of drop-ins it is asked what it has read, since before release 253 NeedDaemonReload leaves out folders that are new.
    """
    if root != HOST:
        return False
    for service in services:
        read = systemctl(root, "show", "--value", "--property=DropInPaths", service).split()
        if (f"{ETC_UNITS}/{service}.d/{feature.drop_in}" in read) is gone:
            return True
    units = feature.units
    return bool(units) and "yes" in systemctl(root, "show", "--value", "--property=NeedDaemonReload", *units).split()


def _enabled(feature: Feature, root: Path) -> frozenset[str]:
    seen = Examined(root=root)
    return frozenset(unit for unit in feature.units if is_enabled(seen, unit))
