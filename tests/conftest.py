"""The log as a command sets it up, since loguru by itself would print every line of every test; and what skips."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from nri_gpu.daemon.logs import set_up_command
from tests.support.errors import NotBuiltError, UnavailableError

set_up_command()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("containerd")
    group.addoption("--everywhere", action="store_true", help="whole on each containerd, not only the short list")
    group.addoption("--containerds", metavar="DIR[:DIR]", default="", help="on these containerds instead")


def _skipping() -> Generator[None]:
    """Skip a test that lacks a program; in CI, only one whose set of tests/ground is not built."""
    try:
        yield
    except NotBuiltError as fault:
        pytest.skip(str(fault))
    except UnavailableError as fault:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(fault))


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skipping)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skipping)
