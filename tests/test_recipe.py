"""Recipes: every setting typed and checked, every mistake told at once."""

import dataclasses
import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.recipe import Data, Generation, Model, Recipe, Train
from ngramloss.training.learning_rates import learning_rate, warmup_steps
from ngramloss.training.system_registry import read_system

LEGAL = re.compile(r"[\w.+-]{1,200}")


def written(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def warmup_of(train, total):
    return warmup_steps(train.schedule, train.warmup_steps, total)


def complaint(name, *overrides):
    with pytest.raises(ValueError) as mistake:
        recipe.load(name, overrides)
    return str(mistake.value)


# What comes with the package


def test_the_recipes_that_come_with_the_package_load():
    assert recipe.builtin() == [
        "bertsum-abs",
        "bertsum-abs-demo",
        "bertsum-ext",
        "bertsum-ext-demo",
        "brio-cnndm",
        "brio-xsum",
        "cnndm",
        "demo",
        "drafter",
        "drafter-demo",
        "fes",
        "fes-demo",
        "gsum",
        "gsum-demo",
        "lm",
        "lm-demo",
        "newswire",
        "online-demo",
        "parallel",
        "parallel-demo",
        "pointer-generator",
        "pointer-generator-demo",
        "prophetnet",
        "prophetnet-demo",
        "sft",
        "sft-lora",
        "simcls",
        "simcls-demo",
        "translation",
        "xsum",
    ]
    assert [recipe.load(name).name for name in recipe.builtin()] == recipe.builtin()


@pytest.mark.parametrize(("name", "data"), [("cnndm", "cnn_dailymail"), ("xsum", "xsum")])
def test_the_papers_recipes_have_the_papers_settings(name, data):
    paper = recipe.load(name)
    assert paper.train == Train(
        epochs=10.0,
        max_steps=0,
        batch_size=16,
        accumulate=2,
        learning_rate=3e-5,
        warmup_steps=1000,
        schedule="linear",
        weight_decay=0.01,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        clip=1.0,
        precision="auto",
        eval_every=1000,
        save_every=1000,
        best="ce",
        early_stopping=0,
        gradient_checkpointing=False,
        compile="auto",
        fsdp=False,
    )
    assert paper.data == Data(name=data, separator="auto", prefix="", max_source=1024, max_target=128, limit=0)
    assert paper.model == Model(name="facebook/bart-base")
    assert paper.objective == "ce + matches(2,3,4)"


def test_the_papers_recipes_write_summaries_as_the_paper_does():
    cnndm, xsum = recipe.load("cnndm").generation, recipe.load("xsum").generation
    assert cnndm == Generation(num_beams=4, length_penalty=2.0, min_length=56, max_length=142, no_repeat_ngram_size=0)
    assert xsum == Generation(num_beams=6, length_penalty=1.0, min_length=11, max_length=62, no_repeat_ngram_size=0)


def test_gsum_has_its_authors_settings():
    gsum = recipe.load("gsum")
    train, search = gsum.train, gsum.generation
    assert (train.learning_rate, train.max_steps, train.warmup_steps, train.schedule) == (3e-5, 20_000, 500, "linear")
    assert (train.clip, train.weight_decay, train.batch_size * train.accumulate) == (0.1, 0.01, 64)
    assert (gsum.objective, gsum.model.name) == ("ce(smoothing=0.1)", "facebook/bart-large")
    assert search == Generation(num_beams=4, length_penalty=2.0, min_length=56, max_length=142, no_repeat_ngram_size=3)
    assert read_system(gsum.system).options == {"guidance": "oracle", "extractor": "", "sentences": 3}


def test_the_recipes_of_other_systems_have_their_authors_settings():
    """The learning rates of both codes: rate · min(s^-0.5, s · warmup^-1.5)."""
    simcls, ext, abstractive = (recipe.load(name) for name in ("simcls", "bertsum-ext", "bertsum-abs"))
    for train, theirs, rate, warmup in (
        (simcls.train, 2e-3, simcls.train.learning_rate, simcls.train.warmup_steps),
        (ext.train, 2e-3, ext.train.learning_rate, ext.train.warmup_steps),
        (abstractive.train, 0.2, abstractive.train.learning_rate, abstractive.train.warmup_steps),
        (abstractive.train, 2e-3, abstractive.train.encoder_learning_rate, abstractive.train.encoder_warmup_steps),
    ):
        for step in (1, 500, 10_000, 20_000, 50_000):
            ours = learning_rate(train.schedule, step, warmup=int(warmup), total=10**6, rate=rate)
            assert ours == pytest.approx(theirs * min(step**-0.5, step * warmup**-1.5), rel=1e-4)
        assert (train.weight_decay, train.clip) == (0, 0)
    assert (simcls.train.batch_size * simcls.train.accumulate, simcls.train.epochs) == (12, 5)
    assert (ext.train.max_steps, abstractive.train.max_steps) == (50_000, 200_000)
    assert abstractive.objective == "ce(smoothing=0.1)"
    options = {name: read_system(recipe.load(name).system).options for name in ("simcls", "bertsum-ext")}
    assert options["simcls"] == {"margin": 0.01, "gold_margin": 0, "gold_weight": 1, "pooling": "first"}
    assert options["bertsum-ext"]["layers"] == 2


@pytest.mark.parametrize(
    ("name", "objective", "rows", "lengths"),
    [
        ("brio-cnndm", "0.1*ce(smoothing=0.1) + 10*rank(margin=0.001,alpha=2)", (1, 8), (1024, 120)),
        ("brio-xsum", "0.1*ce(smoothing=0.1) + 0.1*rank(margin=0.1,alpha=0.6)", (2, 4), (512, 80)),
    ],
)
def test_brios_recipes_have_its_authors_settings(name, objective, rows, lengths):
    """The rate follows max_lr · min(s^-0.5, s · warmup^-1.5) with max_lr = 2e-3 and a warm-up of 10,000 steps."""
    brio = recipe.load(name)
    train, data = brio.train, brio.data
    assert (brio.objective, (train.batch_size, train.accumulate), (data.max_source, data.max_target)) == (
        objective,
        rows,
        lengths,
    )
    assert (train.clip, train.weight_decay, data.separator) == (0.0, 0.0, "none")
    for total in (3_000, 50_000):  # however long the training is
        how = {"warmup": warmup_of(train, total), "total": total, "rate": train.learning_rate}
        for step in (1, 100, 9_999, 10_000, 10_001, 30_000):
            rate = learning_rate(train.schedule, step - 1, **how)
            assert rate == pytest.approx(2e-3 * min(step**-0.5, step * 10_000**-1.5), rel=1e-12)


def test_the_demo_trains_a_small_model_from_scratch_on_the_built_in_corpus():
    demo = recipe.load("demo")
    assert (demo.data.name, demo.model.name, demo.model.architecture) == ("newswire", "scratch", "mbart")
    assert demo.model.copying
    assert demo.train.max_steps > 0


# Mistakes


def test_all_mistakes_are_told_at_once_each_with_the_nearest_key(tmp_path):
    path = written(
        tmp_path,
        """
        objectiv = "ce"
        objective = "ce + matchs(2)"
        colour = "red"
        [train]
        bach_size = 4
        epochs = "ten"
        accumulate = 0
        precision = "fp8"
        warmup_steps = true
        [data]
        learning_rate = 1
        max_source = 1.5
        [generation]
        min_length = 200
    """,
    )
    told = complaint(path)
    assert told.startswith(f"recipe {path} has 11 mistakes:\n")
    for line in [
        "objectiv: unknown key. Did you mean objective?",
        "colour: unknown key.",
        "train.bach_size: unknown key. Did you mean train.batch_size?",
        "data.learning_rate: unknown key. Did you mean train.learning_rate?",
        "train.epochs: must be a number, got 'ten'.",
        "train.warmup_steps: must be a number, got True.",
        "data.max_source: must be a whole number, got 1.5.",
        "train.accumulate: must be at least 1, got 0.",
        "train.precision: must be one of auto, bf16, fp16, fp32, got 'fp8'.",
        "generation.min_length: must not be above generation.max_length.",
        "objective: unknown objective 'matchs'. Did you mean 'matches'?",
    ]:
        assert f"\n  {line}" in told, line
    assert len([line for line in told.splitlines() if re.match(r"  [\w.]+: ", line)]) == 11


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("generation.seed", "train.seed"),
        ("model.keep", "train.keep"),
        ("epochs", "train.epochs"),
        ("generation.separator", "data.separator"),
        ("train.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("train.bs", "train.batch_size"),
        ("train.wd", "train.weight_decay"),
        ("train.batch", "train.batch_size"),
        ("train.num_train_epochs", "train.epochs"),
        ("train.warmup", "train.warmup_steps"),
        ("generation.beams", "generation.num_beams"),
        ("data.max_len", "generation.max_length"),
        ("data.max_source_length", "data.max_source"),
        ("train.lr_scheduler_type", "train.schedule"),
        ("train.gradient_accumulation_steps", "train.accumulate"),
    ],
)
def test_a_key_in_the_wrong_section_or_an_abbreviation_is_shown_the_key_that_was_meant(key, right):
    assert complaint("demo", f"{key}=1").endswith(f"one mistake:\n  {key}: unknown key. Did you mean {right}?")


