"""A character-level language model on a text file, on the devices of a plan.

python examples/train_text.py README.md --on 2xv100-16g --steps 200
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import hocket


class Characters(nn.Module):
    """Guesses the next character; returns its loss."""

    def __init__(self, num_characters: int, width: int = 64, context: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, width)
        self.place = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.mix = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, num_characters)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        place = self.place.weight[: text.shape[1]]
        scores = self.out(self.mix(self.embed(text) + place, mask, is_causal=True)).flatten(0, 1)
        return nn.functional.cross_entropy(scores, following.flatten())


def batch_of(codes: torch.Tensor, size: int = 16, context: int = 32) -> dict[str, torch.Tensor]:
    """Random pieces of the text, and the same shifted by one."""
    starts = torch.randint(0, len(codes) - context - 1, (size,)).tolist()
    pieces = torch.stack([codes[start : start + context + 1] for start in starts])
    return {"text": pieces[:, :-1].contiguous(), "following": pieces[:, 1:].contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--on", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    text = arguments.file.read_text()
    known = sorted(set(text))
    codes = torch.tensor([known.index(character) for character in text])
    torch.manual_seed(0)
    model = Characters(len(known))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = hocket.prepare(model, optimizer, batch_of(codes), on=arguments.on, clip_norm=1.0)
    for step in range(1, arguments.steps + 1):
        loss = train.step(batch_of(codes))
        if step % 10 == 1:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
