"""A program's passes run on numbers made up, and what becomes of a step that is not captured."""

from dataclasses import replace

import numpy as np
import pytest
from cost.cost_samples import TESLA, cluster_of, entry_of, graph_of, profile_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hocket.capture.model import capture_program  # noqa: E402
from hocket.capture.zoo import experts, language, recurrent, vision  # noqa: E402
from hocket.cost import measure, replay  # noqa: E402
from hocket.cost.demand import BESIDE, FILL, ON_DEVICE, TIMES_BESIDE, demand_of  # noqa: E402
from hocket.cost.profile import profile_from_dict, profile_to_dict  # noqa: E402
from hocket.cost.replay import ReplayedPasses  # noqa: E402
from hocket.cost.replayed_kernels import ChipLimits, InPlace  # noqa: E402
from hocket.cost.roofline import estimate_costs  # noqa: E402
from hocket.graph import Phase  # noqa: E402
from hocket.runtime.offload.memory_tracker import MemoryTracker  # noqa: E402

MODELS = {
    "gpt2": lambda: language.gpt2(2, 16, n_embd=32, n_layer=2, n_head=2, vocab_size=101,
                                  bos_token_id=1, eos_token_id=1),
    "resnet": lambda: vision.resnet(50, 1),
    "experts": lambda: experts.moe(2, 16, layers=1, experts=4, width=64, hidden=64, vocabulary=101),
    "lstm": lambda: recurrent.lstm(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_a_program_run_on_numbers_made_up(name):
    with torch.device("meta"):
        model, batch = MODELS[name]()
    _, program = capture_program(model.train(), batch, name=name)
    passes, counted = ReplayedPasses(program, torch.device("cpu")), []
    for _ in range(2):
        passes.run(lambda: counted.append(1))
    assert len(counted) == 2 * sum(call.phase != Phase.OPTIMIZER for call in program.calls)


def test_passes_hold_what_a_step_holds():
    """What nobody reads any more goes: a profile of a model that just fits has no room for more."""

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(1))

        def forward(self, rows):
            for _ in range(20):
                rows = rows + self.shift
            return rows.mean()

    rows = torch.zeros(64, 1024)
    _, program = capture_program(Shifted(), rows, optimizer=None, device="cpu")
    passes, tracker = ReplayedPasses(program, torch.device("cpu")), MemoryTracker()
    with tracker:
        passes.run()
    assert 2 * rows.nbytes <= tracker.peak_bytes <= 4 * rows.nbytes


class Chosen(torch.nn.Module):
    """Rows of a table that another table of numbers names, as BERT's kinds of words."""

    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(2, 4)
        self.register_buffer("kind_of", torch.zeros(1, 512, dtype=torch.long))

    def forward(self, places):
        chosen = torch.gather(self.kind_of.expand(len(places), -1), 1, places)
        return self.kinds(chosen).sum()


def test_numbers_made_up_are_rows_of_every_table_that_they_lead_to():
    places = torch.zeros(3, 7, dtype=torch.long)
    _, program = capture_program(Chosen(), places, optimizer=None, device="cpu")
    counted = []
    ReplayedPasses(program, torch.device("cpu")).run(lambda: counted.append(1))
    assert len(counted) == len(program.calls)


def test_a_step_that_cannot_be_captured_keeps_its_times_and_says_why(monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measure, "replayed_in_place", refuse)
    entries, missing = [entry_of("a", 1e-3)], {}
    graph = graph_of([{"kind": "aten.mm", "signature": "a"}])
    assert measure._with_replayed(entries, missing, graph, None, torch.device("cpu")) == entries
    assert missing == {measure.REPLAYED_STEP: "RuntimeError: operation not permitted when stream "
                       "is capturing"}  # fmt: skip


class Stream:
    """Notes what waits for what."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Row:
    """A graph on a stream of its own."""

    def __init__(self, name, log):
        self.stream, self.log = Stream(name, log), log

    def replay(self):
        self.log.append(self.stream.name)


def test_rows_begin_and_end_together_and_wait_for_nothing_between(monkeypatch):
    log, took_s = [], iter([8.0, 20.0, 4.0, 12.0, 400.0])
    here = Stream("here", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(replay, "launched_ahead_s", lambda ask, sleep_s: (ask(), next(took_s))[1])
    # The least of the times that rows of four replays take.
    assert replay.rows_s([Row("tick", log), Row("tock", log)], torch.device("cpu")) == 1.0
    one = ["tick waits for here", "tock waits for here", *["tick", "tock"] * 4,
           "here waits for tick", "here waits for tock"]  # fmt: skip
    assert log == one * 5


@pytest.mark.parametrize(("two_s", "beside"), [(1.5, 1.5), (0.9, 1.0), (None, None)])
def test_a_second_step_beside_the_first_says_how_long_ops_of_two_lanes_take(
    monkeypatch, two_s, beside
):
    """On a CPU, with stand-ins for what only CUDA has: a capture, its times, its trace."""
    with torch.device("meta"):
        model, batch = MODELS["gpt2"]()
    graph, program = capture_program(model.train(), batch)
    made = []

    class Captured:
        graph = None

        def __init__(self, passes, device):
            if made and two_s is None:
                raise RuntimeError("CUDA out of memory")
            self.nodes = []
            passes.run(lambda: self.nodes.append(1))
            made.append(self)

    def trace(graph):
        kernels = range(5 * len(made[0].nodes))
        return {"traceEvents": [{"ph": "X", "cat": "kernel", "ts": at, "dur": 0.5}
                                for at in kernels]}  # fmt: skip

    monkeypatch.setattr(replay, "CapturedPasses", Captured)
    monkeypatch.setattr(replay, "rows_s", lambda rows, device: (1.0, two_s)[len(rows) - 1])
    monkeypatch.setattr(replay, "_trace", trace)
    monkeypatch.setattr(replay, "_chip_limits", lambda device: ChipLimits(132, 2048, 65536, 233472))
    found, alone = replay.replayed_in_place(graph, program, torch.device("cpu"))
    assert ("CUDA out of memory" in alone) == (two_s is None)
    passes = graph.op_phase != Phase.OPTIMIZER
    assert {graph.signatures[at] for at in graph.op_signature[passes] if at >= 0} <= {*found}
    assert {each.beside for each in found.values()} == {beside}


def test_where_no_second_step_has_room_a_profile_says_so(monkeypatch):
    told = replay.ReplayedCalls({"a": InPlace(21e-6, 2, 0.125)}, alone="CUDA out of memory")
    monkeypatch.setattr(measure, "replayed_in_place", lambda *_: told)
    missing = {}
    (entry,) = measure._with_replayed(
        [entry_of("a", 1e-3)], missing, graph_of([{"kind": "aten.mm", "signature": "a"}]), None,
        torch.device("cpu"),
    )  # fmt: skip
    assert entry.replayed == InPlace(21e-6, 2, 0.125)
    assert missing == {measure.TWO_STEPS: "CUDA out of memory"}


def test_passes_are_given_what_they_read_and_no_states_of_the_update():
    with torch.device("meta"):
        model, batch = MODELS["gpt2"]()
    _, program = capture_program(model.train(), batch, optimizer="adamw")
    given = ReplayedPasses(program, torch.device("cpu"))._given
    assert {*program.parameters.values()} <= {*given}
    assert {program.tensors[t].role for t in program.names} > {
        program.tensors[t].role for t in given
    }


def test_times_in_their_place_price_replayed_steps_and_no_others():
    graph = graph_of(
        [
            {"kind": "aten.mm", "flops": 1e9, "bytes_touched": 10**6, "signature": "mm"},
            {"kind": "aten.add", "flops": 1e6, "bytes_touched": 10**6, "signature": "add"},
        ]
    )
    cluster = cluster_of(TESLA)
    plain = profile_of([entry_of("add", 30e-6), entry_of("mm", 200e-6)])
    entries = (replace(plain.entries[0], replayed=InPlace(21e-6, 2, 0.125)), plain.entries[1])
    both = replace(plain, entries=entries)
    for launches, is_same in (("eager", True), ("replayed", False)):
        known, told = (
            estimate_costs(graph, cluster, profile=each, launches=launches)
            for each in (plain, both)
        )
        assert np.array_equal(known.op_s, told.op_s) == is_same
        assert known.op_s[0, 0] == told.op_s[0, 0]
    assert told.op_s[0, 1] == 21e-6
    shares = demand_of(graph, cluster, told)
    assert shares[FILL, 0, 1] == 0.125
    assert shares[ON_DEVICE, 0, 1] == 1.0
    assert shares[BESIDE, 0].tolist() == [TIMES_BESIDE, TIMES_BESIDE]
    # What two rows of the step took counts instead of what each op fills.
    entries = (replace(plain.entries[0], replayed=InPlace(21e-6, 2, 0.125, 1.7)), plain.entries[1])
    rows = replace(plain, entries=entries)
    told = estimate_costs(graph, cluster, profile=rows, launches="replayed")
    shares = demand_of(graph, cluster, told)
    assert (shares[FILL, 0, 1], shares[BESIDE, 0, 1]) == (0.0, 1.7)
    assert profile_from_dict(profile_to_dict(rows), "file").entries == rows.entries
    # A file holds it, and one without it is what it was.
    assert profile_from_dict(profile_to_dict(both), "file").entries == both.entries
    assert all("replayed" not in entry for entry in profile_to_dict(plain)["entries"])
