"""Lanes of tests: each test is in exactly one of those that continuous integration runs."""

import re
import tomllib
from itertools import chain, combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
MARKERS = [
    marker.partition(":")[0]
    for marker in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    if not marker.startswith("xdist_group:")
]


def expression(target):
    """The markers that a target of the Makefile selects by."""
    (recipe,) = re.findall(rf"^{target}:.*\n\t\$\(PYTEST\).* -m \"(.+)\"$", MAKEFILE, re.M)
    return re.sub(r"\$\((\w+)\)", lambda name: re.search(rf"^{name[1]} = (.+)$", MAKEFILE, re.M)[1], recipe)


def runs(target, markers):
    return eval(expression(target), {}, {marker: marker in markers for marker in MARKERS})


def lanes():
    """The targets that .ci/run comes to."""
    (asked,) = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    (all_lanes,) = re.findall(r"^test-all: (.+)$", MAKEFILE, re.M)
    return " ".join(all_lanes if target == "test-all" else target for target in asked.split()).split()


EVERY_CHOICE = list(chain.from_iterable(combinations(MARKERS, size) for size in range(len(MARKERS) + 1)))


def test_whatever_its_markers_a_test_is_in_exactly_one_lane_of_continuous_integration():
    assert len(lanes()) > 1
    chosen = {markers: [target for target in lanes() if runs(target, markers)] for markers in EVERY_CHOICE}
    assert {markers: targets for markers, targets in chosen.items() if len(targets) != 1} == {}


def test_the_quick_lane_has_unmarked_tests_alone_and_is_a_part_of_make_test():
    assert [markers for markers in EVERY_CHOICE if runs("quick", markers)] == [()]
    assert runs("test", ())


def test_the_oldest_versions_run_the_quick_lane():
    assert expression("test-oldest") == expression("quick")
