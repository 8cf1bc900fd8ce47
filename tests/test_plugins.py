"""Objectives and metrics from outside the package: by --plugin, by entry point, or in a program."""

import functools
import importlib
import json
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest
import torch

import ngramloss as ng
from ngramloss import plugins, recipe
from ngramloss.cli import main
from ngramloss.errors import UserError
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.metrics.registry import METRICS, score_owners
from ngramloss.storage.files import fingerprint

OBJECTIVE = """\
import ngramloss as ng


def halves(stats, labels, *, power: float = 1.0):
    '''One half raised to a power, whatever is predicted.'''
    return stats.lse[:, 0] * 0 + 0.5**power


ng.OBJECTIVES["halves"] = ng.Objective(
    halves, least_n=None, options={"power": ng.Setting(1.0, least=0, most=10)})
"""
METRIC = """\
import ngramloss as ng


def vowels(predictions, *, letters: str = "aeiou"):
    '''Vowels of each prediction.'''
    counts = [float(sum(letter in letters for letter in text)) for text in predictions]
    return ng.Scores({"vowels": counts}, f"vowels|letters:{letters}")


ng.METRICS["vowels"] = ng.Metric(vowels, reads=("predictions",), scores={"vowels": ng.Score("Vowels", "a, e, i, o, u")},
                                 options={"letters": ng.Setting("aeiou")})
"""


