"""Texts in other languages: tokens by script, what is said where a tokenizer cannot read them, sentences by language."""

import json
import re
import sys
import types
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ngramloss.cli import main
from ngramloss.data import Example
from ngramloss.data import sentences as splitting
from ngramloss.data.languages import (
    SCRIPTS,
    SPACELESS,
    language_of,
    letters,
    normalised,
    script,
    token_pattern,
    word_pattern,
)
from ngramloss.data.sentences import RULES, sentences, splitting_notes
from ngramloss.data.statistics import WORD, words_of
from ngramloss.metrics import overlap
from ngramloss.metrics.candidate_scores import candidate_metric, scores_at_once
from ngramloss.metrics.overlap import bleu, bleu_notes, tokenizer_of
from ngramloss.metrics.registry import METRICS, compute_scores
from ngramloss.metrics.rouge import NAMES, notes, rewritten, rouge
from ngramloss.metrics.scores import corpus_score
from ngramloss.metrics.shape import shape

# language → a reference, a prediction that shares a part of it, and one that shares nothing
TEXTS = {
    "zh": ("猫在窗边睡觉。外面下着雨。", "猫在门口睡觉。外面出太阳。", "他们昨日买了三本新书"),
    "ja": ("猫が窓のそばで眠る。外は雨だ。", "猫が庭のすみで眠る。外は晴れだ。", "彼らも本を買った"),
    "ko": (
        "고양이가 창가에서 잔다. 밖에는 비가 온다.",
        "고양이가 마당에서 잔다. 밖에는 눈이 온다.",
        "그들은 어제 책을 샀다",
    ),
    "th": ("แมวนอนหลับข้างหน้าต่าง ฝนตก", "แมวนอนหลับในสวน แดดออก", "พี่ ๓ ปี"),
    "ar": ("القطة تنام قرب النافذة. المطر يهطل.", "القطة تنام في الحديقة. الثلج يهطل.", "اشترى ثلاثة كتب جديدة أمس"),
    "ru": (
        "Кошка спит у окна. На улице идёт дождь.",
        "Кошка спит в саду. На улице идёт снег.",
        "Вчера они купили три книги",
    ),
    "el": (
        "Η γάτα κοιμάται στο παράθυρο. Έξω βρέχει.",
        "Η γάτα κοιμάται στον κήπο. Έξω χιονίζει.",
        "Χθες αγόρασαν τρία βιβλία",
    ),
    "de": (
        "Die Kätzchen schlafen über Nacht. Draußen stürmt es.",
        "Die Kätzchen träumen über Nacht. Draußen schneit es.",
        "Gestern kauften wir Bücher",
    ),
    "hi": (
        "बिल्ली खिड़की के पास सोती है। बाहर बारिश हो रही है।",
        "बिल्ली बगीचे के पास सोती है। बाहर धूप हो रही है।",
        "उन्होंने कल तीन किताबें खरीदीं",
    ),
}


# ── the definition, in plain Python ──────────────────────────────────────────────────────────────────────────────────


