"""What the entries of objectives and metrics say is what their functions do."""

import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramloss import recipe
from ngramloss.cli import main
from ngramloss.errors import UserError
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.metrics.registry import METRICS, checked_options, score_owners
from ngramloss.plugins import load_function
from ngramloss.search.registry import ENGINES
from ngramloss.settings import Setting, Switch, settings_of


@pytest.mark.parametrize(
    ("metric", "option", "value", "message"),
    [
        ("wmd", "stop_words", "German", "must be one of none, english, got 'German'"),
        ("wmd", "limit", -1, "must be at least 0, got -1"),
        ("summac", "form", "Conv", "must be one of conv, zs, got 'Conv'"),
        ("summac", "document_sentences", 0, "must be at least 1, got 0"),
        ("summac", "batch_size", 0, "must be at least 1, got 0"),
        ("bertscore", "batch_size", 0, "must be at least 1, got 0"),
        ("rouge", "tokens", "chars", "must be one of script, default, unicode, characters, auto, got 'chars'"),
        ("chrf", "word_order", -1, "must be at least 0, got -1"),
    ],
)
def test_an_option_that_a_metric_cannot_have_is_named(metric, option, value, message):
    with pytest.raises(UserError, match=f"{metric}.{option}: {message}"):
        checked_options(metric, {option: value})


def keyword_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


@pytest.mark.parametrize("name", METRICS)
def test_a_metrics_entry_has_the_options_and_defaults_of_its_function(name):
    metric = METRICS[name]
    expected = {option: default for option, default in keyword_defaults(metric.load()).items() if option != "progress"}
    stated = {
        option: inspect.Parameter.empty if setting.required else setting.default
        for option, setting in metric.options.items()
    }
    assert stated == expected


@pytest.mark.parametrize("name", METRICS)
def test_a_metrics_entry_names_the_texts_in_the_order_of_its_function(name):
    parameters = inspect.signature(METRICS[name].load()).parameters.values()
    assert METRICS[name].reads == tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)
    optional = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is None)
    assert METRICS[name].optional == optional


@pytest.mark.parametrize("name", METRICS)
def test_every_default_of_a_metric_is_allowed(name):
    for option, setting in METRICS[name].options.items():
        assert setting.help
        if not setting.required and setting.default is not None:
            assert setting.check(option, setting.default) == setting.default


def test_every_score_has_a_label_a_help_and_one_owner():
    assert len(score_owners(METRICS)) == sum(len(METRICS[name].scores) for name in METRICS)
    for name in METRICS:
        for score in METRICS[name].scores.values():
            assert score.label
            assert score.help


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objectives_entry_has_the_options_of_its_functions(name):
    entry = OBJECTIVES[name]
    for variant in (None, *entry.variants):
        expected = {
            option: default for option, default in keyword_defaults(entry.formula(variant)).items() if option != "n"
        }
        read = [option for option in entry.options if entry.option_variants.get(option, variant) == variant]
        assert {option: entry.options[option].default for option in read} == expected
        assert entry.description(variant).endswith(".")
    if find_spec("triton"):
        assert all(callable(load_function(kernel)) for kernel in entry.kernels.values())


def test_every_default_of_a_recipe_is_allowed():
    for section in recipe.SECTIONS.values():
        for key, setting in settings_of(section).items():
            assert setting.check(key, setting.default) == setting.default


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (Setting(1), "1", "k: must be a whole number, got '1'."),
        (Setting(1), 1.5, "k: must be a whole number, got 1.5."),
        (Setting(1), True, "k: must be a whole number, got True."),
        (Setting(1), 2**32, "k: must be below 4,294,967,296, got 4,294,967,296."),
        (Setting(1.0), float("nan"), "k: must be finite, got nan."),
        (Setting(1.0, least=0.5), 0.25, "k: must be at least 0.5, got 0.25."),
        (Setting(1, most=2000), 3000, "k: must be at most 2,000, got 3,000."),
        (Setting(0.1, below=1), 1, "k: must be below 1, got 1.0."),
        (Setting(1.0, above=0), 0, "k: must be above 0, got 0.0."),
        (Setting(True), 1, "k: must be true or false, got 1."),
        (Setting("auto", Switch), "on", "k: must be true, false or auto, got 'on'."),
        (Setting("a", choices=("a", "b")), "c", "k: must be one of a, b, got 'c'."),
        (Setting([], choices=("a", "b")), ["a", "c"], "k: must be one of a, b, got 'c'."),
        (Setting([]), "a", "k: must be a list of texts, got 'a'."),
        (Setting(kind=Path), 3, "k: must be a path, got 3."),
    ],
)
def test_a_value_that_is_not_allowed_is_an_error_with_its_key(setting, value, message):
    with pytest.raises(UserError) as raised:
        setting.check("k", value)
    assert str(raised.value) == message


@given(
    st.one_of(
        st.integers(),
        st.floats(),
        st.text(),
        st.booleans(),
        st.none(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.integers()),
    ),
    st.sampled_from(
        [Setting(1, least=0), Setting(0.5, most=1), Setting("x"), Setting(True), Setting([]), Setting(kind=Path)]
    ),
)
def test_any_value_is_of_its_kind_or_an_error_with_its_key(value, setting):
    try:
        checked = setting.check("k", value)
    except UserError as mistake:
        message = str(mistake)
    else:
        message = "" if isinstance(checked, setting.kind) else repr(checked)
    assert not message or message.startswith("k: must be ")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (Setting("x"), "2024", "2024"),
        (Setting("x"), "1e3", "1e3"),
        (Setting("x"), '"a b"', "a b"),
        (Setting("x"), " true ", "true "),
        (Setting(1), "8", 8),
        (Setting(0.1), "3e-5", 3e-5),
        (Setting(True), "false", False),
        (Setting([]), '["a"]', ["a"]),
    ],
)
def test_what_is_written_after_an_equals_sign_is_read_by_the_kind(setting, text, value):
    assert setting.read(text) == value
    assert type(setting.read(text)) is type(value)


def test_a_metric_whose_package_is_missing_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("one line\n")
    monkeypatch.setattr("ngramloss.metrics.registry.installed", lambda package: None if package == "sacrebleu" else "1")
    assert (
        main(["score", "--references", str(tmp_path / "a.txt"), str(tmp_path / "a.txt"), "--metrics", "rouge,bleu"])
        == 0
    )
    assert "bleu was left out: needs the package sacrebleu: pip install 'ngramloss[score]'." in capsys.readouterr().out


def test_a_recipe_takes_every_engine_by_name_and_auto():
    assert settings_of(recipe.Generation)["engine"].allowed == ("auto", *ENGINES)
    for engine in ENGINES.values():
        assert all(callable(engine.function(name)) for name in ("load", "unsupported", "differences"))
        assert engine.about


def test_the_lists_answer_without_torch():
    program = (
        "import sys; from ngramloss.cli import main\n"
        "for what in ('objectives', 'metrics', 'recipes', 'baselines', 'engines'): assert main(['list', what]) == 0\n"
        "assert 'torch' not in sys.modules, 'importing it would take seconds'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
