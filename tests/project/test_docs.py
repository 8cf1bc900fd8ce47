"""The documentation keeps its word: its commands run and print what it shows, its Python runs, its links lead somewhere.

The commands of a page run one after the other, in one process and in a folder of the page's own. In ``console`` blocks
each follows a prompt, and what it prints comes next; ``shell`` blocks are commands to paste. A block marked ``<!-- needs … -->``
is only read: its options must exist. One marked ``<!-- file NAME -->`` is put into the folder first. What takes long is made
smaller by further options (:func:`smaller`); then words are compared, not numbers.
"""

import ast
import doctest
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from glob import glob
from pathlib import Path

import pytest
from in_process import InProcess
from places import ROOT

from ngramloss import OBJECTIVES, SYSTEMS, recipe
from ngramloss.cli import main, parser
from ngramloss.metrics.registry import METRICS
from ngramloss.version import __version__

pytestmark = [pytest.mark.docs, pytest.mark.usefixtures("own_cache")]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ["start", "start_2_objective", "start_3_train", "start_4_results", "start_5_language_model"]
"""Pages whose commands follow each other; they share a folder."""
HOW_TO = [
    "adopt",
    "train",
    "data",
    "translate",
    "prompts",
    "candidates",
    "systems",
    "parallel",
    "scaling",
    "generate",
    "score",
    "study",
    "reproduce",
    "publish",
    "add_objective",
    "add_metric",
    "add_system",
    "rouge_in_training",
    "dft_eaft_asft",
    "gradient_accumulation",
    "significance",
    "fast_beam_search",
    "faq",
]
LOOK_UP = ["objectives", "settings", "metrics", "choose", "one_token_late", "security", "results", "performance"]
FOR_DEVELOPERS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "docs/dev/log.md", "docs/dev/gpu.md")),
    *sorted((ROOT / "docs" / "dev" / "decisions").glob("*.md")),
]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[\w ./-]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
COMMAND = re.compile(r"^\$ (?P<words>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.M)
LINK = re.compile(r"\]\((?!https?:)(?P<page>[^)#\s]*)(?:#(?P<heading>[^)\s]+))?\)")
ONLY_READ = re.compile(r"needs .+|not run")
"""Marks of blocks that are not run."""

SHELL = ("echo", "mkdir", "ls", "head")
"""Programs that are run as they are."""

TINY = (
    "model.width=16",
    "model.heads=2",
    "model.feed_forward=16",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.vocabulary=400",
    "data.limit=40",
    "data.validation_limit=4",
    "data.max_source=48",
    "data.max_target=16",
    "train.max_steps=2",
    "train.warmup_steps=0",
    "generation.num_beams=1",
    "generation.min_length=0",
    "generation.max_length=12",
)
FEW = ("--limit", "4")


# What the pages hold


def blocks(*kinds):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if not kinds or block["kind"] in kinds:
                yield page, block, text.count("\n", 0, block.start("text")) + 1


def called(page):
    return str(page.relative_to(ROOT))


def commands(*, run):
    for page, block, line in blocks("console", "shell"):
        if bool(ONLY_READ.fullmatch(block["mark"] or "")) == run:
            continue
        text = block["text"] if block["kind"] == "console" else re.sub(r"^(?=\S)", "$ ", block["text"], flags=re.M)
        for command in COMMAND.finditer(text):
            at = line + text.count("\n", 0, command.start())
            words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command["words"].replace("\\\n", " "))
            if run or words.startswith(("ngramloss ", "torchrun ", "make ")):
                yield pytest.param(page, words, command["shown"], id=f"{called(page)}:{at}")


def programs():
    for page, block, line in blocks("python"):
        mark = block["mark"] or ""
        if mark == "run" or (page != ROOT / "README.md" and not ONLY_READ.fullmatch(mark)):
            yield pytest.param(page, line, block["text"], block["printed"], mark, id=f"{called(page)}:{line}")


# How a command is made small enough for a test


def _tiny(recipe):
    """What makes a recipe tiny. Some have no heads and layers, no search or no new model."""
    unknown = {
        "pointer-generator": ("model.heads", "model.feed", "model.enc", "model.dec"),
        "parallel": ("generation.",),
        "drafter": ("model.", "generation."),
    }
    without = next((names for name, names in unknown.items() if recipe.startswith(name)), ())
    return [setting for setting in TINY if not setting.startswith(without)]


