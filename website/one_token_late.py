"""objectives → docs/one_token_late.svg: their losses of a text whose every token comes one place late.

python website/one_token_late.py
"""

from pathlib import Path

import torch
from torch import Tensor

from ngramloss import JointLoss

PICTURE = Path(__file__).parent.parent / "docs" / "one_token_late.svg"
TOKENS, VOCABULARY, CONFIDENCE = 10, 12, 0.9
OBJECTIVES = ("ce", "soft(2,3,4)", "rewards(2,3,4)", "matches(2,3,4)", "bleu(1,2,3,4)", "bag(2)")
LEFT, BAR, GAP, SCALE = 150, 20, 10, 380
"""Pixels: the width of the names, the height of a bar, the space between bars, the length of the longest bar."""


def shares() -> dict[str, float]:
    """Objective → where the late text is between the right one, 0, and one that shares no token with it, 1."""
    gold = torch.arange(1, TOKENS + 1)[None]  # [1, T]
    texts = (gold, gold - 1, torch.full_like(gold, VOCABULARY - 1))
    found = {}
    for objective in OBJECTIVES:
        right, late, wrong = (JointLoss(objective)(_logits(text), gold).item() for text in texts)
        found[objective] = (late - right) / (wrong - right)
    return found


def _logits(text: Tensor) -> Tensor:
    """A model that predicts this text, each token with the same probability, [1, T, V]."""
    logits = torch.full((1, TOKENS, VOCABULARY), (1 - CONFIDENCE) / (VOCABULARY - 1))
    return logits.scatter(2, text.unsqueeze(-1), CONFIDENCE).log()


def picture() -> str:
    """The bars. Greys and blues that can be read on white and on black."""
    lines, height = [], (BAR + GAP) * len(OBJECTIVES) + GAP
    for number, (objective, share) in enumerate(shares().items()):
        top = GAP + number * (BAR + GAP)
        middle, width = top + BAR * 0.7, max(share * SCALE, 1)
        lines += [
            f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{objective}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width:.0f}" height="{BAR}" fill="#4f81bd"/>',
            f'<text x="{LEFT + width + 8:.0f}" y="{middle:.0f}">{share:.0%}</text>',
        ]
    box = f'viewBox="0 0 {LEFT + SCALE + 60} {height}" width="{LEFT + SCALE + 60}" height="{height}"'
    font = 'font-family="monospace" font-size="13" fill="#808080"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>', *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
