"""CandidateStats → a value of the candidates of one source."""
