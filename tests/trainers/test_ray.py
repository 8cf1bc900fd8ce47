"""Ray Data, run for real: two workers, one of which is killed on the way, lose no row and double none."""

import json
import os
import signal
from pathlib import Path

import pytest
from places import HELPERS
from searches import DOCUMENTS, texts_of_run

import ngramloss as ng

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray", reason="needs ray: pip install 'ngramloss[ray]'")
ROWS = [{"id": number, "document": f"{DOCUMENTS[number % 6]} {number}."} for number in range(40)]


class Killed(ng.TextGenerator):
    """Kills its process in the middle of the work, the first time."""

    def __init__(self, model, mark, **options):
        super().__init__(model, **options)
        self.mark = Path(mark)

    def __call__(self, rows):
        with (self.mark / f"{os.getpid()}").open("a") as file:
            file.write(f"{len(rows['id'])}\n")
        if 23 in rows["id"] and not (self.mark / "killed").exists():
            (self.mark / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One node with two workers."""
    here = HELPERS
    paths = os.pathsep.join([str(here), str(Path(ng.__file__).parent.parent)])
    variables = {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "NGRAMLOSS_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


def test_a_worker_that_is_killed_loses_no_row_and_doubles_none(cluster, small_run, tmp_path):
    mark = tmp_path / "mark"
    mark.mkdir()
    data = ray.data.from_items(ROWS, override_num_blocks=8)
    written = data.map_batches(
        Killed,
        fn_constructor_args=[str(small_run), str(mark)],
        batch_size=5,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    written.write_json(str(tmp_path / "out"))
    processes = [path for path in mark.iterdir() if path.name != "killed"]
    assert (mark / "killed").exists()
    assert len(processes) == 3  # two, and one in the place of the killed one
    rows = [json.loads(line) for path in (tmp_path / "out").iterdir() for line in path.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(40))
    expected = dict(enumerate(texts_of_run(small_run, [row["document"] for row in ROWS])))
    assert {row["id"]: row["prediction"] for row in rows} == expected


def test_tasks_take_it_as_it_is_and_its_rows_as_arrays_or_frames(cluster, small_run):
    data = ray.data.from_items(ROWS[:12], override_num_blocks=4)
    for kind in ("numpy", "pandas"):
        found = data.map_batches(ng.TextGenerator(small_run), batch_size=3, batch_format=kind).take_all()
        expected = texts_of_run(small_run, [row["document"] for row in ROWS[:12]])
        assert [row["prediction"] for row in sorted(found, key=lambda row: row["id"])] == expected
