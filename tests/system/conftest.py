"""As for unit tests: coroutines as tests, the log as values, folders with short names for sockets."""

from tests.unit.conftest import folder as folder
from tests.unit.conftest import freezer as freezer
from tests.unit.conftest import log as log
from tests.unit.conftest import on_x86_64 as on_x86_64
from tests.unit.conftest import pytest_pyfunc_call as pytest_pyfunc_call
