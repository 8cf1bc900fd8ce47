"""Words that made readers stumble do not come back: in docstrings, comments and messages of the source, or in pages.

The prose of the guide has short sentences and short lines, too.

``WORDS`` is the list. Each entry has a pattern, an example that the pattern finds, what to write instead, and why. To forbid another word,
add an entry; to see where it occurs, run this file.
"""

import ast
import io
import re
import tokenize
from typing import NamedTuple

import pytest
from places import ROOT

SOURCES = sorted({*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py")})
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "ARCHITECTURE", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),  # not docs/dev: the log quotes how things were called
    *sorted((ROOT / "src").rglob("*.toml")),
    *sorted((ROOT / "examples").glob("*.toml")),
]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEWS = [ROOT / "src" / "ngramloss" / "data" / name for name in ("newswire.py", "newswire.toml")]
"""Words of invented news, in which a roof may be mended."""


class Word(NamedTuple):
    pattern: str
    leave: str
    write: str
    why: str


WORDS = [
    Word(r"figures?(?!\()", "the figures of a system", "the scores of a system", "a figure is a drawing"),
    Word(r"kinds(?!\()", "kinds of windows", "n-gram ids; types of models", "it does not say what differs"),
    Word(r"mend(?:s|ed|ing)?", "Mend them", "Fix them", "old-fashioned"),
    Word(r"told", "the reason is told once", "the reason is reported once; logged", "who tells whom is left open"),
    Word(r"tells? (?:\w+ ){0,2}apart", "tells documents apart", "distinguishes documents", "an idiom"),
    Word(r"apart by", "weights apart by 0.02", "weights that differ by 0.02", "say difference"),
    Word(r"floors?(?!/)", "the floor of a table", "the baseline; the lowest value", "floor/TERM is a name in the log"),
    Word(r"whoever", "whoever waits", "a process that waits; a user who", "the subject is missing"),
    Word(r"(?:is|was|are) no numbers?", "the loss is no number", "the loss is NaN or infinite", "say the value"),
    Word(
        r"(?<!there\s)(?:is|are|was) no (?:single|gains?|terminal|encoder-decoder|baselines?|term|systems?|part|errors?|\w+'s)",
        "the metric is no gain",
        "the metric is not a gain",
        "'is not a' is the usual form",
    ),
    Word(r"so many", "every so many steps", "every N steps; this many", "how many?"),
    Word(r"so-many", "every so-many-th is kept", "every eighth is kept; every k-th is kept", "not a word"),
    Word(r"are others", "its random numbers are others", "its random numbers are different", "an odd construction"),
    Word(r"(?:is|are) of(?=[,.;:)])", "the text that they are of.", "the text that they belong to.", "ends in nothing"),
    Word(
        r"what (?:each|the|a) \w+ (?:is|are) of",
        "What the targets are of the sources",
        "What targets are, such as summaries",
        "cannot be read once",
    ),
    Word(r"what has left it", "What has left it", "Reasons not to use the engine", "a riddle"),
    Word(
        r"(?:was|were|is|are) seen of", "What was seen of the objectives", "What differs between objectives", "a riddle"
    ),
    Word(r"say once", "say once who writes", "Give the model once", "who says what?"),
    Word(r"written over", "would be written over", "would be overwritten", "read as 'written about'"),
    Word(r"counts? in no", "Its time counts in no speed", "Excluded from the speed", "a negation at the end"),
    Word(
        r"one for each document: got", "one for each document: got 3", "Lengths differ: 3 references", "say the mistake"
    ),
    Word(r"left behind", "with no file left behind", "and deletes the file", "say what is done"),
    Word(r"affairs?", "the metric's own affair", "depends on the metric", "an idiom"),
    Word(r"for ever", "waits for ever", "waits forever", "spelling"),
    Word(r"without a word", "undone without a word", "silently", "an idiom"),
    Word(r"anew", "computed anew", "computed again", "rare"),
    Word(r"remarks?", "without this remark", "without this warning", "say whether it is a warning or a message"),
    Word(r"(?:documents|tokens|sources) a second", "documents a second", "documents per second", "a rate has 'per'"),
    Word(r"of one's own", "data of one's own", "your own data", "stiff"),
    Word(r"strangers?", "files of strangers", "files from other people", "stiff"),
    Word(r"come[s]? undone|came undone", "attach came undone", "attach was removed", "an idiom"),
    Word(
        r"say[s]? nothing of|knows? nothing of", "it knows nothing of models", "it does not depend on models", "stiff"
    ),
    Word(
        r"the others? go(?:es)? on|goes? on with",
        "the search goes on with others",
        "the search continues",
        "use continue",
    ),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.leave)
