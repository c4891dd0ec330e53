"""Coroutines as tests, the log and short folders, as in the runtime's tests."""

from tests.unit.runtime.conftest import folder, log, pytest_pyfunc_call

__all__ = ["folder", "log", "pytest_pyfunc_call"]
