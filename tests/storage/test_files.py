"""Files and folders that are never seen in part, whatever is put in their way, and one process at a time in a folder."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from ngramloss.errors import UserError
from ngramloss.storage import checksums
from ngramloss.storage.files import (
    FULL,
    LONGEST_TOML,
    MOST_DOTS,
    appended,
    cache_folder,
    inside,
    lock_folder,
    parse_toml,
    remove,
    whole_folder,
    whole_rows,
    write_whole,
    writing,
)

# Files


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "it.json"
    write_whole(path, "old")
    write_whole(path, "new · é")
    assert path.read_text(encoding="utf-8") == "new · é"
    assert os.listdir(tmp_path) == ["it.json"]


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "it.json"
    write_whole(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["it.json"]


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "it.json"
    write_whole(path, "old")
    program = (
        "import os, sys; from pathlib import Path; from ngramloss.storage.files import write_whole\n"
        "os.fsync = lambda _: os._exit(9)\n"
        "write_whole(Path(sys.argv[1]), 'new')"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 9
    assert path.read_text() == "old"
    write_whole(path, "newer")
    assert path.read_text() == "newer"
    (left,) = tmp_path.glob("it.json.partial-*")
    remove(left)
    assert os.listdir(tmp_path) == ["it.json"]


def test_what_lies_under_a_predictable_temporary_name_is_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "it.json"
    for name in ("it.json.partial", f"it.json.partial-{os.getpid()}", "it.json"):
        (tmp_path / name).symlink_to(precious)
    write_whole(path, "new")
    assert precious.read_text() == "mine"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_a_temporary_name_that_is_taken_is_an_error_and_never_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / "it.json.partial-guessed").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "it.json", "new")
    assert precious.read_text() == "mine"


def test_a_file_has_the_rights_that_any_new_file_has(tmp_path):
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "it", "")
    assert stat.S_IMODE((tmp_path / "it").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_of_many_writers_of_one_file_each_writes_it_whole(tmp_path):
    path = tmp_path / "it"
    texts = [letter * 200_000 for letter in "abcdefgh"]
    writers = [
        threading.Thread(target=lambda text=text: [write_whole(path, text) for _ in range(10)]) for text in texts
    ]
    seen = set()
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["it"]


def test_lines_cut_short_are_left_out_and_odd_line_ends_belong_to_the_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert whole_rows(path) == []
    path.write_text('{"id": "1", "text": "a\u2028b\x85c"}\n[1]\n{"id": "2"}\n{"id": "3", "te', encoding="utf-8")
    assert whole_rows(path) == [{"id": "1", "text": "a\u2028b\x85c"}, {"id": "2"}]


# Folders


def test_a_file_of_settings_has_bounds():
    """The reader of TOML needs memory for the square of the dots of a key."""
    rows = b"a = 1\n# "
    assert parse_toml((rows + b"." * MOST_DOTS).ljust(LONGEST_TOML), "it") == {"a": 1}
    for content in ((rows + b" ").ljust(LONGEST_TOML + 1), rows + b"." * (MOST_DOTS + 1)):
        with pytest.raises(UserError, match="it is not a file of settings: expected at most 1,048,576 bytes, and at "):
            parse_toml(content, "it")


def test_a_kill_leaves_no_folder_that_looks_whole(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from ngramloss.storage.files import whole_folder\n"
        "with whole_folder(Path(sys.argv[1]) / 'tokens') as partial:\n"
        "    (partial / 'half').write_text('x'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert not (tmp_path / "tokens").exists()
    with whole_folder(tmp_path / "tokens") as partial:
        (partial / "all").write_text("x")
    assert os.listdir(tmp_path / "tokens") == ["all"]


def test_of_two_processes_with_the_same_content_the_first_wins(tmp_path):
    with whole_folder(tmp_path / "it") as partial:
        (partial / "mine").write_text("x")
        (tmp_path / "it").mkdir()
        (tmp_path / "it" / "theirs").write_text("x")
    assert os.listdir(tmp_path) == ["it"]
    assert os.listdir(tmp_path / "it") == ["theirs"]


def test_a_folder_that_cannot_be_named_is_an_error(tmp_path):
    with pytest.raises(OSError), whole_folder(tmp_path / "it") as partial:
        partial.rmdir()


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("NGRAMLOSS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ngramloss"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "ngramloss"


# One process at a time


def test_a_second_process_does_not_get_a_folder_that_is_held(tmp_path):
    program = (
        "import sys; from pathlib import Path; from ngramloss.storage.files import lock_folder\n"
        "try:\n"
        "    with lock_folder(Path(sys.argv[1]), wait=False): print('got it')\n"
        "except BlockingIOError: print('busy')"
    )

    def other():
        return subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout

    with lock_folder(tmp_path, wait=False):
        assert other() == "busy\n"
    assert other() == "got it\n"
    assert os.listdir(tmp_path) == []


def test_a_killed_process_lets_go_though_a_process_that_it_forked_lives_on(tmp_path):
    program = (
        "import os, sys, time; from pathlib import Path; from ngramloss.storage.files import lock_folder\n"
        "with lock_folder(Path(sys.argv[1]), wait=False):\n"
        "    if os.fork() == 0: print(os.getpid(), flush=True)\n"  # the child has dropped the lock before it gets here
        "    time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(BlockingIOError), lock_folder(tmp_path, wait=False):
            pass
        process.kill()
        process.wait()
        os.kill(child, 0)  # it lives
        with lock_folder(tmp_path, wait=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


# A full disk


@pytest.fixture
def small_files():
    """No file may grow beyond 64 KiB, so that the system itself refuses to write, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


