"""the progress of a training → the share of a term's weight that applies."""

from __future__ import annotations

from dataclasses import dataclass

from ngramloss.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The weight of a term is 0 before ``begin`` (a share of all steps), full from ``end`` on, linear between."""

    begin: float
    end: float

    def __post_init__(self) -> None:
        for share in (self.begin, self.end):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
                raise UserError(f"a schedule takes shares of the training from 0 to 1, got {share!r}. Write "
                                "@from(0.5) for the second half, @ramp(0.1,0.3) for a weight that grows.")
        if self.begin > self.end:
            raise UserError(f"@ramp({self.begin:g},{self.end:g}) ends before it begins. Write the smaller share first.")

    def __str__(self) -> str:
        return f"@from({self.begin:g})" if self.begin == self.end else f"@ramp({self.begin:g},{self.end:g})"

    def share(self, progress: float) -> float:
        """The share of the weight at this progress."""
        if progress >= self.end:
            return 1.0
        return max(0.0, (progress - self.begin) / (self.end - self.begin)) if progress > self.begin else 0.0
