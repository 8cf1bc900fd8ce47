"""a task, a split and a number → made-up rows from word lists: no row in two splits, the same rows every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from ngramloss.data import newswire

Row = dict[str, str]

# English, German: the article in the nominative, the noun; adjectives take -e after it.
NOUNS = {
    "dog": "der Hund", "cat": "die Katze", "horse": "das Pferd", "teacher": "der Lehrer", "girl": "das Mädchen",
    "doctor": "die Ärztin", "boy": "der Junge", "singer": "die Sängerin", "child": "das Kind", "baker": "der Bäcker",
    "duck": "die Ente", "farmer": "der Bauer", "painter": "die Malerin", "king": "der König",
}  # fmt: skip
ADJECTIVES = {
    "small": "klein", "old": "alt", "young": "jung", "happy": "glücklich", "tired": "müd", "strong": "stark",
    "quiet": "leis", "big": "groß", "clever": "klug", "friendly": "freundlich",
}  # fmt: skip
VERBS = {
    "sleeps": "schläft", "waits": "wartet", "sings": "singt", "sits": "sitzt", "dances": "tanzt", "laughs": "lacht",
    "stands": "steht", "plays": "spielt",
}  # fmt: skip
PLACES = {
    "in the garden": "im Garten", "behind the house": "hinter dem Haus", "on the roof": "auf dem Dach",
    "at the station": "am Bahnhof", "under the bridge": "unter der Brücke", "beside the lake": "neben dem See",
    "in front of the school": "vor der Schule", "in the kitchen": "in der Küche",
}  # fmt: skip
TIMES = {"today": "heute", "tomorrow": "morgen", "now": "jetzt", "in the evening": "am Abend"}

NAMES = ("Ada", "Ben", "Carla", "Deniz", "Emil", "Farah", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Lena")
THINGS = ("a cake", "a lamp", "two tickets", "a bicycle", "an old map", "three pens", "a coat", "a guitar", "some tea")
SHOPS = ("the market", "the station", "a small shop", "the museum", "the bakery", "the harbour", "the old bridge")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DEEDS = ("bought", "found", "lost", "sold", "painted")


def made_up(task: str, split: str, count: int) -> Iterator[Row]:
    """Rows of a task in :data:`TASKS`. No two splits share a row.

    >>> next(made_up("language-model", "test", 1))["completion"]
    'On Sunday, Kaya found an old map at the harbour.'
    """
    yield from ({"id": f"{split}-{index}", **row} for index, row in enumerate(TASKS[task](split, count)))


def _summaries(split: str, count: int) -> Iterator[Row]:
    """Reports and summaries of the built-in corpus."""
    for item in newswire.items(split, count):
        yield {"document": item.document, "summary": item.summary}


def _translation(draw: random.Random) -> Row:
    """An English sentence and its German translation."""
    (en, de), time = _clause(draw), draw.choice([*TIMES, ""])
    if time:  # in German the verb stays second
        subject, verb, place = de
        english = f"{time.capitalize()} {' '.join(en)}"
        german = f"{TIMES[time].capitalize()} {verb} {subject} {place}"
    else:
        english, german = _capital(" ".join(en)), _capital(" ".join(de))
    if draw.random() < 0.5:
        (more_en, more_de) = _clause(draw)
        english, german = f"{english}, and {' '.join(more_en)}", f"{german}, und {' '.join(more_de)}"
    return {"en": f"{english}.", "de": f"{german}."}


def _clause(draw: random.Random) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Subject, verb and place in both languages."""
    noun, adjective, verb, place = (draw.choice([*words]) for words in (NOUNS, ADJECTIVES, VERBS, PLACES))
    article, german = NOUNS[noun].split()
    subject = f"{article} {ADJECTIVES[adjective]}e {german}"
    return (f"the {adjective} {noun}", verb, place), (subject, VERBS[verb], PLACES[place])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _completion(draw: random.Random) -> Row:
    """A note, and a sentence that says the same."""
    name, thing, shop, day, deed = (draw.choice(words) for words in (NAMES, THINGS, SHOPS, DAYS, DEEDS))
    prompt = f"who: {name}; did: {deed}; what: {thing}; where: {shop}; when: {day} =>"
    return {"prompt": prompt, "completion": f"On {day}, {name} {deed} {thing} at {shop}."}


def _distinct(make: Callable[[random.Random], Row], split: str, count: int) -> Iterator[Row]:
    """Different rows. A hash of a row decides its split, so that splits share none."""
    draw, seen = random.Random(split), set[str]()
    while len(seen) < count:
        row = make(draw)
        text = " ".join(row.values())
        if text not in seen and _split_of(text) == split:
            seen.add(text)
            yield row


def _split_of(text: str) -> str:
    return ("test", "validation", *["train"] * 8)[random.Random(text).randrange(10)]


TASKS: dict[str, Callable[[str, int], Iterator[Row]]] = {
    "summarisation": _summaries,
    "translation": partial(_distinct, _translation),
    "language-model": partial(_distinct, _completion),
}
"""Task → what makes its rows."""
