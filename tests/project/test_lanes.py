"""Lanes of tests: each test is in exactly one, all but two in continuous integration, and bounds are tested versions."""

import re
import tomllib
import warnings
from itertools import chain, combinations
from pathlib import Path

import pytest
from places import ROOT

from ngramloss import version

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKERS = [marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]


def expression(target):
    """The markers that a target of the Makefile selects by."""
    (recipe,) = re.findall(rf"^{target}:.*\n\t\$\((?:PYTEST|BIN)\).* -m \"(.+)\"$", MAKEFILE, re.M)
    return re.sub(r"\$\((\w+)\)", lambda name: re.search(rf"^{name[1]} = (.+)$", MAKEFILE, re.M)[1], recipe)


def runs(target, markers):
    return eval(expression(target), {}, {marker: marker in markers for marker in MARKERS})


def lanes():
    """The targets that .ci/run comes to."""
    (asked,) = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    (all_lanes,) = re.findall(r"^test-all: (.+)$", MAKEFILE, re.M)
    every = " ".join(all_lanes if target == "test-all" else target for target in asked.split()).split()
    assert DOCTESTS in every
    return [target for target in every if target != DOCTESTS]


DOCTESTS = "test-doctests"
"""The lane of the examples in the source, which have no markers."""
ELSEWHERE = ["test-ray", "test-package"]
"""Lanes that continuous integration leaves out."""
EVERY_CHOICE = list(chain.from_iterable(combinations(MARKERS, size) for size in range(len(MARKERS) + 1)))


@pytest.mark.slow
def test_whatever_its_markers_a_test_is_in_exactly_one_lane():
    assert len(lanes()) > 1
    chosen = {
        markers: [target for target in [*lanes(), *ELSEWHERE] if runs(target, markers)] for markers in EVERY_CHOICE
    }
    assert {markers: targets for markers, targets in chosen.items() if len(targets) != 1} == {}


def test_continuous_integration_leaves_out_what_installs_more_and_nothing_else():
    left_out = [markers for markers in EVERY_CHOICE if not any(runs(target, markers) for target in lanes())]
    assert left_out
    assert all("ray" in markers or "package" in markers for markers in left_out)


def test_the_quick_lane_has_unmarked_tests_alone_and_is_a_part_of_make_test():
    assert [markers for markers in EVERY_CHOICE if runs("quick", markers)] == [()]
    assert runs("test", ())


def test_the_oldest_versions_run_the_quick_lane():
    assert expression("test-oldest") == expression("quick")


def test_no_module_of_tests_imports_another():
    """What two of them need is a module of its own. A program for another process may import the module it is written in."""
    modules = sorted((ROOT / "tests").rglob("*.py"))
    found = {path.name: re.findall(r"\b(?:from|import) (test_\w+)", path.read_text()) for path in modules}
    assert {name: others for name, others in found.items() if {*others} - {Path(name).stem}} == {}


FURTHER = {"systems", "bench", "gpu", "project", "helpers"}
"""Folders of tests that are no room: the other packages, the GPU's, the project as a whole, and what tests share."""


def test_tests_are_in_the_folder_of_the_room_that_they_test():
    files = {"recipes", "pages", "__pycache__"}
    rooms = {path.name for path in (ROOT / "src" / "ngramloss").iterdir() if path.is_dir()} - files
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert folders == rooms | FURTHER
    assert not list((ROOT / "tests").glob("helpers/test_*.py"))


def pinned(name):
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.M))


def bounds(sign):
    """Package → version, for what pyproject.toml bounds with a sign."""
    every = " ".join(
        requirement for extra in PROJECT["project"]["optional-dependencies"].values() for requirement in extra
    )
    return dict(re.findall(rf"([\w-]+)(?:[<>=]+[\w.]+,)?{sign}([\w.]+)", every))


def same_version(one, other):
    return one.removesuffix(".0") == other.removesuffix(".0")


def test_the_oldest_versions_are_the_lower_bounds():
    oldest, lower = pinned("constraints-oldest.txt"), bounds(">=")
    assert {"transformers", "triton"} <= lower.keys()
    assert oldest.keys() >= lower.keys()
    assert [name for name in lower if name != "torch" and not same_version(oldest[name], lower[name])] == []
    assert oldest["torch"] == pinned("constraints.txt")["torch"]
    assert oldest["trl"] == version.OLDEST["trl"]


def test_the_newest_versions_that_are_known_are_those_that_are_tested():
    assert not bounds("<=")
    assert {name: pinned("constraints.txt")[name] for name in version.NEWEST} == version.NEWEST


def test_a_newer_version_than_is_tested_gets_one_warning(monkeypatch):
    version.warn_if_untested.cache_clear()
    monkeypatch.setattr(version, "installed", lambda package: "5.100.0")
    with pytest.warns(UserWarning, match=r"transformers 5\.100\.0 is newer than .*install transformers=="):
        version.warn_if_untested("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version.warn_if_untested("transformers")
        version.warn_if_untested.cache_clear()
        for tested in (version.NEWEST, version.OLDEST):
            monkeypatch.setattr(version, "installed", lambda package: tested[package])  # noqa: B023
            for package in tested:
                version.warn_if_untested.cache_clear()
                version.warn_if_untested(package)


def test_an_older_version_than_is_tested_gets_a_warning_too(monkeypatch):
    version.warn_if_untested.cache_clear()
    monkeypatch.setattr(version, "installed", lambda package: "1.9.0")
    with pytest.warns(UserWarning, match=r"trl 1\.9\.0 is older than 1\.14\.2, the oldest .*install trl==1\.14\.2"):
        version.warn_if_untested("trl")
