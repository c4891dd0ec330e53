"""One profile for every law: an example may take its time on a busy machine, and is not an error for that.

HYPOTHESIS_PROFILE=fast: what fails is not made smaller.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

settings.register_profile("laws", deadline=None)
settings.register_profile("fast", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))
