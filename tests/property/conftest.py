"""One profile for every law: an example may take its time on a busy machine, and is not an error for that."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("laws", deadline=None)
settings.load_profile("laws")
