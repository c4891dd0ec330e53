"""`python -m nri_gpu` is `nri-gpu`."""

import sys

from nri_gpu.cli.main import main

sys.exit(main())
