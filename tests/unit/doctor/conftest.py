"""The node is every test's here."""

from tests.unit.doctor.node import node as node
