"""torchtitan's configuration, read back without torchtitan: the function is run on a stand-in."""

import ast
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from planners.torch_csv_reader import from_torch_csv
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.base.errors import UsageError
from hocket.export import export_plan

FIELDS = [
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "enable_sequence_parallel",
    "pipeline_parallel_degree",
    "module_fqns_per_model_part",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size",
    "context_parallel_degree",
    "expert_parallel_degree",
]


class Fields:
    """Takes only fields that torchtitan has."""

    def __init__(self, *names):
        object.__setattr__(self, "names", set(names))

    def __setattr__(self, name, value):
        assert name in self.names, name
        object.__setattr__(self, name, value)


def new_config():
    return SimpleNamespace(
        parallelism=Fields(*FIELDS),
        training=Fields(
            "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param"
        ),
        activation_checkpoint=Fields("mode"),
    )


def read_back(plan, monkeypatch):
    """The configuration that the exported module makes, and the files."""
    files = export_plan(plan, "torchtitan")
    text = files["hocket_plan.py"]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = ModuleType(node.module)
            for name in node.names:
                setattr(module, name.name, SimpleNamespace(Config=None))
            if node.module.endswith("config_registry"):
                setattr(module, node.names[0].name, new_config)
            parts = node.module.split(".")
            for end in range(1, len(parts)):
                parent = ".".join(parts[:end])
                monkeypatch.setitem(__import__("sys").modules, parent, ModuleType(parent))
            monkeypatch.setitem(__import__("sys").modules, node.module, module)
    space = {}
    exec(compile(tree, "hocket_plan.py", "exec"), space)
    return (space["planned"]() if "planned" in space else space["parallelize"](new_config())), files


def test_a_pipeline_comes_back_to_the_last_action(monkeypatch):
    plan = plan_of(
        *divided(replace(LLAMA, name="llama3-8b"), "interleaved", 2, microbatches=4, data=2, zero=2,
                 tensor=2, sequence_parallel=True, recompute="full", microbatch=2,
                 layers=(1, 2, 2, 1)),
        on="dgx-a100-80g",
    )  # fmt: skip
    config, files = read_back(plan, monkeypatch)
    found = config.parallelism
    assert (found.data_parallel_replicate_degree, found.data_parallel_shard_degree) == (1, 2)
    assert (found.tensor_parallel_degree, found.pipeline_parallel_degree) == (2, 2)
    assert found.fsdp_reshard_after_forward == "never"
    assert found.enable_sequence_parallel
    assert found.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "layers.4"],
        ["layers.5", "norm", "output"],
    ]  # fmt: skip
    assert found.pipeline_parallel_schedule == "PipelineScheduleMulti"
    assert found.pipeline_parallel_microbatch_size == 2
    assert (config.training.local_batch_size, config.training.global_batch_size) == (8, 16)
    assert config.training.seq_len == plan.model.sequence
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.activation_checkpoint.mode == "full"
    schedule = from_torch_csv(files[found.pipeline_parallel_schedule_csv])
    assert schedule.work.tolist() == plan.schedule.work.tolist()
    assert schedule.stage.tolist() == plan.schedule.stage.tolist()
    assert schedule.microbatch.tolist() == plan.schedule.microbatch.tolist()
    assert "torchrun --nproc-per-node=8 --standalone -m torchtitan.train" in files["hocket_plan.py"]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("zb-h1", "PipelineScheduleSingle"), ("zb-v", "ZBVZeroBubble")],
)
def test_the_name_of_a_schedule_says_how_stages_lie(schedule, name, monkeypatch):
    config, _ = read_back(plan_of(*divided(LLAMA, schedule, 4)), monkeypatch)
    assert config.parallelism.pipeline_parallel_schedule == name


def test_without_a_pipeline_batches_are_accumulated(monkeypatch):
    plan = plan_of(*divided(GPT, "1f1b", 1, data=4, zero=3, recompute="selective"))
    config, files = read_back(plan, monkeypatch)
    assert (config.training.local_batch_size, config.training.global_batch_size) == (1, 16)
    assert config.parallelism.fsdp_reshard_after_forward == "always"
    assert config.activation_checkpoint.mode == "none"
    assert list(files) == ["hocket_plan.py"]
    assert "call parallelize() on the configuration of your own" in files["hocket_plan.py"]


def in_groups(shard_ranks, **fields):
    """A plan whose program shards state inside groups of replicas."""
    plan = plan_of(*divided(LLAMA, "1f1b", 1, **fields))
    training = plan.problem.training
    work = replace(training, software=replace(training.software, shard_ranks=shard_ranks))
    return replace(plan, problem=replace(plan.problem, work=work))


def test_groups_of_replicas_divide_the_weights_among_them(monkeypatch):
    plan = in_groups(2, data=8, zero=3)
    found = read_back(plan, monkeypatch)[0].parallelism
    assert (found.data_parallel_replicate_degree, found.data_parallel_shard_degree) == (4, 2)
    for target in ("megatron", "deepspeed", "torch"):
        with pytest.raises(UsageError, match="inside groups of replicas"):
            export_plan(plan, target)
    with pytest.raises(UsageError, match="8 replicas into groups of 3"):
        export_plan(in_groups(3, data=8, zero=3), "torchtitan")
    whole = read_back(in_groups(16, data=8, zero=3), monkeypatch)[0].parallelism
    assert (whole.data_parallel_replicate_degree, whole.data_parallel_shard_degree) == (1, 8)


@pytest.mark.parametrize(
    ("model", "schedule", "fields", "message"),
    [
        (LLAMA, "1f1b", {"data": 2}, "replicates weights"),
        (LLAMA, "1f1b", {"context": 2}, "replicates weights"),
        (LLAMA, "zb-v", {"data": 2, "zero": 3}, "loses gradients"),
        (GPT, "1f1b", {}, "tie embeddings"),
    ],
)
def test_what_torchtitan_cannot_say_is_refused(model, schedule, fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        export_plan(plan_of(*divided(model, schedule, 2, **fields)), "torchtitan")
    assert caught.value.hint


def test_names_cannot_leave_the_text():
    model, parallel_config, schedule = divided(LLAMA, "1f1b", 2)
    plan = plan_of(replace(model, name='"""\nimport os  # \\'), parallel_config, schedule)
    tree = ast.parse(export_plan(plan, "torchtitan")["hocket_plan.py"])
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
