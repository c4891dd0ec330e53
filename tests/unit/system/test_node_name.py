"""Which name a node has, and that each document which speaks of a node begins with it."""

from __future__ import annotations

import socket

import pytest

from nri_gpu.system.node_name import node_name
from tests.support.schemas import published
from tools.schemas import DOCUMENTS

WITHOUT = {"replay": "an audit log may come from another node", "status-watch": "its `status` has the name"}


@pytest.mark.parametrize(("told", "name"), [("worker-1", "worker-1"), ("", "host.example"), (None, "host.example")])
def test_the_charts_name_or_the_hosts(monkeypatch: pytest.MonkeyPatch, told: str | None, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Host.example")
    monkeypatch.delenv("NODE_NAME")
    if told is not None:
        monkeypatch.setenv("NODE_NAME", told)
    assert node_name() == name


@pytest.mark.parametrize("word", sorted(DOCUMENTS.keys() - WITHOUT))
def test_each_document_of_a_node_names_it(word: str) -> None:
    schema = published(word)
    (document,) = schema["anyOf"]
    definitions = schema["$defs"]
    fields = definitions[document["$ref"].rpartition("/")[2]]
    assert "node" in fields["required"]
    node = definitions[fields["properties"]["node"]["$ref"].rpartition("/")[2]]
    assert "name" in node["required"]
