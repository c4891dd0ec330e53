"""What is read off the policy's own declarations: `config/policy.schema.json`, and the reference in `docs/policy.md`.

python config/generate.py [--check]     --check: only tell whether they are up to date
"""

import sys
from pathlib import Path

from nri_gpu.policy.schema import reference, schema_text

SCHEMA = Path(__file__).with_name("policy.schema.json")
MANUAL = Path(__file__).parents[1] / "docs" / "policy.md"
FIRST = "### `[plugin]`"  # the reference is the end of the manual, from here on


def manual_text() -> str:
    """The manual with its reference as it has to be."""
    return MANUAL.read_text(encoding="utf-8").partition(FIRST)[0] + reference().strip() + "\n"


def main() -> int:
    """Write or check. Returns an exit code."""
    wanted = {SCHEMA: schema_text(), MANUAL: manual_text()}
    if "--check" not in sys.argv[1:]:
        for file, text in wanted.items():
            file.write_text(text, encoding="utf-8")
        return 0
    stale = [file.name for file, text in wanted.items() if file.read_text(encoding="utf-8") != text]
    for name in stale:
        print(f"{name} is not what the declarations in nri_gpu/policy/model.py say: run `make schema`")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
