"""What a page applies, checked by Kubernetes' own schemas where there is no cluster: `python -m ... VERB WORD...`.

`apply -f FILE` checks the file's documents, `-` for standard input; the other verbs that pages use do nothing.
"""

import sys
from pathlib import Path
from typing import Final

import kubernetes_validate
import yaml

VERSION: Final = kubernetes_validate.latest_version()
SILENT: Final = {"label", "rollout", "get", "wait", "exec", "run", "delete", "describe"}


def main(words: list[str]) -> int:
    """Returns an exit code."""
    match [word for word in words if not word.startswith("--namespace") and word != "nri-gpu"]:
        case ["apply", "-f", name]:
            text = sys.stdin.read() if name == "-" else Path(name).read_text()
            for document in yaml.safe_load_all(text):
                for each in document["items"] if document["kind"] == "List" else [document]:
                    kubernetes_validate.validate(each, VERSION, strict=True)
                    print(f"{each['kind']}/{each['metadata']['name']} created")
            return 0
        case ["get", *rest] if "name" in rest:
            print("resource/stand-in")
            return 0
        case [verb, *_] if verb in SILENT:
            return 0
        case _:
            print(f"what would kubectl do with {' '.join(words)}?", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