@pytest.mark.parametrize("key", ["qqqq", "colour", "train.workers", "data.train"])
def test_a_key_like_no_other_gets_no_suggestion(key):
    assert complaint("demo", f"{key}=1").endswith(f"one mistake:\n  {key}: unknown key.")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.batch_size=true", "train.batch_size: must be a whole number, got True."),
        ("train.batch_size=8.0", "train.batch_size: must be a whole number, got 8.0."),
        ("train.learning_rate=true", "train.learning_rate: must be a number, got True."),
        ("train.learning_rate=fast", "train.learning_rate: must be a number, got 'fast'."),
        ("train.learning_rate=inf", "train.learning_rate: must be finite, got inf."),
        ("generation.length_penalty=nan", "generation.length_penalty: must be finite, got nan."),
        ("train.learning_rate=-1e-5", "train.learning_rate: must be at least 0, got -1e-05."),
        (f"train.batch_size={10**30}", "train.batch_size: must be below 4,294,967,296, got about 10^30."),
        (f"train.batch_size={-(10**30)}", "train.batch_size: must be below 4,294,967,296, got about -10^30."),
        (f"train.max_steps={2**40}", "train.max_steps: must be below 4,294,967,296, got 1,099,511,627,776."),
        (f"train.learning_rate={10**400}", "train.learning_rate: must be below 4,294,967,296, got about 10^400."),
        (f"train.batch_size={'9' * 5000}", "train.batch_size: must be a whole number, got '9999"),
        ("model.width=1_000_000", "model.width: must be at most 65,536, got 1,000,000."),
        ("model.vocabulary=100_000_000", "model.vocabulary: must be at most 16,777,216, got 100,000,000."),
        ("train.epochs=1e300", "train.epochs: must be at most 1,000,000,000, got 1e+300."),
        ("objective=matches(300000)", "objective: matches takes n of at most 1,024, got 300,000"),
        ("train.compile=1", "train.compile: must be true, false or auto, got 1."),
        ("train.report_to=wandb", "train.report_to: must be a list of texts, got 'wandb'."),
        ("train.report_to=[1]", "train.report_to: must be a list of texts, got [1]."),
        (
            'train.report_to=["wandb","excel"]',
            "train.report_to: must be one of mlflow, tensorboard, wandb, got 'excel'.",
        ),
        ("train.beta2=1", "train.beta2: must be below 1, got 1.0."),
        ("train.beta1=1.0", "train.beta1: must be below 1, got 1.0."),
        ("model.dropout=1", "model.dropout: must be below 1, got 1.0."),
        ("model.heads=3", "model.width: must be a multiple of model.heads."),
        (
            "model.architecture=gpt",
            "model.architecture: must be one of bart, mbart, m2m100, pegasus, marian, t5, prophetnet, llama, got 'gpt'.",
        ),
        ("data.splitter=nltk", "data.splitter: must be one of sentencex, pysbd, newline, period, got 'nltk'."),
        ("data.on_bad_row=drop", "data.on_bad_row: must be one of error, skip, got 'drop'."),
        ("train.schedule=step", "train.schedule: must be one of linear, cosine, "),
        ("train.memory=small", "train.memory: must be one of fast, lean, got 'small'."),
        ("train.keep=0", "train.keep: must be at least 1, got 0."),
        (
            "train.best=matches(5)",
            "train.best: must be one of loss, ce, matches(2), matches(3), matches(4), or a score such as rouge2, got 'matches(5)'.",
        ),
        ("data.name=", "data.name: must not be empty."),
        ('model.name=""', "model.name: must not be empty."),
        ("objective=ce +", "objective: expected an objective, got the end of the text:"),
        ('objective=ce + matches("2")', "objective: expected a whole number for n, got '\"':"),
        ("train=3", "train: must be a section of settings, such as train.epochs, got 3."),
        ("train.report_to.first=1", "train.report_to: must be a list of texts, got {'first': 1}."),
    ],
)
def test_a_wrong_value_is_one_mistake_that_says_what_is_expected(override, told):
    shown = complaint("demo", override)
    assert shown.startswith("recipe demo with your options has one mistake:\n  ")
    assert told in shown