def smaller(arguments, tiny_model):
    """The arguments, and what makes a long command short; the last option of a name counts."""
    verb, limit = arguments[0], [] if "--limit" in arguments else FEW
    if verb == "train" and "--show" not in arguments:
        return [*arguments, *settings(*_tiny(arguments[1]), *_local(arguments))]
    if arguments[:2] == ["rerank", "train"]:
        return [*arguments, *settings(*TINY, "model.name=scratch")]
    if verb == "candidates":  # texts of a tiny model share letters with references, but no words
        return [*arguments, *FEW, *([] if "--metric" in arguments else ["--metric", "chrf"])]
    if verb == "generate":  # a teacher's texts must be of all rows that a tiny recipe trains on
        return [*arguments, *(["--limit", "40"] if "train" in arguments else limit)]
    if arguments[:2] == ["reproduce", "table1"]:
        return [*arguments, *limit]
    if verb == "study" and "--show" not in arguments:
        path = Path(arguments[1])
        lists = f"set = {json.dumps(TINY)[:-1]}, "
        path.write_text(re.sub(r"^limit = \d+", "limit = 4", path.read_text().replace("set = [", lists), flags=re.M))
        return [*arguments, "--runs", "runs/tiny"]
    if verb == "reproduce":
        options = parser().parse_args(arguments)
        base = Path(options.runs or f"runs/reproduce-{options.data}") / "base" / "model"
        shutil.copytree(tiny_model, base, dirs_exist_ok=True)  # is trained already
        rows = [] if options.objectives else ["--objectives", "ce", "ce + matches(2,3,4)"]
        if options.systems:  # candidates of a tiny model share no words with references, so there is nothing to rerank
            tiny = [f"{name}.{setting}" for name in ("bertsum_ext", "bertsum_abs") for setting in TINY]
            own = ["bertsum_ext.system=bertsum_ext(heads=2)", "bertsum_abs.train.encoder_warmup_steps=0"]
            rows += [*FEW, "--systems", "bertsum_ext,bertsum_abs", *settings(*tiny, *own)]
        return [*arguments, *limit, *settings(*TINY), "--seeds", str(min(2, options.seeds)), *rows]
    if arguments[:2] == ["bench", "step"]:
        return [
            *arguments,
            "--model",
            "bart-tiny",
            "--batch-size",
            "2",
            "--source",
            "16",
            "--target",
            "8",
            "--device",
            "cpu",
        ]
    if arguments[:2] == ["bench", "train"]:
        tiny = "--model bart-tiny --batch-size 2 --documents 40 --warm-up 1 --steps 2 --workers 0 --device cpu"
        return [*arguments, *tiny.split()]
    if arguments[:2] == ["bench", "generate"]:
        tiny = "--model bart-tiny --batch-size 2 --source 16 --length 8 --repeats 1 --device cpu"
        return [*arguments, *tiny.split()]
    if arguments[:2] == ["bench", "candidates"]:
        return [
            *arguments,
            *[
                "--model",
                "bart-tiny",
                "--count",
                "2",
                "--batch-size",
                "2",
                "--source",
                "16",
                "--target",
                "8",
                "--device",
                "cpu",
            ],
        ]
    if arguments[:2] == ["bench", "scaling"]:
        sizes = ["--batch-size", "4", "8", "--rows", "64", "--warm-up", "1", "--steps", "2"]
        return [*arguments, "--device", "cpu", "--model", "bart-tiny", *sizes]
    if arguments[:2] == ["bench", "ngrams"]:
        return [*arguments, "--longest", "128", "--device", "cpu"]
    return arguments


def settings(*those):
    return [word for one in those for word in ("--set", one)]


def _local(arguments):
    """What stands in for the hub: the built-in corpus, a model from scratch."""
    options = parser().parse_args(arguments)
    asked = recipe.load(options.recipe, options.set)
    if asked.data.name in ("xsum", "cnn_dailymail"):
        yield "data.name=newswire"
    if not Path(asked.model.name).is_dir():
        yield "model.name=scratch"


# What is shown and what is printed


def trimmed(text):
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def omitting(shown):
    """A pattern for the shown lines, in which a line of dots alone stands for any lines."""
    return "".join(r"(?:.*\n)*" if line in ("…\n", "...\n") else re.escape(line) for line in shown.splitlines(True))


def agrees(printed, shown):
    printed, shown = trimmed(printed), trimmed(shown)
    return printed == shown or re.fullmatch(omitting(shown), printed) is not None


