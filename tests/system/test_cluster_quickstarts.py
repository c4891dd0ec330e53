"""The quick starts for clusters, without one: the shell runs, Helm takes the values, what is applied is valid."""

import sys
from pathlib import Path
from shlex import quote

import pytest

from tests.support import pages
from tests.support.helm import PROGRAMS, Helm

ROOT = pages.FOLDER.parents[1]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("page", ["kubernetes", "dra", "observe"])
def test_what_they_install_and_apply_is_valid(page: str, program: str, tmp_path: Path) -> None:
    helm = Helm(program, tmp_path)
    programs = {
        "kubectl": f'{quote(sys.executable)} -m tests.support.kubectl_check "$@"',
        # What `install` applies, without a cluster to apply it to.
        "helm": '[ "$1" = uninstall ] && exit\n'
        f'cd {quote(str(ROOT))} && [ "$1" = install ] && {helm.path} template --skip-tests '
        f'{helm.kube_version} "${{@:2}}" | kubectl apply -f -',
    }
    shell = pages.shell(tmp_path, programs, {**helm.environment, "PYTHONPATH": str(ROOT)})
    pages.follow(pages.FOLDER / f"{page}.md", shell, compare=False)
