"""statistics and labels → one value a row: a formula each.

``stats`` are those of ``token_stats``, or candidates as ``checked_candidates`` returns them, with the optional
statistics that the entry in ``terms/registry.py`` names. ``labels`` are reference ids, [B, T], padded with
``IGNORE_INDEX``. ``n`` is the length of the n-grams; a formula of several n takes a tuple.
"""
