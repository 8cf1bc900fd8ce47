"""TokenStats and labels → one value per sequence. Depends on n-grams, not on the vocabulary, device or model."""

from ngramloss.objectives.parser import parse as parse
from ngramloss.objectives.registry import OBJECTIVES as OBJECTIVES
from ngramloss.objectives.registry import Objective as Objective
from ngramloss.objectives.term import Term as Term
