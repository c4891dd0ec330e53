from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.inventory.machine import Machine


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.close()


@pytest.fixture
def machine(one_machine: Machine) -> Iterator[Machine]:
    """With one process for all tests of a module."""
    yield one_machine
    one_machine.forget()
