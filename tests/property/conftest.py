"""How many examples a law is given, and without a deadline."""

import tests.support.laws  # noqa: F401
