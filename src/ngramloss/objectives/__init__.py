"""TokenStats and labels → one value a sequence. Knows n-grams, not the vocabulary, the device or the model."""

from ngramloss.objectives.parser import parse as parse
from ngramloss.objectives.registry import OBJECTIVES as OBJECTIVES
from ngramloss.objectives.registry import Objective as Objective
from ngramloss.objectives.term import Term as Term
