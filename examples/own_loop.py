"""A joint objective in your own training loop: a small model learns to reverse sequences of digits.

python examples/own_loop.py ["ce + matches(2,3,4)"]
"""

import sys

import torch
from torch import Tensor, nn

import ngramloss as ng

DIGITS, LENGTH, START = 10, 8, 10


class Reverser(nn.Module):
    """A two-layer transformer over source, start and target so far."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(2 * LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        start = torch.full_like(target[:, :1], START)
        ids = torch.cat([source, start, target[:, :-1]], 1)
        causal = nn.Transformer.generate_square_subsequent_mask(2 * LENGTH)
        hidden: Tensor = self.layers(self.tokens(ids) + self.places, mask=causal, is_causal=True)
        return hidden[:, LENGTH:]


def main(objective: str) -> None:
    torch.manual_seed(0)
    model = Reverser()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    loss_fn = ng.JointLoss(objective)
    print(f"{loss_fn}\n step   loss  " + "  ".join(part.name for part in loss_fn.parts) + "  | watched")
    for step in range(301):
        source = torch.randint(0, DIGITS, (64, LENGTH))
        labels = source.flip(1)
        hidden = model(source, labels)
        loss, parts = loss_fn.from_hidden_with_parts(hidden, model.head, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            watched = loss_fn.diagnose(model.head(hidden), labels)
            shown = "  ".join(f"{value:{len(name)}.3f}" for name, value in parts.items())
            extra = "  ".join(f"{name} {value:.3f}" for name, value in watched.items() if not name.startswith("floor"))
            print(f"{step:>5}  {loss:.3f}  {shown}  | {extra}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ce + matches(2)")