def without_numbers(text):
    """The words of each line: a smaller run prints other numbers, fingerprints, marks, what they say, and widths."""
    marked = re.sub(r"^(Better|Worse) than .*\n", "", text, flags=re.M)
    hashes = re.sub(r"\b(?=\w*\d)[0-9a-f]{7,}\b", "0", marked)
    numbers = re.sub(r"(?<![\w-])[-+−]?\d(?:[\d,.]*\d)?", "0", hashes)
    return "".join(re.sub(r"[\s*]+", " ", line) + "\n" for line in numbers.splitlines())


# The tests


class Folders:
    """A folder for each page, one for the tutorial, with the files that it names; and the pages in which something was made smaller."""

    def __init__(self, place):
        self.place, self.shortened, self.filled = place, set(), set()

    def of(self, page):
        tutorial = page.parent.name == "docs" and page.stem in TUTORIAL
        folder = self.place / ("tutorial" if tutorial else called(page).replace("/", "-"))
        if page not in self.filled:
            self.filled.add(page)
            folder.mkdir(exist_ok=True)
            for other, block, _ in blocks():
                if other == page and (block["mark"] or "").startswith("file "):
                    path = folder / block["mark"].removeprefix("file ")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block["text"], encoding="utf-8")
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, own_cache):
    """A model that is fine-tuned where a page fine-tunes one."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert main(["train", "demo", "--run", str(folder), *settings(*TINY)]) == 0
    return folder / "model"


@pytest.fixture(autouse=True)
def tiny_bench(monkeypatch):
    from ngramloss_bench import head

    monkeypatch.setattr(head, "SIZES", dict.fromkeys(head.SIZES, head.Size(2, 8, 101, 16)))


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    """The processes of a study are calls."""
    from ngramloss.study import run

    monkeypatch.setattr(run, "start_process", InProcess)


@pytest.mark.parametrize(("page", "words", "shown"), list(commands(run=True)))
def test_a_command_runs_and_prints_what_the_page_shows(page, words, shown, folders, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(folders.of(page))
    program, *arguments = shlex.split(words, comments=True)
    if program in SHELL:
        done = subprocess.run(words, shell=True, check=True, capture_output=True, text=True)
        assert agrees(done.stdout, shown)
    elif program == "ngramloss":
        _run(page, arguments, shown, folders, tiny_model, capsys)
    else:
        check_written(words)


def _run(page, arguments, shown, folders, tiny_model, capsys):
    arguments = [found for word in arguments for found in (sorted(glob(word)) or [word])]
    fails = shown.startswith("error: ")
    given = arguments if fails else smaller(arguments, tiny_model)
    if given != arguments:
        folders.shortened.add(page)
    capsys.readouterr()
    code, printed = main(given), capsys.readouterr()
    assert bool(code) == fails, printed.err
    seen = re.sub(r"[^\n]*\r", "", printed.err)  # a terminal shows what follows the last carriage return
    printed = seen if fails else printed.out.replace(f"ngramloss:{__version__}", "ngramloss:0.1.0")
    whole = fails or arguments[0] in ("explain", "data") or "--show" in arguments  # what no smaller run can change
    if page in folders.shortened and not whole:
        printed, shown = without_numbers(printed), without_numbers(shown)
    assert agrees(printed, shown) or not (shown.strip() or whole), printed


@pytest.mark.parametrize(("page", "words", "shown"), list(commands(run=False)))
def test_a_command_that_is_not_run_is_written_right(page, words, shown):
    check_written(words)


def check_written(words):
    """Raise unless the command's target, options, script and extras exist."""
    program, *arguments = shlex.split(words, comments=True)
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        started = get_args_parser().parse_args(arguments)
        assert (started.module, started.training_script) == (True, "ngramloss")
        parser().parse_args(started.training_script_args)
    elif program == "ngramloss":
        parser().parse_args(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(arguments) <= set(targets)
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        assert {extra for those in re.findall(r"\[([\w,]+)\]", words) for extra in those.split(",")} <= known.keys()
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    else:
        pytest.fail(f"nothing is known of {program}: mark the block with <!-- needs … -->, or add it to SHELL.")


def outputs():
    """Pages, what each command of theirs writes, a folder that is not a report, and the command; and files and their text."""
    for page, block, _ in blocks():
        if (block["mark"] or "").startswith("file "):
            yield page, block["mark"].removeprefix("file "), block["text"]
    for parameter in [*commands(run=True), *commands(run=False)]:
        page, words, shown = parameter.values
        program, verb, *_ = arguments = shlex.split(words, comments=True)
        if program != "ngramloss" or shown.startswith("error: "):
            continue
        if verb in ("train", "generate", "candidates", "new"):
            options = vars(parser().parse_args(arguments[1:]))
            yield page, options.get("run" if verb == "train" else "folder" if verb == "new" else "out"), arguments
        elif verb == "study":
            name = arguments[2].removesuffix(".toml")
            yield from ((page, folder, arguments[2]) for folder in (name, f"runs/{name}"))


def test_pages_can_be_followed_in_one_folder():
    """What is already there was written by the same command: another is refused, or it would mix two pages."""
    written = {}
    for page, name, how in outputs():
        written.setdefault(name, {}).setdefault(str(how), set()).add(called(page))
    del written[None]  # the command chooses the folder
    assert not {name: ways for name, ways in written.items() if len(ways) > 1 and len(set().union(*ways.values())) > 1}


@pytest.fixture(scope="module")
def left():
    """Page → what its last program defined and registered, for one that goes on."""
    return {}


@pytest.mark.parametrize(("page", "line", "text", "shown", "mark"), list(programs()))
def test_python_in_the_documentation_runs_and_prints_the_text_after_it(
    page, line, text, shown, mark, folders, left, monkeypatch, capsys
):
    monkeypatch.chdir(folders.of(page))
    program = compile("\n" * (line - 1) + text, page, "exec")  # a traceback names the line of the page
    if mark != "goes on":
        left[page] = {"__name__": "__main__"}, {}
    names, registered = left[page]
    for registry in (OBJECTIVES, METRICS, SYSTEMS):
        monkeypatch.setattr(registry, "_added", registered.setdefault(registry.noun, {}))
    exec(program, names)
    assert shown is None or trimmed(capsys.readouterr().out) == trimmed(shown)
    for function in [value for value in names.values() if getattr(value, "__globals__", None) is names]:
        for example in doctest.DocTestFinder().find(function, module=False, globs=names):
            assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_table_of_choices_has_every_objective(name):
    table = (ROOT / "docs" / "choose.md").read_text().split("## Every objective")[1].split("\n## ")[0]
    assert re.search(rf"^\| `{name}[`(]", table, re.MULTILINE)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_and_variant_is_documented_under_its_name(name):
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for needed in ("$$", *(f":{variant}`" for variant in OBJECTIVES[name].variants)):
        assert needed in section


def test_messages_of_the_questions_are_those_of_the_program():
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    texts = set(messages())
    quoted = re.findall(r"^```text\n(.+?)\n```$", page, re.M | re.S)
    assert len(quoted) > 20
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("…")))
        assert any(re.search(pattern, text) for text in texts), message


