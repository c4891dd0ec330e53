"""Marks that several conformance modules share."""

import pytest

from tests.support.packages import Version, available

# For what is decided before the runtime's version matters. On more than one are: NRI's messages and their sizes,
# adjustments, Synchronize, restarts, and what containerd itself does with annotations, environments and CDI.
on_newest = pytest.mark.containerd(available()[-1])
on_oldest = pytest.mark.containerd(Version.V1_7)
