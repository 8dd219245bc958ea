import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli.terminal import hocket
from cost.cost_samples import cluster_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hocket.base.errors import UsageError  # noqa: E402
from hocket.capture.model import capture_program  # noqa: E402
from hocket.capture.recording import TensorLayout  # noqa: E402
from hocket.capture.zoo import experts, language, recurrent, vision  # noqa: E402
from hocket.cost import dispatch, measure, timing  # noqa: E402
from hocket.cost.families import family_of  # noqa: E402
from hocket.cost.inputs import filled, index_bound, make_arguments  # noqa: E402
from hocket.cost.measure import profile_program  # noqa: E402
from hocket.cost.roofline import estimate_costs  # noqa: E402
from hocket.hardware import DeviceKind  # noqa: E402

HERE = DeviceKind(
    name="here",
    memory_bytes=2**33,
    peak_flops={"float32": 5e10},
    memory_bandwidth_bps=1e10,
    launch_s=2e-6,
    is_cpu=True,
)

MODELS = {
    "gpt2": lambda: language.gpt2(2, 16, n_embd=32, n_layer=2, n_head=2, vocab_size=101,
                                  bos_token_id=1, eos_token_id=1),
    "bert": lambda: language.bert_large(2, 16, hidden_size=32, num_hidden_layers=2,
                                        num_attention_heads=2, intermediate_size=64,
                                        vocab_size=101),
    "resnet": lambda: vision.resnet(50, 1),
    "experts": lambda: experts.moe(2, 16, layers=1, experts=4, width=64, hidden=64, vocabulary=101),
    "lstm": lambda: recurrent.lstm(2, 3),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def captured():
    programs = {}
    for name, build in MODELS.items():
        with torch.device("meta"):
            model, batch = build()
        programs[name] = capture_program(model.train(), batch, name=name)
    return programs


@pytest.mark.parametrize("name", MODELS)
def test_captured_kinds_have_a_family(captured, name):
    graph, _ = captured[name]
    families = [family_of(graph.kind_of(op)) for op in range(graph.num_ops)]
    unknown = sorted({graph.kind_of(op) for op, f in enumerate(families) if f == "other"})
    assert families.count("other") <= 0.02 * graph.num_ops, unknown
    working = (graph.flops > 0) | (graph.bytes_touched > 0)
    views = np.array([family == "view" for family in families])
    assert not np.any(working & views & (graph.flops > 0))


@pytest.mark.parametrize("name", ["gpt2", "bert", "experts"])
def test_profile_times_every_signature_of_a_model(captured, name):
    graph, program = captured[name]
    profile = profile_program(graph, program, HERE)
    assert profile.missing == {}
    working = (graph.flops > 0) | (graph.bytes_touched > 0)
    wanted = {graph.signatures[s] for s in graph.op_signature[working]}
    assert {entry.signature for entry in profile.entries} == wanted
    assert sum(entry.count for entry in profile.entries) == working.sum()
    assert all(0 < entry.seconds < 1 for entry in profile.entries)
    costs = estimate_costs(graph, cluster_of(HERE), profile=profile)
    assert costs.sources().get("profile") == working.sum()


def test_profile_predicts_a_real_step():
    """A model large enough for its kernels to count, measured in the same minute."""
    torch.manual_seed(0)
    model, batch = experts.mlp(64, 1, layers=4, width=512)
    graph, program = capture_program(model, batch)
    profile = profile_program(graph, program, HERE)
    predicted_s = estimate_costs(graph, cluster_of(HERE), profile=profile).op_s.sum()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    samples = []
    for _ in range(15):
        start = time.thread_time()
        optimizer.zero_grad(set_to_none=True)
        model(**batch).backward()
        optimizer.step()
        samples.append(time.thread_time() - start)
    measured_s = statistics.median(samples)
    assert measured_s / 2 < predicted_s < measured_s * 2


def test_profile_notes_what_fails_and_goes_on(captured):
    graph, program = captured["gpt2"]
    broken = graph.kinds.index("aten.addmm")

    def refuse(*args):
        raise RuntimeError("out of paper\nsecond line")

    calls = tuple(
        call._replace(function=refuse) if graph.op_kind[op] == broken else call
        for op, call in enumerate(program.calls)
    )
    # The stand-in prints no overload name, so arguments cannot be bounded: any failure is caught.
    profile = profile_program(graph, replace(program, calls=calls), HERE)
    assert profile.missing
    assert all(text.startswith("aten.addmm") for text in profile.missing)
    assert all(reason for reason in profile.missing.values())
    costs = estimate_costs(graph, cluster_of(HERE), profile=profile)
    assert np.all(costs.op_source[0, graph.op_kind == broken] == 0)
    assert np.all(costs.op_s[0, graph.op_kind == broken] > 0)


def test_profile_without_time_names_what_it_lacks_and_is_not_used(captured):
    graph, program = captured["gpt2"]
    profile = profile_program(graph, program, HERE, budget_s=0.0)
    assert profile.entries == ()
    assert set(profile.missing.values()) == {"not measured: the time budget was used up"}
    with pytest.raises(UsageError, match="no measured times"):
        estimate_costs(graph, cluster_of(HERE), profile=profile)


def test_what_is_measured_of_the_host_takes_nothing_of_the_budget_for_ops(captured, monkeypatch):
    now_s = [0.0]
    host = dispatch.HostOverhead()

    def measured(place):
        now_s[0] += 3600.0
        return host, 0

    def timed(*arguments):
        now_s[0] += 1.0
        return 1.0, 0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(measure, "_host_and_reserved", measured)
    monkeypatch.setattr(measure, "_measure", timed)
    graph, program = captured["gpt2"]
    first = profile_program(graph, program, HERE, budget_s=3.0)
    assert len(first.entries) == 3
    second = profile_program(graph, program, HERE, budget_s=3.0, known=first)
    assert len(second.entries) == 6


def test_a_profile_without_times_is_not_sent_on_to_calibrate(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_host_and_reserved", lambda place: (dispatch.HostOverhead(), 0))
    monkeypatch.setattr(measure, "_measure_all", lambda *given: ([], {"x": measure.OUT_OF_TIME}))
    model = Path(__file__).parents[2] / "examples" / "mymodel.py"
    said = hocket("profile", f"{model}:build", "-o", "p.json", cwd=tmp_path)
    assert "calibrate" not in said.stdout
    assert "run the command again to go on" in said.stderr


def test_a_profile_goes_on_from_what_is_known_of_this_machine_and_no_other(captured):
    graph, program = captured["gpt2"]
    whole = profile_program(graph, program, HERE)
    part = replace(whole, entries=tuple(replace(e, seconds=7.0) for e in whole.entries[::2]))
    kept = {entry.signature for entry in part.entries}
    timed = []
    again = profile_program(graph, program, HERE, known=part, on_op=lambda *at: timed.append(at))
    assert {e.signature for e in again.entries if e.seconds == 7.0} == kept
    assert len(timed) == len(whole.entries) - len(kept)
    assert {total for _, total in timed} == {len(whole.entries)}
    other = replace(part, versions={"torch": "1.0"})
    fresh = profile_program(graph, program, HERE, known=other)
    assert not any(entry.seconds == 7.0 for entry in fresh.entries)


def test_an_op_without_room_is_named_with_what_it_needs(captured, monkeypatch):
    graph, program = captured["gpt2"]
    monkeypatch.setattr(measure, "available_bytes", lambda: 20_000)
    profile = profile_program(graph, program, HERE)
    assert profile.entries
    large = [text for text in profile.missing.values() if text.startswith(measure.OUT_OF_MEMORY)]
    assert large
    assert all("needs" in text and "19.5 KiB are free" in text for text in large)


def test_a_slow_op_is_timed_once_and_leaves_time_for_the_rest(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing, "host_clock", lambda: lambda: clock[0])
    calls = []

    def slow():
        calls.append(None)
        clock[0] += 5.0

    assert timing.call_s([slow], torch.device("cpu"), limit_s=8.0) == 5.0
    assert len(calls) == 1


@pytest.mark.parametrize("device", ["cuda", "meta", "abacus"])
def test_profile_refuses_devices_that_it_cannot_use(captured, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UsageError, match=f"'{device}'") as caught:
        profile_program(*captured["gpt2"], HERE, device=device)
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("shape", "stride", "dtype"),
    [
        ((2, 3), (3, 1), torch.float32),
        ((2, 3), (1, 2), torch.bfloat16),
        ((4, 5), (0, 1), torch.float32),
        ((4, 5), (1, 0), torch.bool),
        ((), (), torch.int64),
        ((0, 3), (3, 1), torch.float32),
        ((2, 2), (10, 3), torch.int32),
    ],
)
def test_filled_tensor_has_the_layout_and_stays_below_the_bound(shape, stride, dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = filled(TensorLayout(shape, stride, 0, dtype), torch.device("cpu"), 7, generator)
    assert tuple(tensor.shape) == shape
    assert tensor.stride() == stride
    assert tensor.dtype == dtype
    if not dtype.is_floating_point and tensor.numel():
        assert 0 <= int(tensor.max()) < 7


def test_arguments_keep_indices_inside_and_one_tensor_one_object(captured):
    graph, program = captured["gpt2"]
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for op, call in enumerate(program.calls):
        kind = graph.kind_of(op)
        if kind not in ("aten.embedding", "aten.embedding_dense_backward", "aten.nll_loss_forward"):
            continue
        seen.add(kind)
        assert index_bound(call, program) in (101, 1024)
        args, kwargs = make_arguments(call, program, torch.device("cpu"), generator)
        call.function(*args, **kwargs)
    assert len(seen) == 3


def test_arguments_of_a_backward_op_come_from_its_forward_op(captured):
    """Norm statistics and attention results fit the inputs that they belong to."""
    graph, program = captured["experts"]
    generator = torch.Generator().manual_seed(0)
    kinds = [graph.kind_of(op) for op in range(graph.num_ops)]
    norm = program.calls[kinds.index("aten.native_layer_norm_backward")]
    args, _ = make_arguments(norm, program, torch.device("cpu"), generator)
    torch.testing.assert_close(args[3].flatten(), args[1].mean(-1).flatten())
    attention = next(k for k in kinds if "attention" in k and k.endswith("backward"))
    args, _ = make_arguments(
        program.calls[kinds.index(attention)], program, torch.device("cpu"), generator
    )
    expected = torch.nn.functional.scaled_dot_product_attention(*args[1:4], is_causal=True)
    torch.testing.assert_close(args[4], expected)
