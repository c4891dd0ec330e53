"""`python -m nri_gpu` is `nri-gpu`."""

import sys

from nri_gpu.cli import main

sys.exit(main())
