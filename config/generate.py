"""`config/policy.schema.json` from the policy's own declarations; with --check, whether it is up to date.

python config/generate.py [--check]
"""

import sys
from pathlib import Path

from nri_gpu.policy.schema import schema_text

SCHEMA = Path(__file__).with_name("policy.schema.json")


def main() -> int:
    """Write or check. Returns an exit code."""
    if "--check" not in sys.argv[1:]:
        SCHEMA.write_text(schema_text())
        return 0
    if SCHEMA.read_text() == schema_text():
        return 0
    print(f"{SCHEMA.name} is not what the declarations in nri_gpu/policy/model.py say: run `make schema`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
