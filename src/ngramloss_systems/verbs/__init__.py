"""The verbs that this package adds to ``ngramloss``, and their arguments."""

from ngramloss import Verb

RERANK = Verb(
    "train a reranker, or choose among candidates with it", "ngramloss_systems.verbs.rerank:add", after="candidates"
)
IMPORT = Verb("convert summaries that others released", "ngramloss_systems.verbs.import_:add", after="publish")
