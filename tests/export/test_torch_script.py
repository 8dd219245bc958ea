"""The exported script stands alone, and trains as one device does; and the command."""

import ast
import json
from collections import Counter
from dataclasses import replace

import forked
import pytest
import torch
from export import lone_script
from runtime.parallel_plans import GPT, LLAMA, circular_plan, divided, plan_of

from hocket.base.errors import CheckError, UsageError
from hocket.cli.export import command
from hocket.export import TARGETS, export_plan
from hocket.plan.files import write_plan
from hocket.runtime.transformer_model import built_in_model, token_batch


def test_the_script_runs_by_itself_and_trains_as_one_device(tmp_path):
    model, config, schedule = divided(GPT, "zb-v", 2, layers=(1, 2, 1, 1), recompute="full")
    for name, text in export_plan(plan_of(model, config, schedule), "torch").items():
        (tmp_path / name).write_text(text)
    arguments = ["--steps=2", "--seed=4", "--dtype=float64"]
    printed = "".join(
        forked.answers(2, lone_script.run_without_us, str(tmp_path / "train.py"), arguments)
    )
    losses = [float(line.split()[3]) for line in printed.splitlines() if "loss" in line]
    assert losses == pytest.approx(plain_losses(model, config.global_batch, seed=4), abs=1e-6)


def plain_losses(shape, num_samples, seed, steps=2):
    """Losses of the built-in model in plain PyTorch."""
    module = built_in_model(shape, seed=seed, dtype=torch.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = module(*token_batch(shape, range(num_samples), seed=seed, step=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_script_needs_nothing_of_ours_and_names_nothing_twice():
    name = '"""\nimport subprocess'
    model, config, schedule = divided(replace(LLAMA, name=name), "1f1b", 2)
    tree = ast.parse(export_plan(plan_of(model, config, schedule), "torch")["train.py"])
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    whole = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
    assert not any(found.startswith(("hocket", "numpy")) for found in modules | whole)
    assert "subprocess" not in whole
    defined = Counter(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    defined += Counter(
        target.id
        for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    )  # fmt: skip
    assert [found for found, times in defined.items() if times > 1] == []
    assert {"Trainer", "TrainingJob", "train", "ParallelConfig", "Transformer"} <= defined.keys()


def test_what_pytorch_gets_wrong_is_not_written():
    with pytest.raises(UsageError, match="loses gradients"):
        export_plan(plan_of(*divided(GPT, "zb-v", 2, data=2, zero=3)), "torch")
    with pytest.raises(UsageError, match="unknown export target 'jax'"):
        export_plan(plan_of(*divided(GPT, "1f1b", 2)), "jax")


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
@pytest.mark.parametrize("dtype", ["float16", "float8"])
def test_arithmetic_that_needs_scaling_is_refused_not_replaced(target, dtype):
    plan = plan_of(*divided(LLAMA, "1f1b", 2), dtype=dtype)
    with pytest.raises(UsageError, match=f"not for {dtype}") as caught:
        export_plan(plan, target)
    assert "--dtype bfloat16" in caught.value.hint


def test_the_script_computes_as_planned():
    plan = plan_of(*divided(LLAMA, "1f1b", 2), dtype="float32")
    assert "dtype='float32'," in export_plan(plan, "torch")["train.py"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_schedule_that_waits_for_itself_is_not_written(target):
    with pytest.raises(CheckError, match="can never start"):
        export_plan(circular_plan(), target)


def test_the_command_writes_files_or_prints_them(tmp_path, capsys):
    path = tmp_path / "plan.json"
    made = plan_of(*divided(GPT, "1f1b", 2))
    write_plan(path, made.problem, made.plan)
    folder = tmp_path / "new" / "out"
    command.main([str(path), "--to", "torch", "-o", str(folder)], standalone_mode=False)
    assert sorted(p.name for p in folder.iterdir()) == ["schedule.csv", "train.py"]
    assert str(folder / "train.py") in capsys.readouterr().out
    command.main([str(path), "--to", "megatron", "--json"], standalone_mode=False)
    result = json.loads(capsys.readouterr().out)
    assert result["target"] == "megatron"
    assert "--tensor-model-parallel-size 1" in result["files"]["megatron.sh"]
    command.main([str(path), "--to", "deepspeed"], standalone_mode=False)
    assert '"train_batch_size": 4' in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        command.main(
            [str(path), "--to", "torch", "-o", str(tmp_path / "file" / "x")], standalone_mode=False
        )
