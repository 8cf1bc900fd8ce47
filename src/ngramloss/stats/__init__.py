"""logits or hidden states, with labels → TokenStats. Knows the vocabulary and the device, not n-grams."""

from ngramloss.stats.labels import IGNORE_INDEX as IGNORE_INDEX
from ngramloss.stats.labels import legal_labels as legal_labels
from ngramloss.stats.token_stats import TokenStats as TokenStats
from ngramloss.stats.token_stats import token_stats as token_stats
from ngramloss.stats.token_stats import token_stats_from_hidden as token_stats_from_hidden
