"""BLEU and chrF: the score of a document is sacreBLEU's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss.metrics.overlap import bleu, chrf

TEXTS = st.lists(st.sampled_from(["cats", "dogs", "sat", "ran", "."]), max_size=6).map(" ".join)


@pytest.mark.parametrize(("metric", "kind", "options"), [(bleu, "BLEU", {"effective_order": True}), (chrf, "CHRF", {})])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_the_score_of_a_document_is_sacrebleus_sentence_score(metric, kind, options, rows):
    from sacrebleu import metrics

    rows += [(text, rows[0][1]) for text, _ in rows]  # candidates of one source have the same references
    sentence = getattr(metrics, kind)(**options)
    (found,) = metric([golds for _, golds in rows], [text for text, _ in rows]).values.values()
    assert found == [sentence.sentence_score(text, golds).score for text, golds in rows]