def tokens_of(text):
    """The tokens of auto, character by character."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found, open_word, open_token = [], False, False
    for letter in text:
        kind = unicodedata.category(letter)[0]
        if re.match(
            r"[\u00ad\u061c\u200c-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef]",
            letter,
        ):
            continue
        if kind == "M" and open_token:
            found[-1] += letter
        elif letter.isalnum() and script(letter) in SPACELESS:
            found, open_word, open_token = [*found, letter], False, True
        elif letter.isalnum():
            if open_word:
                found[-1] += letter
            else:
                found.append(letter)
            open_word = open_token = True
        else:
            open_word = open_token = False
    return found


def f_measure(hits, gold, text):
    return 200 * hits / (gold + text) if hits else 0.0


def ngram_f(gold, text, n):
    counts = [Counter(tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)) for tokens in (gold, text)]
    return f_measure((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total())


def lcs_f(gold, text):
    row = [0] * (len(text) + 1)
    for one in gold:
        new = [0]
        for at, other in enumerate(text):
            new.append(row[at] + 1 if one == other else max(row[at + 1], new[-1]))
        row = new
    return f_measure(row[-1], len(gold), len(text))


def oracle(reference, prediction):
    gold, text = tokens_of(reference), tokens_of(prediction)
    return {"rouge1": ngram_f(gold, text, 1), "rouge2": ngram_f(gold, text, 2), "rougeL": lcs_f(gold, text)}


def auto(reference, prediction, **options):
    return {
        name: column[0] for name, column in rouge([[reference]], [prediction], tokens="auto", **options).values.items()
    }


# ── ROUGE by script ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_scores_100_against_itself_0_against_another_and_as_defined_between(language):
    reference, half, other = TEXTS[language]
    assert auto(reference, reference) == dict.fromkeys(NAMES, pytest.approx(100))
    assert auto(reference, other) == dict.fromkeys(NAMES, 0)
    found = auto(reference, half, stemmer=False)
    assert {name: found[name] for name in NAMES[:3]} == pytest.approx(oracle(reference, half))
    assert all(10 < found[name] < 95 for name in NAMES)


MIXED = st.lists(
    st.sampled_from(
        [
            *"猫犬がデー가고แมวที่นี้ကខកះжéßüΣσςक्षिामنَا１Ａａ٣๓29zZ_.,。।'-–½ﬁ①İı",
            "0u",
            "0u61",
            "0U",
            "ed",
            " ",
            " ",
            "\n",
            "\u200d",
            "\ufe0f",
            "\u0301",
            "𠀀",
            "\U00011302",
            "running",
            "cats",
        ]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(MIXED, MIXED)
@example("0u61 é", "0u61 0uc3a90")
@example("0UC3A90", "é")
@example("Straße", "STRASSE")
@example("ab\u0301", "ab")
def test_auto_agrees_with_the_definition_for_any_mixture_of_scripts(reference, prediction):
    assert token_pattern().findall(normalised(reference)) == tokens_of(reference)
    found = auto(reference, prediction, stemmer=False)
    assert {name: found[name] for name in NAMES[:3]} == pytest.approx(oracle(reference, prediction))


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_different_tokens_have_different_stand_ins_that_neither_rules_nor_stemmer_change(text):
    from rouge_score_rs import tokenizers

    tokens = tokens_of(text)
    stood_in = tokenizers.DefaultTokenizer(use_stemmer=True).tokenize(rewritten(text))
    plain = [token.isascii() for token in tokens]
    assert len(stood_in) == len(tokens)
    foreign = {token: found for token, found, ascii_only in zip(tokens, stood_in, plain, strict=True) if not ascii_only}
    assert len(set(foreign.values())) == len(foreign)
    assert all(re.fullmatch("0u[0-9a-f]+0", found) for found in foreign.values())


ENGLISH = st.lists(
    st.sampled_from(
        [
            "The",
            "cats",
            "were",
            "running",
            "U.S.",
            "don't",
            "3.5",
            "a_b",
            "well-known",
            "(so)",
            "flies",
            "0u12",
            "0U1",
            "x\n",
            "\n",
            "“quoted”",
            "it’s",
            "–",
            "£5",
            "NATO",
            "happily",
        ]
    ),
    max_size=25,
).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(ENGLISH, ENGLISH, st.booleans())
def test_english_scores_are_those_of_the_default_rules_and_of_googles_package(reference, prediction, stemmer):
    from rouge_score.rouge_scorer import RougeScorer

    google = RougeScorer(list(NAMES), use_stemmer=stemmer).score(reference, prediction)
    default = {name: column[0] for name, column in rouge([[reference]], [prediction], stemmer=stemmer).values.items()}
    assert auto(reference, prediction, stemmer=stemmer) == default
    assert default == pytest.approx({name: 100 * google[name].fmeasure for name in NAMES})


def test_lines_survive_and_several_references_count():
    lines = rouge([["猫在睡觉\n外面下雨"]], ["外面下雨\n猫在睡觉"], tokens="auto").values
    assert lines["rougeLsum"] == [100]
    assert lines["rougeL"] == [50]
    assert rouge([["猫", "狗"], ["狗"]], ["狗", "狗"], tokens="auto").values["rouge1"] == [100, 100]
    split = rouge([["猫在睡觉。外面下雨。"]], ["外面下雨。猫在睡觉。"], tokens="auto", sentences="pysbd")
    assert split.values["rougeLsum"] == [100]
    assert "|lsum:pysbd|tokens:auto|" in split.signature


def test_full_width_letters_case_and_joiners_do_not_tell_words_apart():
    assert auto("ＮＡＴＯ Straße می\u200cخواهم ΣΟΦΟΣ", "nato STRASSE میخواهم σοφός".replace("ό", "ο"))["rouge2"] == 100


def test_numbers_in_thai_digits_are_words():
    assert tokens_of("๒๕๖๗") == ["๒๕๖๗"] == token_pattern().findall("๒๕๖๗")


# ── what the default rules skip ──────────────────────────────────────────────────────────────────────────────────────


def said(reference, prediction, **options):
    return notes(
        [[reference]],
        [prediction],
        **{"tokens": "default", "sentences": "newline", "language": "auto", "stemmer": True} | options,
    )


@pytest.mark.parametrize("language", TEXTS)
def test_the_default_rules_say_what_they_skip(language):
    (note,) = said(*TEXTS[language][:2])
    assert re.match(
        r"the default rules read only a–z and 0–9: they skip [\d.]+% of the letters here \((. ){2,3}.( …)?\)", note
    )
    assert note.endswith("Use --set rouge.tokens=auto.")
    assert said(*TEXTS[language][:2], tokens="auto") == []


def test_the_note_counts_letters_and_texts():
    assert said("Die Kätzchen", "Über") == [
        "the default rules read only a–z and 0–9: they skip 13% of the letters here (ä Ü). Use --set rouge.tokens=auto."
    ]
    assert said("abc 猫", "猫 1") == [
        "the default rules read only a–z and 0–9: they skip 40% of the letters here (猫). Use --set rouge.tokens=auto."
    ]
    assert "100% of the letters here (猫), and find no word in 2 of 2 texts." in said("猫", "猫")[0]


def test_english_with_an_accent_here_and_there_gets_no_note():
    english = "The minister of the café said “no” – and it’s €5. " + "Nobody else did that day. " * 20
    assert said(english, english) == []
    assert said("", "!?") == []
    assert "they skip 0.46% of the letters here (é 猫), and find no word in 1 of 2 texts." in said(english, "猫")[0]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, index, key in (("refs", 0, "reference"), ("half", 1, "prediction"), ("other", 2, "prediction")):
        rows = [{"id": language, key: TEXTS[language][index]} for language in ("zh", "ru")]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


DEFAULTS = ("--set", "rouge.tokens=default", "--set", "bleu.tokenize=13a")


def score(*arguments):
    return main(
        [
            "score",
            "--references",
            "refs.jsonl",
            "half.jsonl",
            "other.jsonl",
            "--samples",
            "20",
            "--shuffles",
            "20",
            *arguments,
        ]
    )


def test_notes_are_below_the_table_and_in_json(files, capsys):
    assert score("--metrics", "rouge,bleu", *DEFAULTS) == 0
    text = capsys.readouterr().out
    assert text.count("rouge: the default rules read only a–z and 0–9: they skip 100% of the letters here") == 1
    assert "bleu: the tokenizer 13a does not split texts in scripts without spaces (Han): " in text
    assert score("--json", *DEFAULTS[:2]) == 0
    assert list(json.loads(capsys.readouterr().out)["notes"]) == ["rouge"]
    assert score("--metrics", "rouge,bleu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == {}
    assert "|tokens:auto|" in found["systems"][0]["signature"]["rouge"]
    assert found["systems"][0]["scores"]["rouge1"] > 50 > found["systems"][1]["scores"]["rouge1"] == 0


def test_the_page_has_the_notes(files, capsys):
    pytest.importorskip("jinja2")
    assert (
        main(
            [
                "report",
                "--references",
                "refs.jsonl",
                "half.jsonl",
                "--samples",
                "20",
                "--metrics",
                "rouge",
                *DEFAULTS[:2],
                "-o",
                "page",
            ]
        )
        == 0
    )
    assert "<b>rouge</b>: the default rules read only a–z and 0–9" in Path("page/index.html").read_text()


def test_saved_scores_come_with_their_notes(files, capsys):
    run = Path("run")
    run.mkdir()
    (run / "predictions.jsonl").write_text(Path("half.jsonl").read_text())
    (run / "references.jsonl").write_text(Path("refs.jsonl").read_text())
    (run / "generation.json").write_text("{}")
    texts = []
    for _ in range(2):
        assert main(["score", "run", "--samples", "20", *DEFAULTS[:2]]) == 0
        texts.append(capsys.readouterr().out)
    assert (run / "scores.jsonl").exists()
    assert texts[0] == texts[1]
    assert "rouge: the default rules" in texts[1]


# ── words of the shape ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(st.one_of(ENGLISH, st.text("aÀß1_'’-., é“ж", max_size=30)))
def test_words_of_scripts_with_spaces_are_those_of_the_plain_pattern(text):
    folded = unicodedata.normalize("NFC", text).casefold()
    assert words_of(text) == WORD.findall(folded) == word_pattern().findall(folded)


def test_characters_and_vowel_signs_count_as_they_are_read():
    assert words_of("猫在睡觉。iPhone's 3.5") == [*"猫在睡觉", "iphone's", "3.5"]
    assert words_of(TEXTS["hi"][0])[:3] == ["बिल्ली", "खिड़की", "के"]
    assert shape([TEXTS["zh"][0]]).values["words"] == [11]


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("metric", ["rouge", "bleu"])
def test_the_script_of_references_decides_how_texts_are_read_unless_that_is_given(metric, language):
    reference, half, other = TEXTS[language]
    values = {}
    for text in (reference, half, other, "only latin here " * 9):
        values[text] = compute_scores(metric, {"references": [[reference]], "predictions": [text]}, {}, documents=1)
    assert len({scores.signature for scores in values.values()}) == 1  # whatever a system writes
    name = "rouge1" if metric == "rouge" else "bleu"
    assert corpus_score(values[reference], name) == pytest.approx(100)
    assert 100 > corpus_score(values[half], name) > corpus_score(values[other], name)
    plain = {"tokens": "default"} if metric == "rouge" else {"tokenize": "13a"}
    given = compute_scores(metric, {"references": [[reference]], "predictions": [half]}, plain, documents=1)
    assert "|tokens:default|" in given.signature or "|tok:13a|" in given.signature


@settings(max_examples=100, deadline=None)
@given(ENGLISH.filter(bool), ENGLISH)
def test_english_references_are_read_by_the_published_rules(reference, prediction):
    texts = {"references": [[reference]], "predictions": [prediction]}
    for metric, options in (("rouge", {"tokens": "default"}), ("bleu", {"tokenize": "13a"})):
        usual, published = (compute_scores(metric, texts, each, documents=1) for each in ({}, options))
        assert (usual.values, usual.signature) == (published.values, published.signature)


@pytest.mark.parametrize("name", ["rouge2", "bleu"])
def test_a_score_does_not_depend_on_the_other_examples(name):
    examples = [Example(language, "", texts[0]) for language, texts in TEXTS.items()]
    texts = [[half, reference, other] for reference, half, other in TEXTS.values()]
    together = scores_at_once(candidate_metric(name, {}), examples, texts)
    assert together == [
        scores_at_once(candidate_metric(name, {}), [one], [own])[0] for one, own in zip(examples, texts, strict=True)
    ]
    assert all(values[1] == pytest.approx(1) for values in together)


# ── BLEU ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("zh", "zh"),
        ("ja", "char"),
        ("ko", "char"),
        ("th", "char"),
        ("ar", "13a"),
        ("ru", "13a"),
        ("el", "13a"),
        ("de", "13a"),
        ("hi", "13a"),
    ],
)
def test_bleu_takes_sacrebleus_tokenizer_for_the_script(language, tokenizer, monkeypatch):
    monkeypatch.setattr(overlap, "find_spec", lambda name: None)
    reference, half, other = TEXTS[language]
    assert tokenizer_of([[reference]]) == tokenizer
    same, part, none = (bleu([[reference]], [text], tokenize="auto") for text in (reference, half, other))
    assert f"|tok:{tokenizer}|" in same.signature
    assert same.values["bleu"][0] == pytest.approx(100)
    assert 100 > part.values["bleu"][0] > none.values["bleu"][0]


@pytest.mark.parametrize(
    ("language", "tokenizer", "name"), [("ja", "ja-mecab", "Japanese"), ("ko", "ko-mecab", "Korean")]
)
def test_mecab_is_taken_where_it_is_installed_and_missed_aloud_where_not(language, tokenizer, name, monkeypatch):
    references = [[TEXTS[language][0]]]
    monkeypatch.setattr(overlap, "find_spec", lambda module: module)
    assert tokenizer_of(references) == tokenizer
    assert bleu_notes(references, [], tokenize="auto") == []
    monkeypatch.setattr(overlap, "find_spec", lambda module: None)
    assert bleu_notes(references, [], tokenize="auto") == [
        f"the texts are in {name} and are split into characters, because sacreBLEU's tokenizer {tokenizer} is not installed: pip install 'sacrebleu[{language}]'."
    ]


@pytest.mark.parametrize(
    ("language", "tokenize", "noted"),
    [
        ("zh", "13a", True),
        ("zh", "intl", True),
        ("zh", "zh", False),
        ("ja", "13a", True),
        ("ja", "zh", True),
        ("ja", "char", False),
        ("th", "13a", True),
        ("th", "zh", True),
        ("ko", "13a", False),
        ("ru", "13a", False),
        ("de", "13a", False),
    ],
)
def test_bleu_says_which_scripts_a_tokenizer_does_not_split(language, tokenize, noted):
    found = bleu_notes([[TEXTS[language][0]]], [TEXTS[language][1]], tokenize=tokenize)
    assert bool(found) == noted
    assert all(
        note.startswith(f"the tokenizer {tokenize} does not split") and note.endswith("Use --set bleu.tokenize=auto.")
        for note in found
    )


def test_a_script_that_the_tokenizer_of_most_references_does_not_split_is_noted():
    (note,) = bleu_notes([["На улице идёт дождь. " * 3], ["猫在窗边睡觉。"]], ["", ""], tokenize="auto")
    assert note.startswith("the tokenizer 13a does not split texts in scripts without spaces (Han): ")
    assert note.endswith("Use --set bleu.tokenize=char.")


def test_a_chinese_word_in_an_english_text_is_not_noted():
    assert bleu_notes([["The character 猫 means cat, and so on, and so forth."]], [""], tokenize="13a") == []
    assert bleu_notes([[""]], [""], tokenize="13a") == []
    assert tokenizer_of([["The character 猫 means cat, and so on, and so forth."]]) == "13a"


# ── languages and sentences ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("language", [code for code in TEXTS if code != "de"])
def test_a_script_suggests_its_language(language):
    assert [language_of([text]) for text in TEXTS[language][:2]] == [language] * 2


def test_languages_of_mixed_and_empty_texts():
    assert language_of([TEXTS["de"][0]]) == language_of([]) == language_of(["12 !"]) == language_of(["ᚠᚢᚦ"]) == "en"
    assert language_of(["iPhone 手机很好用, Android 手机也很好用"]) == "zh"
    assert language_of(["这家店叫做の家，东西很好吃，我们昨天去了那里吃饭还买了书"]) == "zh"
    assert language_of(["Այսօր"]) == "hy"
    assert language_of(["ዛሬ"]) == "am"
    assert language_of(["ယနေ့"]) == "my"


def test_blocks_of_scripts_do_not_overlap():
    blocks = sorted(
        [int(end, 16) for end in block.split("-")] for *_, written in SCRIPTS.values() for block in written.split()
    )
    ends = [end for block in blocks for end in block]
    assert ends == sorted(ends)
    names = {
        "Han": "CJK",
        "kana": "HIRAGANA",
        "Cyrillic": "CYRILLIC",
        "Thai": "THAI",
        "Arabic": "ARABIC",
        "Hangul": "HANGUL",
        "Greek": "GREEK",
    }
    for letter in "中ぁжกعहΩ가ﬁéݐἀ":
        assert unicodedata.name(letter).startswith(names.get(script(letter), script(letter).upper())), letter


def test_letters_are_counted_by_script():
    found = letters(["Käse 12", "猫!"])
    assert (found.total, found.scripts) == (5, Counter(Latin=4, Han=1))
    assert found.share_not_ascii == pytest.approx(0.4)


@pytest.mark.parametrize("splitter", RULES)
@pytest.mark.parametrize("language", TEXTS)
def test_sentences_end_where_their_language_ends_them(language, splitter):
    text = TEXTS[language][0]
    parts = sentences(text, splitter)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert len(parts) == (1 if language == "th" else 2)


def test_german_rules_are_used_where_german_is_named():
    text = "Am 3. Oktober kommt Dr. Müller z. B. nach Köln. Er bleibt."
    for splitter in RULES:
        assert sentences(text, splitter, language="de") == [
            "Am 3. Oktober kommt Dr. Müller z. B. nach Köln.",
            "Er bleibt.",
        ]
    assert len(sentences(text)) > 2
    one, turned = "Am 3. Oktober kommt er.", "Oktober kommt er am 3."
    named = rouge([[one]], [turned], tokens="auto", sentences="pysbd", language="de")
    assert named.values["rougeLsum"] == named.values["rougeL"] == [60]  # one sentence each: Oktober kommt er
    assert rouge([[one]], [turned], tokens="auto", sentences="pysbd").values["rougeLsum"] == [100]  # English: Am 3. | …
    assert "|lsum:pysbd|language:de|tokens:auto|" in named.signature


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("好。」走了！？真的", ["好。」", "走了！？", "真的"]),
        ("하나. 둘! 셋? 3.5", ["하나.", "둘!", "셋?", "3.5"]),
        ("ក។ ខ។", ["ក។", "ខ។"]),
        ("한다。또 한다。", ["한다。", "또 한다。"]),
    ],
)
def test_languages_without_rules_end_sentences_at_the_marks_of_any_script(text, parts):
    assert sentences(text, language="xx") == parts


@pytest.mark.parametrize(
    ("language", "text"),
    [("km", "ក។ ខ។"), ("bo", "ཀ། ཁ།"), ("am", "ዛሬ። ነገ።"), ("hy", "Այսօր։ Վաղը։"), ("my", "ယနေ့။ မနက်။")],
)
def test_marks_of_scripts_end_sentences_with_sentencex(language, text):
    assert language_of([text]) == language
    assert sentences(text, "sentencex") == text.split()


def test_sentencex_says_which_language_it_does_not_know():
    (note,) = splitting_notes([TEXTS["ko"][0], "A cat."], "sentencex", "auto", "data.language")
    assert (
        note
        == "sentencex has no rules for Korean: 1 of 2 texts are split at line ends and after . ! ? 。 । and the like."
    )
    assert splitting_notes(["a"], "sentencex", "xx", "")[0].startswith("sentencex has no rules for 'xx': 1 of 1 texts")
    (note,) = splitting_notes([TEXTS["de"][0]], "sentencex", "auto", "data.language")
    assert note.startswith("sentences are split by the rules of English, but some")
    for language in ("zh", "ja", "ru", "hi", "ar", "el"):
        assert splitting_notes([TEXTS[language][0]], "sentencex", "auto", "") == []
    for language, known in (("ta", "sentencex"), ("ur", "pysbd")):
        assert [name for name in RULES if not splitting_notes(["a"], name, language, "")] == [known]


def test_splitting_says_which_language_it_does_not_know():
    korean, german = TEXTS["ko"][0], TEXTS["de"][0]
    assert splitting_notes([korean, "A cat."], "pysbd", "auto", "data.language") == [
        "pysbd has no rules for Korean: 1 of 2 texts are split at line ends and after . ! ? 。 । and the like."
    ]
    assert splitting_notes(["a"], "pysbd", "xx", "")[0].startswith("pysbd has no rules for 'xx': 1 of 1 texts")
    assert splitting_notes([german], "pysbd", "auto", "data.language") == [
        "sentences are split by the rules of English, but some texts seem to be in another language. Name it, for example data.language=de."
    ]
    assert splitting_notes([german], "pysbd", "de", "") == splitting_notes([korean], "newline", "auto", "") == []
    assert (
        splitting_notes(["A cat."], "pysbd", "auto", "") == splitting_notes([TEXTS["ru"][0]], "pysbd", "auto", "") == []
    )
    assert len(said(korean, korean, sentences="pysbd", tokens="auto")) == 1
    with pytest.raises(ValueError, match="the language must be auto or a code of two letters such as de, got 'german'"):
        sentences("A.", language="german")


@pytest.mark.parametrize(("metric", "texts"), [("summac", 2), ("factcc", 1)])
def test_metrics_of_sentences_say_which_language_they_do_not_know(metric, texts):
    given = {"documents": [TEXTS["ko"][0]], "predictions": [TEXTS["ko"][1]]}
    (note,) = METRICS[metric].notes_on(given, {})
    assert note.startswith(f"pysbd has no rules for Korean: {texts} of {texts} texts")
    assert (
        METRICS[metric].notes_on(given, {"splitter": "newline"})
        == METRICS[metric].notes_on(given, {"language": "de"})
        == []
    )


def test_a_chinese_line_that_pysbd_spoils_is_split_after_its_marks(monkeypatch):
    stand_in = types.ModuleType("pysbd")
    stand_in.Segmenter = lambda **_: types.SimpleNamespace(segment=lambda line: [])
    monkeypatch.setitem(sys.modules, "pysbd", stand_in)
    assert splitting.sentences("猫在睡觉。外面下雨。") == ["猫在睡觉。", "外面下雨。"]


# ── the recipe's language ────────────────────────────────────────────────────────────────────────────────────────────

GERMAN = "Am 3. Oktober kommt Dr. Müller z. B. nach Köln. Er bleibt."


@pytest.fixture
def german(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("test.jsonl").write_text(json.dumps({"document": GERMAN, "summary": "Müller bleibt."}) + "\n")
    return "test=test.jsonl"


def test_lead_sentences_are_those_of_the_language(german, capsys):
    arguments = ["generate", "lead-1", "--data", german]
    assert main([*arguments, "--out", "plain"]) == 0
    assert "Name it, for example --set data.language=de." in capsys.readouterr().err
    assert main([*arguments, "--out", "named", "--set", "data.language=de"]) == 0
    assert "language" not in capsys.readouterr().err
    plain, named = (
        json.loads(Path(folder, "predictions.jsonl").read_text())["prediction"] for folder in ("plain", "named")
    )
    assert (plain, named) == ("Am 3.", GERMAN.removesuffix(" Er bleibt."))
    assert json.loads(Path("named/generation.json").read_text())["language"] == "de"


def test_statistics_count_the_sentences_of_the_language(german, capsys):
    def counted(*options):
        assert main(["data", "stats", german, "--json", *options]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out)["splits"]["test"], printed.err

    split, said = counted("--language", "de")
    assert (split["source_sentences"], split["notes"], "language" in said) == (2, [], False)
    split, said = counted()
    assert split["source_sentences"] > 2
    assert said.rstrip().endswith(split["notes"][0])
    assert "Name it, for example --language=de." in said
    assert main(["data", "stats", german, "--language", "German"]) == 2
    assert (
        "error: the language must be auto or a code of two letters such as de, got 'German'." in capsys.readouterr().err
    )


def test_separators_stand_before_the_sentences_of_the_recipes_language():
    pytest.importorskip("transformers")
    import tiny_tokenizers

    from ngramloss import recipe
    from ngramloss.data.tokens import Shape, separator_id, sources

    tokenizer = tiny_tokenizers.FAMILIES["bart"]()
    counts = {}
    for language in ("auto", "de"):
        data = recipe.load("demo", [f"data.language={language}"]).data
        shape, separator = Shape.of(data), separator_id(tokenizer, "auto")
        counts[language] = sources([GERMAN], tokenizer, shape, separator)[0].count(separator) - 1
    assert counts["de"] == 2 < counts["auto"]
