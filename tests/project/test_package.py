"""What is released: the files say the same version, and the wheel works in an empty environment.

The environment has what pip installs and nothing of this one. ``make test-package`` builds the distributions into dist/,
the wheel from the source distribution.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from places import ROOT

from ngramloss.version import NEWEST, __version__

DIST = ROOT / "dist"


def test_citation_and_changelog_are_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == __version__
    assert cited["authors"] == [{"name": "The ngramloss developers"}]
    assert cited["references"][0]["title"] == "Differentiable N-gram Objective on Abstractive Summarization"
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", __version__] or headings[0] == __version__


def test_the_changelog_has_the_sections_of_keep_a_changelog():
    sections = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert sections


def test_the_documentation_says_which_versions_are_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text()
    oldest = {
        name: re.search(rf"{name}>=([\d.]+)", str(project["optional-dependencies"]))[1]
        for name in ("torch", "transformers")
    }
    assert f"torch {oldest['torch']} and transformers {oldest['transformers']}, or newer" in text
    newest = NEWEST["transformers"].rpartition(".")[0]
    assert f"{newest} is the newest transformers that is tested" in " ".join(text.split())
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text


# In an empty environment


def command(environment, *arguments, cwd, check=True):
    """Run a program of an environment as its user would: without our paths, one thread."""
    known = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    known |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NGRAMLOSS_CACHE": str(environment.parent / "cache")}
    done = subprocess.run(
        [environment / "bin" / arguments[0], *map(str, arguments[1:])],
        cwd=cwd,
        env=known,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel():
    (found,) = DIST.glob(f"ngramloss-{__version__}-*.whl")
    return found


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An environment with nothing in it."""
    folder = tmp_path_factory.mktemp("package") / "empty"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def install(environment, *what):
    constraints = ROOT / "constraints.txt"
    command(environment, "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, *what, cwd=ROOT)


@pytest.fixture(scope="module")
def scoring(empty, wheel):
    """The wheel with what scoring needs; no torch."""
    install(empty, f"{wheel}[score]")
    return empty


@pytest.fixture(scope="module")
def training(scoring, wheel):
    """The wheel with what the README installs. torch first and pinned, as the README says."""
    install(scoring, "torch")
    install(scoring, f"{wheel}[hf,score,report]")
    return scoring


@pytest.mark.package
def test_the_distributions_have_every_file_of_the_package_and_no_other(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src/ngramloss"], cwd=ROOT, capture_output=True, text=True
    )
    expected = {name.removeprefix("src/") for name in tracked.stdout.split()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert packed == expected
    assert "ngramloss/py.typed" in packed
    with tarfile.open(DIST / f"ngramloss-{__version__}.tar.gz") as archive:
        source = archive.getnames()
    assert {f"ngramloss-{__version__}/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff")} <= {
        *source
    }
    assert not [name for name in source if "/tests/" in name]


@pytest.mark.package
def test_texts_are_scored_without_torch(scoring, tmp_path):
    (tmp_path / "refs.jsonl").write_text('{"id": 1, "reference": "the cat sat on the mat"}\n')
    (tmp_path / "a.jsonl").write_text('{"id": 1, "prediction": "the cat sat on a mat"}\n')
    program = "import ngramloss, sys; print(ngramloss.__file__); print('torch' in sys.modules)"
    where, loaded = command(scoring, "python", "-c", program, cwd=tmp_path).stdout.split()
    assert Path(where).is_relative_to(scoring)
    assert loaded == "False"
    assert command(scoring, "python", "-c", "import torch", cwd=tmp_path, check=False).returncode == 1
    arguments = ["score", "--references", "refs.jsonl", "a.jsonl", "--metrics", "rouge,bleu,chrf,shape", "--json"]
    scored = json.loads(command(scoring, "ngramloss", *arguments, cwd=tmp_path).stdout)
    assert scored["systems"][0]["scores"]["rouge1"] == pytest.approx(100 * 10 / 12)
    assert "ngramloss new mine" in command(scoring, "ngramloss", cwd=tmp_path).stdout
    assert re.search(r"torch +not installed", command(scoring, "ngramloss", "doctor", cwd=tmp_path).stdout)
    command(scoring, "ngramloss", "new", "mine", cwd=tmp_path)
    refused = command(scoring, "ngramloss", "train", "small.toml", cwd=tmp_path / "mine", check=False)
    assert refused.returncode == 1
    assert "this needs the package torch: pip install 'ngramloss[torch]'" in refused.stderr


@pytest.mark.package
def test_a_stranger_comes_from_the_wheel_to_a_published_model(training, tmp_path):
    assert re.search(r"transformers +\d", command(training, "ngramloss", "doctor", cwd=tmp_path).stdout)
    few = shlex.split("--set train.max_steps=4 --set train.eval_every=2 --set train.save_every=4 --set data.limit=200")
    command(training, "ngramloss", "train", "demo", "--run", "demo", *few, cwd=tmp_path)
    command(training, "ngramloss", "new", "mine", cwd=tmp_path)
    mine = tmp_path / "mine"
    command(training, "ngramloss", "train", "small.toml", "--run", "run", *few, cwd=mine)
    command(training, "ngramloss", "generate", "run", "--limit", 5, cwd=mine)
    assert "rouge1" in command(training, "ngramloss", "score", "run", cwd=mine).stdout
    command(training, "ngramloss", "report", "run", "-o", "report", cwd=mine)
    assert (mine / "report" / "index.html").is_file()
    command(training, "ngramloss", "publish", "run", "-o", "published", cwd=mine)
    loads = "import transformers as t; t.AutoModelForSeq2SeqLM.from_pretrained('published')"
    command(training, "python", "-c", loads, cwd=mine)


@pytest.mark.package
def test_types_are_found_by_a_checker(training, tmp_path):
    """py.typed: a checker reads the annotations of the installed package."""
    (tmp_path / "own.py").write_text("import ngramloss\nreveal_type(ngramloss.__version__)\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(training / "bin" / "python"), "own.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'Revealed type is "str"' in done.stdout.replace("builtins.", ""), done.stdout
