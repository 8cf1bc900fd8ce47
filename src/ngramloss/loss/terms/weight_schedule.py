"""the progress of a training → the share of a term's weight that applies."""

from __future__ import annotations

from dataclasses import dataclass

from ngramloss.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The weight of a term is 0 before ``begin`` (a share of all steps), full from ``end`` on, linear between.

    With ``until``, where both are the same, it is full before them and 0 from there on.
    """

    begin: float
    end: float
    until: bool = False

    def __post_init__(self) -> None:
        for share in (self.begin, self.end):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
                raise UserError(f"a schedule takes shares of the training from 0 to 1, got {share!r}. Write "
                                "@from(0.5) for the second half, @until(0.5) for the first, @ramp(0.1,0.3) for a "
                                "weight that grows.")
        if self.begin > self.end:
            raise UserError(f"@ramp({self.begin:g},{self.end:g}) ends before it begins. Write the smaller share first.")

    def __str__(self) -> str:
        begin, end = (repr(float(share)).removesuffix(".0") for share in (self.begin, self.end))
        if self.begin == self.end:
            return f"@until({begin})" if self.until else f"@from({begin})"
        return f"@ramp({begin},{end})"

    def share(self, progress: float) -> float:
        """The share of the weight at this progress."""
        if self.until:
            return float(progress < self.begin)
        if progress >= self.end:
            return 1.0
        return max(0.0, (progress - self.begin) / (self.end - self.begin)) if progress > self.begin else 0.0
