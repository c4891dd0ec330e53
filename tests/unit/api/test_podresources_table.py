"""Holds api/podresources.proto against a table of wire facts that was not made from it."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from nri_gpu._pb import podresources_pb2

# kubernetes/kubelet pkg/apis/podresources/v1/api.proto, as of 1.37: message -> number, name, type.
TABLE = {
    "ListPodResourcesRequest": [],
    "ListPodResourcesResponse": [(1, "pod_resources", "rep PodResources")],
    "GetPodResourcesRequest": [(1, "pod_name", "string"), (2, "pod_namespace", "string")],
    "GetPodResourcesResponse": [(1, "pod_resources", "PodResources")],
    "AllocatableResourcesRequest": [],
    "AllocatableResourcesResponse": [
        (1, "devices", "rep ContainerDevices"),
        (2, "cpu_ids", "rep int64"),
        (3, "memory", "rep ContainerMemory"),
    ],
    "PodResources": [
        (1, "name", "string"),
        (2, "namespace", "string"),
        (3, "containers", "rep ContainerResources"),
        (4, "cpu_ids", "rep int64"),
        (5, "memory", "rep ContainerMemory"),
    ],
    "ContainerResources": [
        (1, "name", "string"),
        (2, "devices", "rep ContainerDevices"),
        (3, "cpu_ids", "rep int64"),
        (4, "memory", "rep ContainerMemory"),
        (5, "dynamic_resources", "rep DynamicResource"),
    ],
    "ContainerDevices": [
        (1, "resource_name", "string"),
        (2, "device_ids", "rep string"),
        (3, "topology", "TopologyInfo"),
    ],
    "ContainerMemory": [(1, "memory_type", "string"), (2, "size", "uint64"), (3, "topology", "TopologyInfo")],
    "TopologyInfo": [(1, "nodes", "rep NUMANode")],
    "NUMANode": [(1, "ID", "int64")],
    "DynamicResource": [
        (2, "claim_name", "string"),
        (3, "claim_namespace", "string"),
        (4, "claim_resources", "rep ClaimResource"),
    ],
    "ClaimResource": [
        (1, "cdi_devices", "rep CDIDevice"),
        (2, "driver_name", "string"),
        (3, "pool_name", "string"),
        (4, "device_name", "string"),
        (5, "share_id", "string"),
    ],
    "CDIDevice": [(1, "name", "string")],
}
SCALARS = {3: "int64", 4: "uint64", 9: "string"}


def shown(field: FieldDescriptor) -> str:
    base = field.message_type.name if field.message_type else SCALARS[field.type]
    return f"rep {base}" if field.is_repeated else base


def test_every_field_has_the_number_and_type_of_the_table() -> None:
    found = {
        message.name: [(field.number, field.name, shown(field)) for field in message.fields]
        for message in podresources_pb2.DESCRIPTOR.message_types_by_name.values()
    }
    assert found == TABLE
