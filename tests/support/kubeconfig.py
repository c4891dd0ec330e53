"""A kubeconfig of one cluster and one user."""

from collections.abc import Mapping


def kubeconfig(cluster: Mapping[str, object], user: Mapping[str, object]) -> dict[str, object]:
    """The document, to be written as JSON. It names `here` as its current context, which has a namespace, too."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "x"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