@pytest.fixture(autouse=True)
def own_packages():
    """Packages that a test pretends to have installed are gone after it."""
    yield
    for registry in (OBJECTIVES, METRICS):
        registry.__dict__.pop("_installed", None)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OBJECTIVE + METRIC.replace("import ngramloss as ng\n", ""))
    rows = [("1", "the cat sat on the mat"), ("2", "it rained")]
    (tmp_path / "refs.jsonl").write_text(
        "".join(json.dumps({"id": key, "reference": text}) + "\n" for key, text in rows)
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": key, "prediction": text}) + "\n" for key, text in rows))
    return tmp_path


def test_the_examples_are_as_short_as_promised():
    for text in (OBJECTIVE, METRIC):
        assert len([line for line in text.splitlines() if line.strip()]) <= 10


def test_a_metric_from_outside_is_in_the_table_the_json_and_the_page(files, capsys):
    given = ["--plugin", "mine.py", "--references", "refs.jsonl", "a.jsonl", "--metrics", "rouge,vowels"]
    assert main(["score", *given, "--set", "vowels.letters=a"]) == 0
    shown = capsys.readouterr().out
    assert "vowels" in shown.splitlines()[0]
    assert "vowels|letters:a|ngramloss:" in shown
    assert main(["score", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["systems"][0]["scores"]["vowels"] == (6 + 4) / 2
    assert main(["report", *given, "-o", "page"]) == 0
    page = (files / "page" / "index.html").read_text()
    assert "Vowels" in page
    assert "a, e, i, o, u" in page


def test_an_objective_from_outside_is_explained_listed_and_shown_by_doctor(files, capsys):
    explained = ["explain", "--reference", "a b", "--candidate", "a c", "--objective", "ce + 2*halves(power=2)"]
    assert main([*explained, "--plugin", "mine.py"]) == 0
    assert "halves(power=2) = " in (shown := capsys.readouterr().out)
    assert "value 0.2500" in shown
    assert main(["list", "objectives", "--plugin", "mine.py"]) == 0
    assert "halves " in (shown := capsys.readouterr().out)
    assert "One half raised to a power, whatever is predicted. (plugin)" in shown
    assert main(["list", "metrics", "--plugin", "mine.py"]) == 0
    assert "vowels.letters" in capsys.readouterr().out
    assert main(["doctor", "--plugin", "mine.py"]) == 0
    shown = capsys.readouterr().out
    assert any(line.split() == ["halves", "ready", "(plugin)"] for line in shown.splitlines())
    assert any(line.split() == ["vowels", "ready", "(plugin)"] for line in shown.splitlines())
    assert main(["doctor", "--json", "--plugin", "mine.py"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["vowels"] == {
        "ready": True,
        "state": "ready",
        "origin": "plugin",
    }


def test_options_from_outside_are_checked_like_our_own(files, capsys):
    assert (
        main(
            [
                "explain",
                "--reference",
                "a",
                "--candidate",
                "a",
                "--objective",
                "halves(power=11)",
                "--plugin",
                "mine.py",
            ]
        )
        == 2
    )
    assert "halves(power): must be at most 10, got 11.0." in capsys.readouterr().err
    assert (
        main(
            [
                "score",
                "--plugin",
                "mine.py",
                "--references",
                "refs.jsonl",
                "a.jsonl",
                "--metrics",
                "vowels",
                "--set",
                "vowels.letter=a",
            ]
        )
        == 2
    )
    assert "vowels.letter: unknown option. Did you mean 'letters'?" in capsys.readouterr().err


TINY = [
    "train",
    "demo",
    "--run",
    "run",
    "--set",
    "objective=ce + halves",
    "--set",
    "data.limit=32",
    "--set",
    "model.width=16",
    "--set",
    "model.encoder_layers=1",
    "--set",
    "model.decoder_layers=1",
    "--set",
    "model.feed_forward=16",
    "--set",
    "model.vocabulary=300",
    "--set",
    "model.heads=2",
    "--set",
    "data.max_source=32",
    "--set",
    "data.max_target=8",
    "--set",
    "train.eval_every=0",
    "--set",
    "train.save_every=1",
    "--set",
    "train.log_every=1",
    "--set",
    "train.batch_size=4",
    "--set",
    "train.accumulate=1",
    "--set",
    "train.warmup_steps=0",
]


def test_a_run_with_an_objective_from_outside_generates_and_scores_without_it(files, capsys, monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(files / "cache"))
    two = [*TINY, "--set", "train.max_steps=2"]
    assert main([*two, "--plugin", "mine.py"]) == 0
    card = (files / "run" / "card.md").read_text()
    assert "* `plugin objective halves`, source " in card
    assert '"halves": 0.5' in (files / "run" / "log.jsonl").read_text()
    OBJECTIVES._added.clear()
    capsys.readouterr()
    assert main(two) == 2
    assert "unknown objective 'halves'." in (message := capsys.readouterr().err)
    assert "If it is your own, load its file with --plugin FILE." in message
    assert main(["generate", "run", "--limit", "2"]) == 0
    assert main(["score", "run"]) == 0
    assert main(["report", "run", "-o", "page"]) == 0
    assert "ce + halves" in (files / "page" / "index.html").read_text()


def test_a_run_is_not_continued_with_other_code(files, capsys, monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(files / "cache"))
    # Its first checkpoint is written, then it is interrupted.
    dies = "    import pathlib\n    if pathlib.Path('run/checkpoints/checkpoint-1').is_dir():\n        raise KeyboardInterrupt\n    return stats"
    (files / "dies.py").write_text((files / "mine.py").read_text().replace("    return stats", dies))
    three = [*TINY, "--set", "train.max_steps=3"]
    assert main([*three, "--plugin", "dies.py"]) == 130
    assert (files / "run" / "checkpoints" / "checkpoint-1").is_dir()
    capsys.readouterr()
    assert main([*three, "--plugin", "mine.py"]) == 2
    message = capsys.readouterr().err
    assert "settings, data or code of run have changed since it was started:\n  plugin objective halves: " in message
    assert "Restore the code of the plugin.\nTo train with the new ones, " in message


def test_scores_of_a_changed_metric_are_computed_anew(files, capsys):
    folder = files / "run"
    folder.mkdir()
    rows = [("1", "aab"), ("2", "b")]
    (folder / "predictions.jsonl").write_text(
        "".join(json.dumps({"id": key, "prediction": text}) + "\n" for key, text in rows)
    )
    (folder / "generation.json").write_text("{}")
    given = ["score", "--plugin", "mine.py", "--references", "refs.jsonl", "run", "--metrics", "vowels", "--json"]
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["systems"][0]["scores"]["vowels"] == 1.0
    METRICS._added.clear()
    (files / "mine.py").write_text((files / "mine.py").read_text().replace("float(sum(", "float(2 * sum("))
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["systems"][0]["scores"]["vowels"] == 2.0


# Code of a second file

HELPED = """\
import sys
sys.path.insert(0, {folder!r})
import ngramloss as ng
{imported}

def helped(predictions):
    return ng.Scores({{"helped": [{called} for _ in predictions]}}, "helped")

ng.METRICS["helped"] = ng.Metric(helped, reads=("predictions",))
"""
LAYOUTS = {
    "beside the plugin": ({"helper.py": "def value(): return 1.0"}, "import helper", "helper.value()", "helper.py"),
    "a name of it": ({"helper.py": "def value(): return 1.0"}, "from helper import value", "value()", "helper.py"),
    "imported in a function": (
        {"helper.py": "def value(): return 1.0"},
        "def late():\n    import helper\n    return helper.value()",
        "late()",
        "helper.py",
    ),
    "imported by its name": (
        {"helper.py": "def value(): return 1.0"},
        "import importlib\nhelper = importlib.import_module('helper')",
        "helper.value()",
        "helper.py",
    ),
    "imported by a helper": (
        {"helper.py": "import deeper\ndef value(): return deeper.ONE", "deeper.py": "ONE = 1.0"},
        "import helper",
        "helper.value()",
        "deeper.py",
    ),
    "a package": (
        {"pack/__init__.py": "", "pack/inner.py": "def value(): return 1.0"},
        "from pack import inner",
        "inner.value()",
        "pack/inner.py",
    ),
    "what a package runs first": (
        {"pack/__init__.py": "ONE = 1.0", "pack/inner.py": "from . import ONE\ndef value(): return ONE"},
        "import pack.inner",
        "pack.inner.value()",
        "pack/__init__.py",
    ),
    "a relative import": (
        {"pack/__init__.py": "", "pack/inner.py": "from .most import value", "pack/most.py": "def value(): return 1.0"},
        "from pack.inner import value",
        "value()",
        "pack/most.py",
    ),
    "a relative import of a package above": (
        {
            "pack/__init__.py": "",
            "pack/sub/__init__.py": "",
            "pack/sub/inner.py": "from ..most import value",
            "pack/most.py": "def value(): return 1.0",
        },
        "from pack.sub.inner import value",
        "value()",
        "pack/most.py",
    ),
    "a package without a file of its own": (
        {"space/inner.py": "def value(): return 1.0"},
        "from space.inner import value",
        "value()",
        "space/inner.py",
    ),
}


OWN = {"helper", "deeper", "pack", "space", "theirs", "other"}


@pytest.fixture
def forget_modules(monkeypatch):
    """Modules of a test's own are gone after it, and where it looked for them."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
        METRICS._added.clear()
        importlib.invalidate_caches()

    yield forget
    forget()


def helped(files, layout, *, elsewhere=False):
    """Write a plugin and its helpers; return the helper to change, and the command that scores with the plugin."""
    folder = files / "elsewhere" if elsewhere else files
    written, imported, called, changed = LAYOUTS[layout]
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (files / "helped.py").write_text(HELPED.format(imported=imported, called=called, folder=str(folder)))
    (files / "run").mkdir()
    (files / "run" / "predictions.jsonl").write_text((files / "a.jsonl").read_text())
    (files / "run" / "generation.json").write_text("{}")
    given = ["--references", "refs.jsonl", "run", "--metrics", "helped", "--json"]
    return folder / changed, ["score", "--plugin", "helped.py", *given]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "elsewhere"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_computed_anew_if_a_helper_has_changed(files, capsys, forget_modules, layout, elsewhere):
    helper, command = helped(files, layout, elsewhere=elsewhere)

    def score():
        forget_modules()
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)["systems"][0]["scores"]["helped"]

    assert score() == 1.0
    saved = (files / "run" / "scores.json").read_text()
    assert score() == 1.0
    assert (files / "run" / "scores.json").read_text() == saved
    helper.write_text(helper.read_text().replace("1.0", "2.50"))
    assert score() == 2.5


def test_a_run_is_not_continued_if_a_helper_has_changed(files, capsys, monkeypatch, forget_modules):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(files / "cache"))
    (files / "helper.py").write_text("HALF = 0.5\n")
    start = f"import sys\nsys.path.insert(0, {str(files)!r})\nimport helper\n"
    (files / "mine.py").write_text(start + OBJECTIVE.replace("0.5**power", "helper.HALF**power"))
    three = [*TINY, "--set", "train.max_steps=3", "--set", "train.save_every=1", "--set", "train.keep=3"]
    command = [*three, "--plugin", "mine.py"]
    assert main(command) == 0
    shutil.rmtree(files / "run" / "model")
    for step in (2, 3):
        shutil.rmtree(files / "run" / "checkpoints" / f"checkpoint-{step}")
    OBJECTIVES._added.clear()
    (files / "helper.py").write_text("HALF = 0.25\n")
    forget_modules()
    capsys.readouterr()
    assert main(command) == 2
    assert "have changed since it was started:\n  plugin objective halves: " in capsys.readouterr().err


def source_of(files, text):
    """The hash of the code of a metric that a plugin adds."""
    METRICS._added.clear()
    (files / "plugin.py").write_text(text)
    plugins.load_file(files / "plugin.py")
    return METRICS.source("mine")


@pytest.mark.parametrize(
    "function",
    ["helper.value", "functools.partial(helper.value)", "wrapped(helper.value)", "'helper:value'", "helper.Value()"],
)
def test_the_code_of_a_metric_is_that_of_its_function_whatever_wraps_it(files, forget_modules, function):
    text = f"import functools, sys\nsys.path.insert(0, {str(files)!r})\nimport helper\nimport ngramloss as ng\n"
    text += "def wrapped(function):\n    return functools.wraps(function)(lambda *_: function(*_))\n"
    text += f"ng.METRICS['mine'] = ng.Metric({function})"
    helper = "def value(*_): ...\nclass Value:\n    def __call__(self, *_): ...\n"
    (files / "helper.py").write_text(helper)
    first = source_of(files, text)
    assert source_of(files, text) == first
    (files / "helper.py").write_text(helper + "# changed\n")
    assert source_of(files, text) != first
    (files / "helper.py").write_text(helper)
    assert source_of(files, text + "  # another option, maybe") != first, "the file that adds it counts, too"


def test_the_code_of_a_metric_that_a_program_adds_is_that_of_its_function(files, monkeypatch, forget_modules):
    monkeypatch.syspath_prepend(str(files))
    (files / "helper.py").write_text("def value(*_): ...\n")
    METRICS["mine"] = ng.Metric(functools.partial(importlib.import_module("helper").value))
    assert METRICS.source("mine") == fingerprint([files / "helper.py"])
    METRICS["mine"] = ng.Metric(len)
    assert METRICS.source("mine") == "", "it has no file"


def test_the_code_of_a_plugin_without_helpers_has_the_hash_of_its_file(files):
    """Runs and scores of earlier versions have this hash."""
    text = "import ngramloss as ng, json, numpy\nng.METRICS['mine'] = ng.Metric(lambda references, predictions: 0)"
    assert source_of(files, text) == fingerprint([files / "plugin.py"])


def test_a_helper_that_cannot_be_parsed_still_counts(files, forget_modules):
    (files / "helper.py").write_text("def broken(:\n")
    text = "import ngramloss as ng\ndef mine(*_):\n    import helper\nng.METRICS['mine'] = ng.Metric(mine)"
    first = source_of(files, text)
    (files / "helper.py").write_text("def broken(::\n")
    assert source_of(files, text) != first


def test_of_installed_packages_only_the_entrys_own_modules_count(files, monkeypatch, forget_modules):
    installed = files / "lib" / "site-packages"
    for name, text in {
        "theirs/__init__.py": "",
        "theirs/metric.py": "from ngramloss import Metric\nimport other\nfrom theirs import more\nMINE = Metric(more.score)",
        "theirs/more.py": "def score(references, predictions): ...",
        "theirs/unused.py": "",
        "other.py": "",
    }.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text + "\n")
    monkeypatch.syspath_prepend(str(installed))
    entry_point("theirs", "theirs.metric:MINE", "ngramloss.metrics", monkeypatch)
    first = METRICS.source("theirs")
    for name, counts in {
        "theirs/__init__.py": True,
        "theirs/metric.py": True,
        "theirs/more.py": True,
        "theirs/unused.py": False,
        "other.py": False,
    }.items():
        before = (installed / name).read_text()
        (installed / name).write_text(before + "# changed\n")
        assert (METRICS.source("theirs") != first) == counts, name
        (installed / name).write_text(before)
    assert METRICS.source("rouge") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no')", "the plugin bad.py failed in line 1: RuntimeError: no"),
        ("x = (", "the plugin bad.py failed: SyntaxError: '(' was never closed (bad.py, line 1)"),
        (
            "import ngramloss as ng\nng.OBJECTIVES['ce'] = ng.Objective(len)",
            "ngramloss has its own objective 'ce'. Choose another name for yours.",
        ),
        (
            "import ngramloss as ng\nng.METRICS['my metric'] = ng.Metric(len)",
            "metric 'my metric': use a name of letters, digits and underscores.",
        ),
        (
            "import ngramloss as ng\nng.METRICS['mine'] = len",
            "the metric 'mine' must be an ngramloss.Metric, got builtin_function_or_method.",
        ),
    ],
)
def test_a_plugin_that_fails_is_an_error_with_its_place(files, capsys, text, message):
    (files / "bad.py").write_text(text)
    assert main(["list", "metrics", "--plugin", "bad.py"]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_a_plugin_that_is_not_there_is_an_error(files, capsys):
    assert main(["list", "metrics", "--plugin", "none.py"]) == 2
    assert "there is no plugin file none.py." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.txt", "mine.pyc", "mine"])
def test_a_plugin_that_is_not_a_python_file_is_an_error(files, capsys, name):
    (files / name).write_text(METRIC)
    assert main(["list", "metrics", "--plugin", name]) == 2
    assert f"error: a plugin is a Python file, got {name}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'mine': [1.0]}", "the metric 'mine' must return ngramloss.Scores, got dict."),
        (
            "ng.Scores({'other': [1.0, 2.0]}, 's')",
            "the metric 'mine' returned the score 'other', which its entry does not name. It names mine.",
        ),
        ("ng.Scores({'mine': [1.0]}, 's')", "the metric 'mine' returned 1 values for 'mine', expected 2 values."),
        ("ng.Scores({'mine': 1.0}, 's')", "the metric 'mine' returned float for 'mine', expected 2 values."),
        ("ng.Scores([1.0, 2.0], 's')", "the metric 'mine' must return Scores(values, signature) with a dict"),
        (
            "ng.Scores({'mine': [1.0, 2.0]}, None)",
            "the metric 'mine' must return Scores(values, signature) with a dict",
        ),
        *(
            (
                f"ng.Scores({{'mine': [1.0, {value}]}}, 's')",
                f"the metric 'mine' must return numbers, or NaN for a document without a score; 'mine' has {shown}.",
            )
            for value, shown in (("'x'", "'x'"), ("None", "None"), ("True", "True"))
        ),
    ],
)
def test_a_metric_that_returns_something_else_is_an_error(files, capsys, returned, message):
    (files / "odd.py").write_text(
        f"import ngramloss as ng\nng.METRICS['mine'] = ng.Metric(lambda references, predictions: {returned})"
    )
    assert main(["score", "--plugin", "odd.py", "--references", "refs.jsonl", "a.jsonl", "--metrics", "mine"]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_a_document_may_have_no_score(files, capsys):
    (files / "odd.py").write_text(
        "import ngramloss as ng\nng.METRICS['mine'] = ng.Metric(\n"
        "    lambda references, predictions: ng.Scores({'mine': [1.0, float('nan')]}, 's'))"
    )
    assert main(["score", "--plugin", "odd.py", "--references", "refs.jsonl", "a.jsonl", "--metrics", "mine"]) == 0


ODD = "import ngramloss as ng\nimport torch\n\n\ndef odd({takes}):\n    return {returned}\n\n\n{entry}\n"
AS_OBJECTIVE = "ng.OBJECTIVES['odd'] = ng.Objective(odd, least_n=None)"
AS_METRIC = "ng.METRICS['odd'] = ng.Metric(odd)"
EXPLAINED = ["explain", "--reference", "a b c", "--candidate", "a c c", "--objective", "ce + odd", "--plugin", "odd.py"]
SCORED = ["score", "--references", "refs.jsonl", "a.jsonl", "--metrics", "odd", "--plugin", "odd.py"]


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("stats.lse", "torch.float64 of shape [1, 3] on cpu"),
        ("stats.lse.sum()", "torch.float64 of shape [] on cpu"),
        ("stats.lse[:0, 0]", "torch.float64 of shape [0] on cpu"),
        ("(stats.lse > 0).any(-1)", "torch.bool of shape [1] on cpu"),
        ("labels[:, 0]", "torch.int64 of shape [1] on cpu"),
        ("stats.lse[:, 0].to('meta')", "torch.float64 of shape [1] on meta"),
        ("1.0", "float"),
        ("None", "NoneType"),
        ("(stats.lse[:, 0], 1)", "tuple"),
    ],
)
def test_an_objective_that_returns_something_else_is_an_error(files, capsys, returned, got):
    (files / "odd.py").write_text(ODD.format(takes="stats, labels", returned=returned, entry=AS_OBJECTIVE))
    assert main(EXPLAINED) == 2
    assert capsys.readouterr().err == (
        "error: the objective 'odd' must return a floating-point number for each row, a tensor of shape [1] on cpu, "
        f"got {got}. ngramloss docs add_objective has an example.\n"
    )


def test_candidates_of_an_objective_from_outside_are_checked_by_rows():
    right = lambda stats: stats.logp.sum(-1)  # noqa: E731
    OBJECTIVES["right"] = ng.Objective(right, least_n=None, reads="candidates")
    OBJECTIVES["wrong"] = ng.Objective(lambda stats: stats.logp, least_n=None, reads="candidates")
    numbers = torch.zeros(2, 3)
    given = {"candidates": ng.CandidateStats(numbers, numbers + 1, numbers)}
    logits, labels = torch.zeros(2, 4, 5), torch.ones(2, 4, dtype=torch.long)
    assert torch.isfinite(ng.JointLoss("ce + right")(logits, labels, **given))
    with pytest.raises(UserError, match=r"a tensor of shape \[2\] on cpu, got torch.float32 of shape \[2, 3\]"):
        ng.JointLoss("ce + wrong")(logits, labels, **given)


@pytest.mark.parametrize(
    ("entry", "command", "noun"), [(AS_OBJECTIVE, EXPLAINED, "objective"), (AS_METRIC, SCORED, "metric")]
)
def test_a_function_that_takes_other_arguments_is_an_error(files, capsys, entry, command, noun):
    (files / "odd.py").write_text(ODD.format(takes="stats", returned="1", entry=entry))
    assert main(command) == 2
    assert (
        f"error: the function of the {noun} 'odd' cannot be called as its entry says: odd() takes 1 positional argument "
        "but 2 were given.\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("entry", "command"), [(AS_OBJECTIVE, EXPLAINED), (AS_METRIC, SCORED)])
@pytest.mark.parametrize(
    ("returned", "raised"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("torch.zeros(2) @ torch.zeros(3)", "RuntimeError: "),
        ("open('nowhere')", "FileNotFoundError: "),
        ("len(1)", "TypeError: object of type 'int' has no len()"),
    ],
)
def test_an_error_inside_a_plugin_is_shown_as_its_own_with_its_line(files, capsys, entry, command, returned, raised):
    (files / "odd.py").write_text(ODD.format(takes="a, b", returned=returned, entry=entry))
    assert main(command) == 1
    told = capsys.readouterr().err
    assert f"error: the plugin {files}/odd.py, line 6 raised {raised}" in told
    assert f'File "{files}/odd.py", line 6, in odd\n    return {returned}\n' in told
    assert "bug in ngramloss" not in told
    assert "program.py" not in told, "the traceback begins where the plugin does"


def test_two_metrics_may_not_share_a_score():
    METRICS["mine"] = ng.Metric(len, scores={"bleu": ng.Score("my BLEU")})
    with pytest.raises(UserError, match="the metrics 'bleu' and 'mine' both have a score 'bleu'"):
        score_owners(["bleu", "mine"])


@pytest.mark.parametrize("arguments", [["train", "gsum"], ["train", "demo", "--set", 'system="gsum"']])
def test_without_its_list_of_entries_ngramloss_asks_to_be_installed_again(files, monkeypatch, capsys, arguments):
    monkeypatch.setattr(ng.SYSTEMS, "_installed", {})
    monkeypatch.setattr(ng.SYSTEMS, "_added", {})
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    monkeypatch.setattr(recipe, "_files", recipe._files.__wrapped__)
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(f" {plugins.REINSTALL}\n")


def test_a_system_that_comes_with_ngramloss_is_its_own(files):
    assert (ng.SYSTEMS.origin("gsum"), ng.SYSTEMS.source("gsum")) == ("", "")
    with pytest.raises(UserError, match="ngramloss has its own system 'gsum'"):
        ng.SYSTEMS["gsum"] = ng.System("mine", ())


class FakeDistribution:
    name = "their-package"


def entry_point(name, value, group, monkeypatch):
    point = EntryPoint(name, value, group)._for(FakeDistribution())
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    for registry in (OBJECTIVES, METRICS):
        registry.__dict__.pop("_installed", None)


def test_an_installed_package_adds_a_metric_when_it_is_asked_for(files, monkeypatch, capsys):
    (files / "theirs.py").write_text(
        textwrap.dedent("""\
        from ngramloss import Metric, Scores
        MINE = Metric(lambda references, predictions: Scores({"theirs": [7.0] * len(predictions)}, "theirs"))
    """)
    )
    monkeypatch.syspath_prepend(str(files))
    entry_point("theirs", "theirs:MINE", "ngramloss.metrics", monkeypatch)
    assert "theirs" in METRICS
    assert "theirs" not in sys.modules, "its name is known before it is imported"
    assert main(["score", "--references", "refs.jsonl", "a.jsonl", "--metrics", "theirs"]) == 0
    assert "7.00" in capsys.readouterr().out
    assert METRICS.origin("theirs") == "package their-package"


def test_a_broken_package_breaks_only_what_needs_it(files, monkeypatch, capsys):
    entry_point("theirs", "not_there_at_all:MINE", "ngramloss.metrics", monkeypatch)
    assert main(["score", "--references", "refs.jsonl", "a.jsonl"]) == 0
    capsys.readouterr()
    assert main(["doctor"]) == 0
    assert "of the installed package their-package cannot be imported: ModuleNotFoundError" in capsys.readouterr().out
    assert main(["list", "metrics"]) == 0
    assert "cannot be imported" in capsys.readouterr().out
    assert main(["score", "--references", "refs.jsonl", "a.jsonl", "--metrics", "theirs"]) == 2
    assert "Fix or uninstall that package." in capsys.readouterr().err


def test_written_objectives_lists_and_recipes_need_no_torch():
    code = """if True:
        import sys
        from ngramloss.cli import main
        from ngramloss.loss.terms import parse
        assert str(parse("ce + 0.5*matches(2,3)")[1]) == "0.5*matches(2,3)"
        for arguments in (["train", "xsum", "--show"], ["list", "objectives"], ["list", "metrics"], ["list", "recipes"]):
            assert main(arguments) == 0
        assert "torch" not in sys.modules and "numpy" not in sys.modules, "imported"
    """
    # A process of its own: torch is imported in this one.
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