LARGE = 2**20


def by_write_whole(path):
    write_whole(path, "x" * LARGE)


def by_appending(path):
    with appended(path) as file:
        file.write("x" * LARGE)


def in_a_new_folder(fill):
    def write(path):
        with whole_folder(path) as partial:
            fill(partial)

    return write


def of_numpy(folder):
    np.save(folder / "a.npy", np.zeros(LARGE))


def of_rust(folder):
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(LARGE)}, folder / "a.safetensors")


def of_tokenizers(folder):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({str(number): number for number in range(20000)}, unk_token="0")).save(str(folder / "a"))


def of_ours(folder):
    write_whole(folder / "a", "x" * LARGE)


IN_A_FOLDER = (of_numpy, of_rust, of_tokenizers, of_ours)


@pytest.mark.parametrize(
    "write",
    [by_write_whole, by_appending, *map(in_a_new_folder, IN_A_FOLDER)],
    ids=["whole", "appended", *(fill.__name__ for fill in IN_A_FOLDER)],
)
def test_an_error_of_a_full_disk_names_what_was_written(write, tmp_path, small_files):
    path = tmp_path / "written"
    with pytest.raises(OSError) as refused:
        write(path)
    assert refused.value.errno in FULL
    assert str(refused.value.filename).startswith(str(path))
    assert [file.name for file in tmp_path.iterdir()] == (["written"] if write is by_appending else [])


def test_other_errors_and_those_that_name_a_file_stay_as_they_are(tmp_path):
    for error in (ValueError("a shape"), OSError(5, "Input/output error"), OSError(28, "No space left", "other")):
        with pytest.raises(type(error)) as raised, writing(tmp_path):
            raise error
        assert raised.value is error


def test_of_a_copy_that_does_not_fit_the_target_is_named_and_not_the_source(tmp_path):
    (tmp_path / "source").write_bytes(bytes(2**16))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused, writing(tmp_path / "target"):
            shutil.copyfile(tmp_path / "source", tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(tmp_path / "target")


# Names and links


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", "a\0b", None, 3, ["x"]])
def test_what_is_not_the_name_of_a_file_is_not_looked_for(name, tmp_path):
    with pytest.raises(UserError, match=r"is not the name of a file or folder in "):
        inside(tmp_path, name)


def test_links_are_followed_inside_of_a_folder_alone(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, target in (("here", "x"), ("loop", "loop"), ("out", "../secret"), ("around", "../folder/x")):
        (tmp_path / "folder" / name).symlink_to(target)
    for name in ("here", "loop", "around", "none"):
        assert inside(tmp_path / "folder", name) == tmp_path / "folder" / name
    with pytest.raises(UserError, match=rf"out leads out of .*folder, to {tmp_path}/secret\. Replace the link"):
        inside(tmp_path / "folder", "out")
    assert inside(tmp_path / "folder", "out", may_link=True)


def json_of_a_benchmark(path):
    from ngramloss_bench.benchmark import write_json

    write_json(path, {"rows": []})


def tokens_of_a_benchmark(path):
    from ngramloss_bench import lengths

    path.with_name("input_ids.npy").symlink_to("/dev/full")
    lengths.write_tokens(path.parent, np.array([3]), np.array([2]), vocabulary=9, seed=0)


def seal_of_a_folder(path):
    checksums.seal(path.parent)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("write", [json_of_a_benchmark, tokens_of_a_benchmark, seal_of_a_folder])
def test_an_output_that_goes_to_a_full_disk_is_named(write, tmp_path, monkeypatch):
    path = tmp_path / "it.png"
    if write is seal_of_a_folder:
        path.write_text("x")
        monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    elif write is not tokens_of_a_benchmark:
        path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as refused:
        write(path)
    assert str(refused.value.filename) == str(tmp_path if write is tokens_of_a_benchmark else path)
