"""the written form of an objective → checked terms, without torch."""

from ngramloss.loss.terms.parser import parse as parse
from ngramloss.loss.terms.registry import OBJECTIVES as OBJECTIVES
from ngramloss.loss.terms.registry import Objective as Objective
from ngramloss.loss.terms.term import Term as Term
