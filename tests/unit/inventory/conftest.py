"""Coroutines as tests, as in the runtime's tests."""

from tests.unit.runtime.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
