"""A GPT-2 that trains on made data: a job of the fleet, or a script that knows SIGTERM only.

    python benchmarks/fleet/gpu_train.py --folder FOLDER --device cpu --steps 20
    python benchmarks/fleet/gpu_train.py --folder FOLDER --device cpu --steps 20 --plain [--resume]

Started by ``gpu.py``. Data and dropout are functions of the step, so two runs have the same
losses however often one of them was stopped. What happened when is appended to ``tracker`` in
FOLDER; ``HOCKET_ATTEMPT`` is read for that alone. A lock shows whether two ever ran at once.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"batch": 16, "sequence": 1024, "dtype": "bfloat16", "sizes": {}},
    "cpu": {
        "batch": 2, "sequence": 64, "dtype": "float32",
        "sizes": {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 4096,
                  "bos_token_id": 0, "eos_token_id": 0},
    },
}  # fmt: skip
KEPT_CHECKPOINTS = 3
SETTLED_STEPS = 3
"""After so many steps everything has been allocated."""


class MemoryTracker:
    """One line per thing that happened, written at once: a kill must not take it along."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / "tracker", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._who = {"job": name, "attempt": int(os.environ.get("HOCKET_ATTEMPT", "0"))}

    def note(self, what: str, **facts: Any) -> None:
        line = {**self._who, "what": what, "time_s": time.time(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Trainer:
    """A model, its optimizer and how far it is."""

    def __init__(self, device: str, *, is_deterministic: bool, tracker: MemoryTracker) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        tracker.note("imported")
        self._torch, self._device, self._ledger = torch, device, tracker
        self._shape = SHAPES[device]
        if is_deterministic:
            _make_deterministic(torch)
        name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
        tracker.note("device", used_bytes=self.used_bytes(), name=name, torch=torch.__version__)
        config = GPT2Config(use_cache=False, attn_implementation="sdpa", **self._shape["sizes"])
        self._vocabulary = config.vocab_size
        torch.manual_seed(0)
        with torch.device(device):
            self._model = GPT2LMHeadModel(config).to(getattr(torch, self._shape["dtype"]))
        # transformers knows this loss by the names of newer classes only, and warns for the others.
        self._model.loss_type = "ForCausalLM"
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        self.step = self._num_trained = 0
        tracker.note("model")

    def used_bytes(self) -> int | None:
        """Memory of the GPU that is taken, by whomever."""
        if self._device != "cuda":
            return None
        free, total = self._torch.cuda.mem_get_info()
        return int(total - free)

    def train(self) -> None:
        """One step."""
        self._torch.manual_seed(self.step)
        tokens = self._tokens().to(self._device)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._ledger.note("step", step=self.step, loss=loss.item())
        self.step += 1
        self._num_trained += 1
        if self._num_trained == SETTLED_STEPS:
            self._ledger.note("memory", used_bytes=self.used_bytes())

    def _tokens(self) -> Any:
        """Rows that count upwards, each at a pace of its own, which can be learned."""
        shape, torch = self._shape, self._torch
        start = torch.randint(self._vocabulary, (shape["batch"], 1))
        pace = torch.randint(1, 9, (shape["batch"], 1))
        return (start + pace * torch.arange(shape["sequence"])) % self._vocabulary

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        self._torch.save(state, path)

    def load(self, path: Path) -> None:
        state = self._torch.load(path, map_location=self._device, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _make_deterministic(torch: Any) -> None:
    # Flash attention sums its gradients in a fixed order only where anything else is an error.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def train_in_fleet(trainer: Trainer, tracker: MemoryTracker, arguments: argparse.Namespace) -> None:
    """The loop with a lease."""
    import hocket

    folder = Path("checkpoints")

    def save(step: int) -> Path:
        began_s = time.time()
        path = hocket.write_checkpoint(folder, step, lambda into: trainer.save(into / "state.pt"))
        _remove_old(folder)
        _note_save(tracker, path / "state.pt", step, began_s)
        return path

    lease = hocket.lease(save=save, save_every_s=arguments.save_every_s, report_every_s=1.0)
    if lease.checkpoint is not None:
        trainer.load(Path(lease.checkpoint) / "state.pt")
    tracker.note("loaded", step=trainer.step)
    for _ in lease.steps(trainer.step, arguments.steps):
        trainer.train()
    tracker.note("finished", step=trainer.step)


def _remove_old(folder: Path) -> None:
    import shutil

    found = sorted(folder.glob("step-*"), key=lambda path: path.stat().st_mtime)
    for path in found[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(path)


def train_alone(trainer: Trainer, tracker: MemoryTracker, arguments: argparse.Namespace) -> None:
    """The loop of a script that saves when it is told to end, and at its own end."""
    must_end = False

    def notice(number: int, frame: object) -> None:
        nonlocal must_end
        must_end = True

    signal.signal(signal.SIGTERM, notice)
    path = Path("state.pt")
    if arguments.resume and path.exists():
        trainer.load(path)
    tracker.note("loaded", step=trainer.step)
    while not must_end and (arguments.steps is None or trainer.step < arguments.steps):
        trainer.train()
    began_s = time.time()
    temporary = path.with_suffix(".new")
    trainer.save(temporary)
    os.replace(temporary, path)
    _note_save(tracker, path, trainer.step, began_s)


def _note_save(tracker: MemoryTracker, path: Path, step: int, began_s: float) -> None:
    seconds = time.time() - began_s
    tracker.note("saved", step=step, seconds=seconds, size_bytes=path.stat().st_size)


def hold(path: Path, tracker: MemoryTracker) -> int:
    """The lock of the device, until this process ends; exits where another holds it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tracker.note("double")
        sys.exit("another training has the device")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of tracker and lock")
    parser.add_argument("--name", default="job")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--steps", type=int, help="without end where left out")
    parser.add_argument("--save-every-s", type=float, default=15.0)
    parser.add_argument("--plain", action="store_true", help="without a line for the fleet")
    parser.add_argument("--resume", action="store_true", help="with --plain: from its last save")
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    tracker = MemoryTracker(arguments.folder, arguments.name)
    tracker.note("process", pid=os.getpid())
    hold(arguments.folder / "device.lock", tracker)
    trainer = Trainer(arguments.device, is_deterministic=arguments.deterministic, tracker=tracker)
    loop = train_alone if arguments.plain else train_in_fleet
    loop(trainer, tracker, arguments)


if __name__ == "__main__":
    main()
