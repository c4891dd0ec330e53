"""One profile for every law: an example may take its time on a busy machine, and is not an error for that.

HYPOTHESIS_PROFILE=fast: what fails is not made smaller. few: the same, and a law that names no number of examples gets
15, which reach the lines that 100 reach.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

settings.register_profile("laws", deadline=None)
NOT_SMALLER = (Phase.explicit, Phase.generate)
settings.register_profile("fast", deadline=None, phases=NOT_SMALLER)
settings.register_profile("few", deadline=None, phases=NOT_SMALLER, max_examples=15)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))
