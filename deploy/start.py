"""Starts nri-gpu in a package's own environment, if that has wheels for the Python which runs this."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("nri_gpu") is None:
    running = f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}"
    have = sorted((path.name.removeprefix("python3.") for path in (Path(__file__).parent / "lib").iterdir()), key=int)
    print(
        f"nri-gpu: {running}, and this package is for Python {', '.join(f'3.{minor}' for minor in have)}: "
        "install a newer nri-gpu, or its wheel in a virtual environment",
        file=sys.stderr,
    )
    sys.exit(69)

from nri_gpu.cli.main import main

sys.exit(main())
