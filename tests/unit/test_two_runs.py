"""Two runs of the tests on one machine do not meet: no port and no cgroup has a name that the other run takes, too."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nri_gpu.system.cgroups import DEVICES, UNIFIED
from tests.support.cgroup import Cgroup, OccupiedCgroup, host_cgroup
from tests.support.holding import cgroup_of, path_in_proc

ROOT = Path(__file__).parents[2]
LISTENS = ("bind", "create_server", "HTTPServer", "ThreadingHTTPServer")


@pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups")
def test_cgroups_of_one_name_do_not_meet() -> None:
    controller = DEVICES if host_cgroup() is Cgroup.V1 else UNIFIED
    with ExitStack() as stack:
        first, second = (stack.enter_context(cgroup_of("same/name")) for _ in range(2))
        assert path_in_proc(first) != path_in_proc(second)
        made = [OccupiedCgroup(controller, "same") for _ in range(2)]
        for each in made:
            stack.callback(each.remove)
        assert made[0].own != made[1].own
    assert not first.parents[1].exists()


def fixed_ports() -> Iterator[str]:
    """Each place where a test listens on a port of its choice."""
    for file in (path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if any(f"{name}(" in text for name in LISTENS) else ():
            match node:
                case ast.Call(
                    func=ast.Name(id=name) | ast.Attribute(attr=name),
                    args=[ast.Tuple(elts=[_, ast.Constant(value=int(port))]), *_],
                ) if name in LISTENS and port:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: port {port}"


def test_no_port_is_fixed() -> None:
    assert not [*fixed_ports()]
