"""logits or hidden states, with labels → TokenStats; candidates → CandidateStats. Knows no n-grams."""

from ngramloss.stats.backends import BACKENDS as BACKENDS
from ngramloss.stats.backends import MEMORY as MEMORY
from ngramloss.stats.backends import chosen_backend as chosen_backend
from ngramloss.stats.backends import token_stats_from_hidden as token_stats_from_hidden
from ngramloss.stats.backends import triton_is_installed as triton_is_installed
from ngramloss.stats.candidate_stats import CandidateStats as CandidateStats
from ngramloss.stats.candidate_stats import checked_candidates as checked_candidates
from ngramloss.stats.given import BESIDE_LABELS as BESIDE_LABELS
from ngramloss.stats.given import GIVEN as GIVEN
from ngramloss.stats.given import WEIGHTS as WEIGHTS
from ngramloss.stats.given import with_given as with_given
from ngramloss.stats.labels import IGNORE_INDEX as IGNORE_INDEX
from ngramloss.stats.labels import legal_labels as legal_labels
from ngramloss.stats.segments import Labelled as Labelled
from ngramloss.stats.segments import Packing as Packing
from ngramloss.stats.segments import at_positions as at_positions
from ngramloss.stats.segments import check_segments as check_segments
from ngramloss.stats.segments import labelled as labelled
from ngramloss.stats.segments import packing as packing
from ngramloss.stats.segments import unpack as unpack
from ngramloss.stats.teachers import Teacher as Teacher
from ngramloss.stats.token_stats import LOGITS_ONLY as LOGITS_ONLY
from ngramloss.stats.token_stats import TokenStats as TokenStats
from ngramloss.stats.token_stats import head_logits as head_logits
from ngramloss.stats.token_stats import token_stats as token_stats
