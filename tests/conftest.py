"""The log as a command sets it up, since loguru by itself would print every line of every test; and what skips."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from nri_gpu.daemon.logs import set_up_command
from tests import ground
from tests.support.errors import NotBuiltError, UnavailableError

set_up_command()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("containerd")
    group.addoption("--everywhere", action="store_true", help="whole on each containerd, not only the short list")
    group.addoption("--containerds", metavar="DIR[:DIR]", default="", help="on these containerds instead")


def _skipping(item: pytest.Item) -> Generator[None]:
    """Skip a test that lacks a program; in CI, only one whose set of tests/ground is not built.

    A test with the mark `ground` names that set: in CI it lacks nothing else, but for a cluster where none is offered.
    """
    in_ci = os.environ.get("CI") == "true"
    try:
        yield
    except NotBuiltError as fault:
        named = [name for mark in item.iter_markers("ground") for name in mark.args]
        if in_ci and named and all(map(ground.built, named)):
            raise
        pytest.skip(str(fault))
    except UnavailableError as fault:
        if in_ci:
            raise
        pytest.skip(str(fault))


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skipping)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skipping)