def test_an_objective_of_the_wrong_kind_is_one_mistake(tmp_path):
    path = written(tmp_path, "objective = 3")
    assert complaint(path) == f"recipe {path} has one mistake:\n  objective: must be text, got 3."


def test_training_for_no_time_at_all_is_a_mistake():
    assert "train.epochs: this or train.max_steps must be above 0." in complaint("xsum", "train.epochs=0")
    assert recipe.load("xsum", ["train.epochs=0", "train.max_steps=5"]).train.max_steps == 5


def test_early_stopping_needs_validations():
    told = "train.early_stopping: needs validations, but train.eval_every is 0."
    assert told in complaint("xsum", "train.early_stopping=3", "train.eval_every=0")
    assert recipe.load("xsum", ["train.early_stopping=3"]).train.early_stopping == 3


@pytest.mark.parametrize("best", ["loss", "ce", "matches(3)"])
def test_any_term_of_the_objective_can_choose_the_best(best):
    assert recipe.load("demo", [f"train.best={best}"]).train.best == best


def test_cross_entropy_can_choose_the_best_of_an_objective_without_it():
    assert recipe.load("demo", ["objective=matches(2)", "train.best=ce"]).train.best == "ce"


# --set


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("objective=ce + matches(2)", "objective", "ce + matches(2)"),
        ('objective="ce+matches(2)"', "objective", "ce + matches(2)"),
        ("objective='ce + bag(2):original'", "objective", "ce + bag(2):original"),
        ("train.learning_rate=3e-5", "train.learning_rate", 3e-5),
        ("train.learning_rate=1", "train.learning_rate", 1.0),
        ("train.seed = 7", "train.seed", 7),
        ("train.batch_size=1_000", "train.batch_size", 1000),
        ('train.report_to=["wandb", "mlflow"]', "train.report_to", ["wandb", "mlflow"]),
        ("train.report_to=[]", "train.report_to", []),
        ("train.compile=true", "train.compile", True),
        ("train.compile=auto", "train.compile", "auto"),
        ("train.capture=false", "train.capture", False),
        ("data.name=my data/train.jsonl", "data.name", "my data/train.jsonl"),
        ("data.name=train=a.jsonl,validation=b.jsonl", "data.name", "train=a.jsonl,validation=b.jsonl"),
        ("data.name = xsum", "data.name", "xsum"),
        ("data.name=2024", "data.name", "2024"),
        ("data.name=2024-01-01", "data.name", "2024-01-01"),
        ("data.prefix=summarize: ", "data.prefix", "summarize: "),
        ('data.prefix="😀 \\u00e9"', "data.prefix", "😀 é"),
        ("data.prefix=", "data.prefix", ""),
        ("data.separator=<s>", "data.separator", "<s>"),
    ],
)
def test_set_takes_toml_and_plain_text(override, key, value):
    found = dict(recipe.flat(recipe.load("demo", [override])))[key]
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_two_overrides_counts():
    assert recipe.load("demo", ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.seed", "--set takes key=value, got 'train.seed'; for example --set train.batch_size=8."),
        ("objective.x=3", "--set objective.x=3: objective is a setting, not a section."),
        ("train.seed.x=3", "--set train.seed.x=3: seed is a setting, not a section."),
    ],
)
def test_set_says_what_it_takes(override, told):
    assert complaint("demo", override) == told


