from dataclasses import replace

import numpy as np
from cost.cost_samples import CPU, TESLA, cluster_of, entry_of, profile_of, step_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.memory import as_profiled

SIZES = st.integers(0, 2**27)


def sized_graph(tensor_bytes, workspace_bytes):
    graph = step_graph()
    return replace(
        graph,
        tensor_bytes=np.resize(np.array(tensor_bytes, dtype=np.int64), graph.num_tensors),
        workspace_bytes=np.full(graph.num_ops, workspace_bytes, dtype=np.int64),
    )


@given(st.lists(SIZES, min_size=1, max_size=7), SIZES, SIZES)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_as_profiled_twice_is_as_profiled_once(tensor_bytes, workspace_bytes, measured_bytes):
    graph = sized_graph(tensor_bytes, workspace_bytes)
    profile = profile_of([entry_of("mm big", 1.0, workspace_bytes=measured_bytes)])
    once = as_profiled(graph, cluster_of(CPU, TESLA), profile)
    assert np.all(once.tensor_bytes >= graph.tensor_bytes)
    assert as_profiled(once, cluster_of(CPU, TESLA), profile).content_hash == once.content_hash


def test_as_profiled_counts_workspaces_and_blocks_of_an_accelerator():
    graph = sized_graph([1, 513], 7)
    profile = profile_of([entry_of("mm big", 1.0, workspace_bytes=1000)])
    counted = as_profiled(graph, cluster_of(TESLA), profile)
    assert counted.workspace_bytes.tolist() == [1024, 512, 512, 512, 1024, 512]
    assert set(counted.tensor_bytes.tolist()) == {512, 1024}
    assert counted.op_names == graph.op_names


def test_as_profiled_leaves_the_graph_where_nothing_was_measured():
    graph = sized_graph([1, 513], 7)
    assert as_profiled(graph, cluster_of(TESLA), None) is graph
    elsewhere = profile_of([entry_of("mm big", 1.0, workspace_bytes=9)], kind="volta")
    assert as_profiled(graph, cluster_of(TESLA), elsewhere) is graph
    # Profiles of CPUs hold no workspaces, which must not wipe out those of the graph.
    cpu = profile_of([entry_of("mm big", 1.0)], kind="xeon")
    assert as_profiled(graph, cluster_of(TESLA, CPU), cpu) is graph
