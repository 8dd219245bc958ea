"""DeepSpeed's JSON file and the code beside it."""

import ast
import json

import pytest
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.base.errors import UsageError
from hocket.export import export_plan


def read_back(plan):
    files = export_plan(plan, "deepspeed")
    return json.loads(files["deepspeed.json"]), files


def constants_of(text):
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    }


def test_batches_zero_and_tensor_parallelism_come_back():
    plan = plan_of(
        *divided(LLAMA, "1f1b", 1, microbatches=3, data=2, tensor=2, zero=2, microbatch=5)
    )
    config, files = read_back(plan)
    micro = config["train_micro_batch_size_per_gpu"]
    assert (micro, config["gradient_accumulation_steps"]) == (5, 3)
    assert config["train_batch_size"] == 30 == micro * 3 * plan.config.data
    assert config["zero_optimization"]["stage"] == 2
    assert config["tensor_parallel"]["autotp_size"] == 2
    assert list(files) == ["deepspeed.json"]


def test_a_pipeline_and_recomputation_are_code():
    config, files = read_back(plan_of(*divided(GPT, "1f1b", 4, zero=1, data=2, recompute="full")))
    assert constants_of(files["pipeline.py"]) == {
        "NUM_STAGES": 4, "LAYERS_PER_STAGE": 1, "ACTIVATION_CHECKPOINT_INTERVAL": 1,
    }  # fmt: skip
    assert "tensor_parallel" not in config
    _, files = read_back(plan_of(*divided(GPT, "1f1b", 1, data=2, recompute="full")))
    assert "gradient_checkpointing_enable" in files["recompute.py"]


@pytest.mark.parametrize(
    ("schedule", "pipeline", "fields", "message"),
    [
        ("1f1b", 2, {"tensor": 2}, "Megatron-DeepSpeed"),
        ("zb-h1", 2, {}, "has no schedule 'zb-h1'"),
        ("interleaved", 2, {}, "has no schedule 'interleaved'"),
        ("1f1b", 2, {"data": 2, "zero": 2}, "ZeRO 0 and 1"),
        ("1f1b", 2, {"layers": (1, 2)}, "no list of layers"),
        ("1f1b", 1, {"tensor": 2, "data": 2, "zero": 3}, "ZeRO 0, 1 and 2"),
        ("1f1b", 1, {"tensor": 2, "sequence_parallel": True}, "sequence parallelism"),
        ("1f1b", 1, {"context": 2}, "ring attention"),
        ("1f1b", 1, {"recompute": "selective"}, "inside of attention"),
    ],
)
def test_what_deepspeed_cannot_say_is_refused(schedule, pipeline, fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        export_plan(plan_of(*divided(GPT, schedule, pipeline, **fields)), "deepspeed")
    assert caught.value.hint
