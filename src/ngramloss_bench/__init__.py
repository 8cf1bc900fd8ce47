"""a machine → what things cost on it, compared with other libraries in the same run."""

from ngramloss import Verb

BENCH = Verb("measure time and memory on this machine", "ngramloss_bench.verb:add", after="publish")
