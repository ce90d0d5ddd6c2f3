"""Resources of a trial against those of a Ray cluster: what is needed, what is missing, in which words."""

from __future__ import annotations

from realsys.config.schema_cluster import ClusterConfig, RayConfig
from realsys.launch.launchers.ray_launcher import RayNode, agent_name, bundle_of, shortage

GPU_NODE = {"CPU": 96.0, "GPU": 8.0, "memory": 512.0 * 2**30, "node:10.0.0.1": 1.0}


def nodes(*totals: dict[str, float]) -> list[RayNode]:
    return [RayNode(f"{index}f", f"host{index}", total) for index, total in enumerate(totals)]


def test_bundle_names_everything_that_a_node_needs() -> None:
    ray = RayConfig(resources={"h100": 1.0})
    cluster = ClusterConfig(nodes=2, gpus_per_node=8, cpus_per_node=64, memory_gb_per_node=256.0, ray=ray)
    assert bundle_of(cluster) == {"CPU": 64.0, "GPU": 8.0, "memory": 256 * 2**30, "h100": 1.0}


def test_bundle_without_sizes_is_one_core() -> None:
    assert bundle_of(ClusterConfig(nodes=2)) == {"CPU": 1.0}


def test_cluster_with_enough_nodes_lacks_nothing() -> None:
    assert shortage({"CPU": 64.0, "GPU": 8.0}, 2, nodes(GPU_NODE, {"CPU": 4.0}, GPU_NODE)) == ""


def test_shortage_has_numbers_of_short_nodes() -> None:
    cluster = nodes(GPU_NODE, {"CPU": 96.0, "GPU": 4.0, "memory": 2.0**30}, {"CPU": 4.0})
    assert shortage({"CPU": 64.0, "GPU": 8.0, "memory": 64 * 2**30}, 2, cluster) == (
        "2 nodes with CPU 64, GPU 8, memory 64 GiB each are needed, 1 of 3 have that "
        "(host1 has CPU 96, GPU 4, memory 1 GiB; host2 has CPU 4, GPU 0, memory 0 GiB)"
    )


def test_shortage_of_large_cluster_names_few() -> None:
    text = shortage({"GPU": 8.0}, 65, nodes(*[{"CPU": 1.0}] * 64))
    assert text.startswith("65 nodes with GPU 8 each are needed, 0 of 64 have that (host0 has GPU 0;")
    assert text.endswith("host3 has GPU 0; 60 more)")


def test_used_resources_count_only_when_asked() -> None:
    busy = [RayNode("0f", "host0", GPU_NODE, {"CPU": 96.0})]
    assert shortage({"GPU": 8.0}, 1, busy) == ""
    text = shortage({"GPU": 8.0}, 1, busy, free=True)
    assert text == "1 node with GPU 8 is needed, 0 of 1 have that free (host0 has GPU 0)"


def test_agents_on_one_host_get_different_names() -> None:
    assert agent_name("a", "0123456789", ["a", "b"]) == "a"
    assert agent_name("a", "0123456789", ["a", "b", "a"]) == "a-012345"
