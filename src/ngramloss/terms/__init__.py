"""the written form of an objective → checked terms, without torch."""

from ngramloss.terms.parser import parse as parse
from ngramloss.terms.registry import OBJECTIVES as OBJECTIVES
from ngramloss.terms.registry import Objective as Objective
from ngramloss.terms.term import Term as Term