def messages():
    """The texts of the source, with dots where a value is put in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_guide_says_why_a_block_is_not_run():
    guide = {ROOT / "docs" / f"{name}.md" for name in (*TUTORIAL, *HOW_TO, "settings", "choose")}
    silent = [
        f"{called(page)}:{line}" for page, block, line in blocks() if page in guide and block["mark"] == "not run"
    ]
    assert not silent, "say what is needed: <!-- needs … -->"


def test_blocks_of_the_first_pages_that_show_no_output_can_be_pasted():
    first = {ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in TUTORIAL)}
    shown = {
        f"{called(page)}:{line}": [command["shown"].strip() for command in COMMAND.finditer(block["text"])]
        for page, block, line in blocks("console")
        if page in first
    }
    assert not [where for where, texts in shown.items() if not any(texts)], "write ```shell, without prompts"


def test_python_that_is_not_run_can_be_compiled():
    for page, block, line in blocks("python"):
        compile("\n" * (line - 1) + block["text"], page, "exec")


def test_the_table_of_contents_has_every_page_once_in_the_order_of_the_guide():
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = [name for name in re.findall(r"^.*\]\(([\w/]+)\.md\)", contents, re.M) if "/" not in name]
    assert linked == [*TUTORIAL, *HOW_TO, *LOOK_UP]
    assert {f"{name}.md" for name in linked} == {page.name for page in PAGES} - {"README.md"}


@pytest.mark.parametrize("page", [*PAGES, *FOR_DEVELOPERS], ids=called)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        path = (page.parent / link["page"]).resolve() if link["page"] else page
        assert path.exists(), link[0]
        assert not link["heading"] or link["heading"] in headings(path), link[0]


def headings(page):
    """Headings as they stand in an address: lower case, words joined by hyphens."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
