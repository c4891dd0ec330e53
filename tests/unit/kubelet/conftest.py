"""Coroutines as tests, the log as values, folders with short names: as in the runtime's room."""

from tests.unit.runtime.conftest import folder as folder
from tests.unit.runtime.conftest import log as log
from tests.unit.runtime.conftest import pytest_pyfunc_call as pytest_pyfunc_call
