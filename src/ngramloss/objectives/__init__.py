"""TokenStats and labels, or CandidateStats → one value per sequence. Knows no vocabulary, device or model."""

from ngramloss.objectives.parser import parse as parse
from ngramloss.objectives.registry import OBJECTIVES as OBJECTIVES
from ngramloss.objectives.registry import Objective as Objective
from ngramloss.objectives.term import Term as Term