# Files and bases


def test_a_file_says_only_what_differs_from_its_base(tmp_path):
    mine = recipe.load(written(tmp_path, 'base = "cnndm"\n[train]\nseed = 7\n[generation]\nnum_beams = 2'))
    assert mine.name == "mine"
    assert recipe.differences(recipe.load("cnndm"), mine) == ["train.seed: 42 → 7", "generation.num_beams: 4 → 2"]


def test_a_base_stands_beside_the_file_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    written(tmp_path / "deep", 'base = "xsum"\nobjective = "ce"\n[train]\nseed = 1\nkeep = 5', "below.toml")
    above = recipe.load(written(tmp_path / "deep", 'base = "below.toml"\n[train]\nseed = 2', "above.toml"))
    assert (above.train.seed, above.train.keep, above.objective, above.data.name) == (2, 5, "ce", "xsum")


def test_a_name_of_ours_is_ours_whatever_stands_beside_the_file(tmp_path):
    written(tmp_path, "[train]\nseed = 9", "xsum")
    assert recipe.load(written(tmp_path, 'base = "xsum"')).train.seed == 42


def test_a_base_may_be_given_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    written(tmp_path, "[train]\nseed = 9", "here.toml")
    assert recipe.load(written(tmp_path / "deep", 'base = "here.toml"')).train.seed == 9


