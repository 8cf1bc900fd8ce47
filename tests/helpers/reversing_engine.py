"""An engine as somebody would add it: the best text of hf, its tokens in reverse order."""

from ngramloss.search.engines import hf


def load(model, search, *, precision):
    write = hf.load(model, search, precision=precision)
    return lambda sources: [[[best[0], *best[-2:0:-1], best[-1]]] for best, *_ in write(sources)]


def unsupported(model, search):
    return ["it writes one text of each document"] if search.texts > 1 else []


def differences(model, search, *, precision):
    return ["it writes backwards"]