def test_a_pattern_finds_its_example_and_allows_the_replacement(word):
    assert found(word, word.leave)
    assert not found(word, word.write)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_plain(path):
    faults = [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, hit.start())}: '{hit[0]}', as in '{word.leave}'. "
        f"Write '{word.write}': {word.why}."
        for line, text in texts(path)
        for word in WORDS
        for hit in found(word, text)
    ]
    assert not faults, "\n" + "\n".join(faults)


def test_docstrings_messages_and_comments_are_read(tmp_path):
    path = tmp_path / "code.py"
    path.write_text('"""A docstring."""\nprint(f"a message of {1} part", "name")  # a comment\n')
    assert [text for _, text in texts(path)] == ["A docstring.", "a message of ", " part", "# a comment"]


NOT_PROSE = re.compile(
    r"^```.*?^```$|^\$\$.*?\$\$$|^<!-- table: .*?^<!-- end of table -->$|<!--.*?-->|^(?:\||#|!\[).*?$", re.M | re.S
)
"""Code, formulas, tables, marks, headings and pictures."""

STIFF = re.compile(r"\b(?:those of|but for|otherwise than|of which)\b")
COLUMNS, LONGEST = 120, 35


@pytest.mark.parametrize("path", GUIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_in_short_lines_and_sentences(path):
    text = prose(path.read_text(encoding="utf-8"))
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns: {line}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS
    ] + [
        f"{path.relative_to(ROOT)}:{number}: {fault}: {sentence}"
        for number, sentence in sentences(text)
        for fault in prose_faults(sentence)
    ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Scores, those\nof runs.", "'those of'"),
        ("One line, the end of which is missing.", "'of which'"),
        ("* " + "a " * 36 + "end. " + "B " * 20, "37 words"),
        ("Few. " + "a " * 30 + "\n\n" + "b " * 30, None),
        ("* [a](b.md), " + "[c](d.md), " * 36, None),
        ("```text\nthose of\n```\n| those of | " + "a " * 99, None),
    ],
)
def test_a_fault_of_prose_is_found(text, fault):
    assert [*(one for _, sentence in sentences(prose(text)) for one in prose_faults(sentence))] == [fault] * bool(fault)


def prose(text):
    """A page in which all that is not prose is blank; its lines keep their numbers."""
    return NOT_PROSE.sub(lambda part: "\n" * part[0].count("\n"), text)


def sentences(text):
    """(line, sentence) of each paragraph and each item of a list; items that begin with a link are left out."""
    for block in re.finditer(
        r"(?:^(?! *(?:[*-]|\d+\.) ).+\n?)+|^ *(?:[*-]|\d+\.) .+\n?(?:^ +(?![*-] |\d+\. ).+\n?)*", text, re.M
    ):
        if not re.match(r" *(?:[*-]|\d+\.) \[", block[0]):
            line = text.count("\n", 0, block.start()) + 1
            for sentence in re.split(r"(?<=[.!?])[*)\"”]*\s+(?=[^a-z\s])", " ".join(block[0].split())):
                yield line, sentence


def prose_faults(sentence):
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]+`|\$[^$]+\$", "code", sentence))
    words = len(re.findall(r"[^\W_]\S*", plain))
    return [f"'{hit[0]}'" for hit in STIFF.finditer(plain)] + [f"{words} words"] * (words > LONGEST)


def found(word, text):
    """What the pattern finds, as whole words, in any case and across line ends; names in quotes are left out."""
    pattern = rf"(?<![\w`'-])(?:{word.pattern})(?![\w`'])".replace(" ", r"\s+")
    return list(re.finditer(pattern, text, re.IGNORECASE))


def texts(path):
    """(line, text) of a page as a whole, or of each comment of a source and each string that is not a name."""
    if path in NEWS:
        return []
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [(1, content)]
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(content))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(content).readline)
    return strings + [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