def test_bases_that_go_round_in_a_circle_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, 'base = "b.toml"', "a.toml")
    written(tmp_path, 'base = "./a.toml"', "b.toml")
    written(tmp_path, 'base = "self.toml"', "self.toml")
    assert complaint("a.toml") == "b.toml: recipes are based on each other in a circle: a.toml → b.toml → a.toml."
    assert "self.toml: recipes are based on each other in a circle" in complaint("self.toml")


def test_a_circle_through_another_folder_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    written(tmp_path, 'base = "deep/../self.toml"', "self.toml")
    assert "recipes are based on each other in a circle" in complaint("self.toml")


@pytest.mark.parametrize("base", ["3", '["xsum"]', '""', "true"])
def test_a_base_must_be_a_name(tmp_path, base):
    assert "base must be the name of another recipe, got" in complaint(written(tmp_path, f"base = {base}"))


def test_a_missing_base_is_told_with_the_file_that_asks_for_it(tmp_path):
    path = written(tmp_path, 'base = "xsun"')
    with pytest.raises(
        FileNotFoundError,
        match=r"there is no recipe 'xsun', the base of .*mine.toml: neither a file nor one of "
        rf"{re.escape(', '.join(recipe.builtin()))}. Did you mean 'xsum'\?",
    ):
        recipe.load(path)


def test_an_unknown_recipe_is_told_with_the_nearest():
    with pytest.raises(
        FileNotFoundError,
        match=rf"no recipe 'demmo': neither a file nor one of {re.escape(', '.join(recipe.builtin()))}. Did you mean 'demo'\?",
    ):
        recipe.load("demmo")
    with pytest.raises(FileNotFoundError, match=rf"one of {re.escape(', '.join(recipe.builtin()))}\.$"):
        recipe.load("qqqq.toml")


def test_what_is_not_toml_is_told_with_its_file_and_line(tmp_path):
    assert re.search(r"mine.toml is not TOML: .*line 2", complaint(written(tmp_path, "[train]\nseed = = 3")))


def test_what_is_not_utf8_is_told_with_its_file(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'objective = "\xff"')
    assert re.search(r"mine.toml is not TOML: .*utf-8.*\.$", complaint(str(tmp_path / "mine.toml")))


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[train]\nseed = 5\n")
    assert recipe.load(str(tmp_path / "mine.toml")).train.seed == 5


def test_a_file_of_any_ending_is_named_without_its_folder(tmp_path):
    assert recipe.load(written(tmp_path, "", "settings")).name == "settings"
    assert recipe.load(written(tmp_path, "", "v1.2.toml")).name == "v1.2"


