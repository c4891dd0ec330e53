"""The preparation of the host: look, plan, act, and look again, until nothing is left to do.

Modules are loaded by the program that the kernel itself would call. Nodes and links are made in directories held open,
so that nobody can replace them meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final, assert_never

from msgspec import Struct

from nri_gpu.domain.errors import cause_of
from nri_gpu.host.actions import Action, FixNode, HostPlan, LoadModule, MakeLink, MakeNode, make_plan
from nri_gpu.host.facts import (
    CharDevice,
    DevPath,
    HostError,
    HostFacts,
    HostFinding,
    KernelModule,
    is_loaded,
    node_of,
)
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.system.child import run

# Modules, then the nodes they serve, then a round with nothing to do; one more in case others make nodes meanwhile.
_ROUNDS: Final = 4
# Eight GPUs with NVSwitches and their firmware, on a cold disk, take some 20 s.
LOAD_TIMEOUT_S: Final = 60.0
_SHOWN_MAX: Final = 300  # characters of the program's output in a sentence
FOLDER_MODE: Final = 0o755
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Act = Callable[[Action], None]


class PrepareReport(Struct, frozen=True):
    """The actions that were done, in order, and what is left for the administrator. facts: of the last look."""

    facts: HostFacts
    done: tuple[Action, ...] = ()
    findings: tuple[HostFinding, ...] = ()


def prepare(look: Callable[[], HostFacts], act: Act, *, graphics: bool = False) -> PrepareReport:
    """Perform all actions. A failed action is not tried again, and becomes a finding.

    act: performs one action, and raises HostError or OSError if that fails.
    """
    done: dict[Action, None] = {}
    failed: dict[Action, str] = {}
    rounds = 0
    while True:
        facts = look()
        plan = make_plan(facts, graphics=graphics)
        todo = [action for action in plan.actions if action not in failed]
        if not todo or rounds == _ROUNDS:
            break
        rounds += 1
        for action in todo:
            failure = _perform(action, act, failed)
            if failure:
                failed[action] = failure
            else:
                done[action] = None
    return PrepareReport(facts, tuple(done), (*plan.findings, *_left(plan, failed)))


def actor(places: HostFolders, driver_root: Path) -> Act:
    """Return a function that performs one action on this host."""

    def act(action: Action) -> None:
        match action:
            case LoadModule():
                load_module(action.module, places, driver_root)
            case MakeNode():
                make_node(places.dev, action)
            case FixNode():
                fix_node(places.dev, action)
            case MakeLink():
                make_link(places.dev, action)
            case _:
                assert_never(action)

    return act


def _perform(action: Action, act: Act, failed: dict[Action, str]) -> str:
    """Perform an action and return why it failed, or empty."""
    if isinstance(action, LoadModule) and LoadModule(KernelModule.NVIDIA) in failed:
        return "not tried, as it depends on nvidia"
    try:
        act(action)
    except HostError as error:
        return str(error)
    except OSError as error:
        return cause_of(error)
    return ""


def _left(plan: HostPlan, failed: dict[Action, str]) -> Iterator[HostFinding]:
    for action in plan.actions:
        reason = failed.get(action, "something else on this host keeps undoing it")
        yield HostFinding(action.subject, f"{action.UNDONE}: {reason}")


def load_module(
    module: KernelModule, places: HostFolders, driver_root: Path, timeout_s: float = LOAD_TIMEOUT_S
) -> None:
    """Load a module.

    driver_root: modules are looked for in its lib/modules. The program is the host's all the same, so that nothing from
    a driver container runs on the host as root.

    Raises: HostError, with the program's output, if the module is not loaded.
    """
    program = modprobe_program(places.proc)
    elsewhere = [] if driver_root == Path("/") else ["-d", str(driver_root)]
    fault = _run([program, *elsewhere, module.value], timeout_s)
    if not is_loaded(places.sys, module):
        raise HostError(fault or f"{program} reported success, but the module is not loaded")


def modprobe_program(proc: Path) -> str:
    """Return the program that the kernel calls to load modules. Raises: HostError, if none can be run."""
    setting = proc / "sys" / "kernel" / "modprobe"
    try:
        program = setting.read_text().strip()
    except OSError as error:
        raise HostError(f"/proc/sys/kernel/modprobe cannot be read: {cause_of(error)}") from error
    if not program:
        # Somebody emptied it so that the kernel loads nothing by itself, and neither do we.
        raise HostError("/proc/sys/kernel/modprobe is empty: loading modules on demand is switched off on this host")
    path = Path(program)
    if not path.is_absolute() or not path.is_file() or not os.access(path, os.X_OK):
        raise HostError(f"/proc/sys/kernel/modprobe names {program}, which is not an executable program")
    return program


def _run(command: list[str], timeout_s: float) -> str:
    """Run the program, and return what went wrong with the end of its output, or empty. Raises: HostError."""
    shown = " ".join(command)
    try:
        ended = asyncio.run(run(command, timeout_s))
    except TimeoutError as error:
        raise HostError(str(error) or f"{shown} took longer than {timeout_s:g} s and was stopped") from None
    except OSError as error:
        raise HostError(f"{command[0]} cannot be run: {cause_of(error)}") from error
    said = " ".join((ended.output + ended.errors).decode(errors="replace").split())[-_SHOWN_MAX:]
    return f"{shown} ended with {ended.status}: {said or 'without output'}" if ended.status else ""


@contextmanager
def parent_of(dev: Path, path: DevPath) -> Iterator[tuple[int, str]]:
    """Hold a descriptor of the directory that `path` is in, made if it is missing, and the name in it.

    Raises: OSError, if a link, or a file that is no directory, is in the directory's place.
    """
    *folders, name = PurePosixPath(path).parts
    opened = [os.open(dev, _FOLDER)]
    try:
        for folder in folders:
            opened.append(_subfolder(opened[-1], folder))
        yield opened[-1], name
    finally:
        for descriptor in opened:
            os.close(descriptor)


def handle(descriptor: int) -> str:
    """Return a path to the file of an O_PATH descriptor, for calls that take no such descriptor."""
    return f"/proc/self/fd/{descriptor}"


def _subfolder(parent: int, name: str) -> int:
    made = False
    with suppress(FileExistsError):
        os.mkdir(name, FOLDER_MODE, dir_fd=parent)
        made = True
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    if made:
        os.chmod(handle(descriptor), FOLDER_MODE)  # noqa: PTH101 - of a descriptor; mkdir applied the umask
    return descriptor


def make_link(dev: Path, action: MakeLink) -> None:
    """Make a link, after removing the one that it replaces. A link that another process made meanwhile stays.

    Raises: HostError, OSError.
    """
    with parent_of(dev, action.path) as (folder, name):
        _check_target(folder, name, action.target)
        if action.replaces is not None:
            # readlink(2) fails if it is no link any more.
            if os.readlink(name, dir_fd=folder) != action.replaces:
                raise HostError(f"no longer leads to {action.replaces}: something else changes it")
            os.unlink(name, dir_fd=folder)
        with suppress(FileExistsError):
            os.symlink(action.target, name, dir_fd=folder)


def _check_target(folder: int, name: str, target: str) -> None:
    """Refuse a target that is not that device, for example because its node could not be made. Raises: HostError."""
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise HostError(f"{target} is not there") from None
    if not stat.S_ISCHR(status.st_mode) or f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" != name:
        raise HostError(f"{target} is not the device {name}")


# Until the node has its owner, so that it is never open to more users than it should be.
_AT_FIRST: Final = 0o600


def make_node(dev: Path, action: MakeNode) -> None:
    """Make a node, after removing the one that it replaces.

    A node that another process made meanwhile stays: nvidia-modprobe makes the same ones, and the next look checks it.

    Raises: HostError, OSError.
    """
    with parent_of(dev, action.path) as (folder, name):
        if action.replaces:
            with _held(folder, name, action.replaces.number):
                os.unlink(name, dir_fd=folder)
        number = os.makedev(action.node.major, action.node.minor)
        with suppress(FileExistsError):
            os.mknod(name, stat.S_IFCHR | _AT_FIRST, number, dir_fd=folder)
            _own(folder, name, action.node)


def fix_node(dev: Path, action: FixNode) -> None:
    """Set mode and owner of a node that still has its number. Raises: HostError, OSError."""
    with parent_of(dev, action.path) as (folder, name):
        _own(folder, name, action.node)


def _own(folder: int, name: str, node: CharDevice) -> None:
    with _held(folder, name, node.number) as descriptor:
        os.chown(handle(descriptor), node.uid, node.gid)
        os.chmod(handle(descriptor), node.mode)  # noqa: PTH101 - of a descriptor


@contextmanager
def _held(folder: int, name: str, number: tuple[int, int]) -> Iterator[int]:
    """Hold a descriptor of an existing node, which pins its inode. Raises: HostError, if it is a different node."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISCHR(status.st_mode) or node_of(status).number != number:
            raise HostError(f"is no longer the device {number[0]}:{number[1]}: something else changes it")
        yield descriptor
    finally:
        os.close(descriptor)
