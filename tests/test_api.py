"""The public face in Python."""

import json

import pytest

import hocket
from hocket.base.units import format_seconds
from hocket.graph.generators import generate

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model():
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1), torch.nn.Flatten(0)
    )


def test_capture_is_a_function_of_the_package_and_a_room(model):
    from hocket.capture import ZOO

    graph = hocket.capture(model, torch.randn(4, 16))
    assert graph.bytes_by_role()["parameter"] == 4 * (16 * 32 + 32 + 32 + 1)
    assert "gpt2" in ZOO


def test_auto_plans_a_model_and_shows_it(model, tmp_path):
    planned = hocket.auto(model, torch.randn(4, 16), on="2xv100-16g")
    assert planned.step_s > 0
    assert list(planned.peak_bytes) == ["gpu0", "gpu1"]
    chosen, why, *_ = planned.explain().split("; ")
    winner = planned.comparison.winner
    assert chosen.startswith(f"{winner.planner}: {format_seconds(planned.step_s)} per step on ")
    assert chosen.endswith(" of 2xv100-16g")
    assert why.startswith("chosen because")
    assert "gpu0" in planned._repr_html_()
    planned.save(
        tmp_path / "plan.json", report=tmp_path / "report.html", trace=tmp_path / "trace.json"
    )
    saved = hocket.read_plan(tmp_path / "plan.json")
    hocket.verify(saved.plan, saved.problem)
    assert saved.predicted_step_s == planned.step_s
    assert "<html" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_planned_step_can_be_run(tmp_path, monkeypatch):
    from hocket.runtime.run_options import RunOptions

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net():\n"
        "    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)\n"
        "    return torch.nn.Sequential(*layers, torch.nn.Flatten(0)), torch.ones(4, 16)\n"
    )
    from hocket.capture import load_model

    graph = hocket.capture(*load_model("mine.py:net"), name="mine.py:net", device="cpu")
    planned = hocket.plan_graph(graph, "2xv100-16g", planners=["m-topo"])
    assert len(planned.run().losses) == 1
    result = planned.run(RunOptions(steps=3, backend="single"))
    assert len(result.losses) == 3
    assert result.predicted.makespan_s == planned.step_s


def test_auto_on_this_machine_uses_what_is_detected(model):
    planned = hocket.auto(model, torch.randn(4, 16))
    assert planned.problem.cluster.name == "this-machine"


def test_plan_graph_takes_a_cluster_value_or_its_name():
    graph = generate("chain", 20, 0)
    cluster = hocket.cluster_from_text("2xt4")
    by_value = hocket.plan_graph(graph, cluster, planners=["m-topo"])
    by_name = hocket.plan_graph(graph, "2xt4", planners="m-topo")
    assert by_value.step_s == by_name.step_s


def test_plan_graph_raises_where_nothing_fits():
    graph = generate("transformer", 20_000, 0)
    with pytest.raises(hocket.HocketError) as caught:
        hocket.plan_graph(graph, "1xt4")
    assert caught.value.exit_code == 4
    assert "more memory is needed" in str(caught.value)


def test_wrong_transfer_mode_is_refused_with_a_suggestion():
    with pytest.raises(hocket.HocketError) as caught:
        hocket.plan_graph(generate("chain", 5, 0), "2xt4", transfers="shard")
    assert "did you mean 'shared'?" in str(caught.value)


def test_clusters_and_plans_are_named_by_text_or_path(tmp_path):
    text = "name = 'one'\n[[devices]]\nkind = 't4'\n[[devices]]\nkind = 't4'\nname = 'b'\n"
    (tmp_path / "c.toml").write_text(text)
    graph_file = tmp_path / "g.json"
    hocket.write_graph(generate("chain", 9, 0), graph_file)
    planned = hocket.plan_graph(hocket.read_graph(graph_file), tmp_path / "c.toml")
    planned.save(str(tmp_path / "p.json"), graph_file=str(graph_file))
    assert hocket.read_plan(str(tmp_path / "p.json")).predicted_step_s == planned.step_s


def test_a_transformer_is_divided_by_name_or_shape():
    plan = hocket.plan_parallel("gpt-1.7b", "1xdgx-a100-80g", 64)
    assert plan.config.num_devices == 8
    assert hocket.plan_parallel(plan.model, plan.cluster, 64).config == plan.config


def test_a_transformer_that_fits_nowhere_is_refused():
    with pytest.raises(hocket.HocketError) as caught:
        hocket.plan_parallel("gpt-1t", "1xdgx-a100-80g", 8)
    assert caught.value.exit_code == 4