# Written and read back

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
POSITIVE = st.floats(0, 1e300)


@st.composite
def recipes(draw):
    return Recipe(
        "recipe",
        objective=draw(st.sampled_from(["ce", "ce + matches(2,3,4)", "1e-05*ce(smoothing=0.1) + bag(2):original"])),
        data=Data(
            name=draw(TEXT),
            source=draw(TEXT),
            prefix=draw(TEXT),
            separator=draw(TEXT),
            limit=draw(st.integers(0, 2**32 - 1)),
            on_bad_row=draw(st.sampled_from(["error", "skip"])),
        ),
        model=Model(
            name=draw(TEXT), revision=draw(TEXT), dropout=draw(st.floats(0, 0.999)), copying=draw(st.booleans())
        ),
        train=Train(
            learning_rate=draw(POSITIVE),
            epsilon=draw(POSITIVE),
            epochs=draw(st.floats(1e-9, 1e9)),
            seed=draw(st.integers(0, 2**32 - 1)),
            report_to=draw(st.lists(st.sampled_from(["mlflow", "tensorboard", "wandb"]))),
        ),
        generation=Generation(length_penalty=draw(st.floats(-1e9, 1e9))),
    )


@given(recipes())
@settings(max_examples=150, deadline=None)
def test_a_recipe_that_is_written_is_read_back_the_same(one):
    text = recipe.dump(one)
    assert recipe._build_recipe("recipe", tomllib.loads(text)) == one
    text.encode()


@given(TEXT)
def test_any_text_survives_being_written_as_toml(text):
    assert tomllib.loads(f"value = {recipe._toml(text)}")["value"] == text


def test_what_is_written_to_a_file_is_read_back_the_same(tmp_path):
    one = recipe.load("demo", ['data.prefix="a\\"b\\\\c\\n\\u007f😀\\u2028"', "objective=ce+matches(2)"])
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.dump(one), encoding="utf-8")
    back = recipe.load(str(path))
    assert recipe.differences(one, back) == []
    assert back == dataclasses.replace(one, name="recipe")


def test_differences_name_the_key_and_both_values():
    one, other = recipe.load("xsum"), recipe.load("xsum", ["objective=ce", "data.name=other"])
    assert recipe.differences(one, one) == []
    assert recipe.differences(one, other) == ["objective: 'ce + matches(2,3,4)' → 'ce'", "data.name: 'xsum' → 'other'"]


# The run's name

OBJECTIVES = [
    "ce",
    "2*ce",
    "0.5*ce",
    "ce(smoothing=0.1)",
    "ce(smoothing=0.01)",
    "ce(smoothing=0)",
    "matches(2)",
    "ce + matches(2)",
    "matches(2) + ce",
    "ce(smoothing=0.1) + matches(2)",
    "ce + matches(2,3)",
    "ce + matches(23)",
    "ce + matches(2,3,4)",
    "ce + matches(23,4)",
    "ce + matches(2,34)",
    "ce + matches(234)",
    "matches(2,3)",
    "matches(2) + matches(3)",
    "ce + matches(2) + matches(3)",
    "ce + matches(2):released",
    "ce + 1e-05*matches(2)",
    "ce + 100000*matches(2)",
    "ce + 1e-16*matches(2)",
    "ce + 1e16*matches(2)",
    "ce + 0.5*matches(2)",
    "ce + 0.05*matches(2)",
    "ce + bag(2)",
    "ce + bag(2):original",
    "ce + bag(2):released",
    "ce + bleu(1,2,3,4)",
    "ce + lcs",
    "lcs",
    "ce + eisl(2)",
    "ce + rewards(2)",
    "ce + precision(1)",
    "0*ce + matches(2)",
    "bleu(12)",
    "bleu(1,2)",
    "ce + soft(2)",
    "ce + soft(2,kappa=1)",
    "ce + soft(2,1)",
    "ce + near(2)",
    "ce + near(2,power=0)",
    "accept(8,alpha=0.3):detached",
    "ce + gated(2)",
    "dft",
    "ce + dft",
    "tailr",
    "tailr(gamma=0.8,min_weight=0.2)",
    "tailr(gamma=0.82)",
    "mixce(eta=0.5)",
    "convex(order=2)",
    "ce + unlikelihood",
    "ce + rank",
    "ce + 10*rank(margin=0.001,alpha=2)",
    "ce + 10*rank(margin=0.1,alpha=2)",
    "ce + risk",
    "ce + risk(sharpness=0.05)",
    "ce + prefer",
    "ce + prefer(beta=0.1,alpha=1,margin=0.5)",
    "rank",
    "ce + policy",
    "ce + policy(baseline=others)",
    "ce + policy(baseline=others,scale=std)",
    "ce + policy(baseline=greedy)",
    "ce + credit(2)",
    "ce + credit(2,3)",
    "ce + matches(2):student",
    "ce + precision(1):student",
    "ce + bag(2):student",
]


def test_every_objective_has_a_folder_name_of_its_own():
    slugs = [recipe.load("xsum", [f"objective={written}"]).slug for written in OBJECTIVES]
    assert all(LEGAL.fullmatch(slug) for slug in slugs)
    assert len(set(slugs)) == len(OBJECTIVES), sorted(slugs)


@pytest.mark.parametrize(
    ("objective", "slug"),
    [
        ("ce", "xsum-ce"),
        ("ce + matches(2)", "xsum-matches2"),
        ("ce(smoothing=0.1)", "xsum-ce_smoothing0.1"),
        ("ce + matches(2,10)", "xsum-matches_2_10"),
        ("matches(2)", "xsum-only-matches2"),
        ("matches(2) + ce", "xsum-matches2-ce"),
        ("ce + 1e-5*matches(2)", "xsum-1e-05matches2"),
    ],
)
def test_the_folder_name_is_short_for_the_objective(objective, slug):
    assert recipe.load("xsum", [f"objective={objective}"]).slug == slug


def test_a_recipe_that_was_written_when_pysbd_split_sentences_still_does_so(tmp_path):
    written = recipe.dump(recipe.load("xsum")).replace('splitter = "sentencex"', 'splitter = "pysbd"')
    (tmp_path / "recipe.toml").write_text(written)
    before = recipe.load(str(tmp_path / "recipe.toml"))
    assert before.data.splitter == "pysbd"
    assert recipe.differences(before, recipe.load("xsum", ["data.splitter=pysbd"])) == []
    (changed,) = recipe.differences(before, recipe.load("xsum"))
    assert "data.splitter" in changed


def test_a_warm_up_is_steps_or_a_share_of_them(tmp_path):
    """Recipes of earlier versions have whole steps, which mean what they meant."""
    (tmp_path / "old.toml").write_text('base = "demo"\n[train]\nwarmup_steps = 100\n')
    assert recipe.differences(recipe.load("demo"), recipe.load(str(tmp_path / "old.toml"))) == []
    warmups = {name: warmup_of(recipe.load(name).train, 10**6) for name in ("demo", "newswire", "xsum", "brio-xsum")}
    assert warmups == {"demo": 100, "newswire": 40, "xsum": 1000, "brio-xsum": 10_000}
    train = recipe.load("xsum", ["train.warmup_steps=0.03"]).train
    assert warmup_of(train, 200) == 6
    train = dataclasses.replace(train, warmup_steps=0.99)
    assert (warmup_of(train, 10), warmup_of(train, 1)) == (9, 0), (
        "the last update, or the only one, has the largest rate"
    )
    with pytest.raises(
        UserError,
        match=r"train.warmup_steps: must be a whole number of steps, or a share of all steps below 1, got 1.5\.",
    ):
        recipe.load("xsum", ["train.warmup_steps=1.5"])


def test_what_is_held_out_leaves_rows_to_train_on():
    with pytest.raises(
        UserError,
        match=r"data.validation_fraction: the sum of this and data.test_fraction must be below 1; the rest is",
    ):
        recipe.load("xsum", ["data.validation_fraction=0.5", "data.test_fraction=0.5"])
    assert recipe.load("xsum", ["data.validation_fraction=0.5", "data.test_fraction=0.4"]).data.test_fraction == 0.4
