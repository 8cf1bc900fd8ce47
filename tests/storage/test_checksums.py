"""Checksums: a cache that was damaged in any way is named, and made again; a sound one is read."""

import os

import pytest

from ngramloss.output.console import logger
from ngramloss.storage.checksums import SEAL, cached_folder, damage, seal


def fill(folder):
    (folder / "a.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "b.json").write_text('{"x": 1}')


def made(folder, fill=fill):
    return cached_folder(folder, fill, what="token cache")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, bit=5):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGE = {
    "a.bin was changed": lambda folder: flip(folder / "a.bin"),
    "a.bin has 1023 bytes of 1024": lambda folder: os.truncate(folder / "a.bin", 1023),
    "a.bin is missing": lambda folder: (folder / "a.bin").unlink(),
    "added_tokens.json is not one of its files": lambda folder: (folder / "added_tokens.json").write_text("{}"),
    "writing it did not finish": lambda folder: (folder / SEAL).unlink(),
    f"its {SEAL} cannot be read": lambda folder: (folder / SEAL).write_text("[" * 100_000),
    f"its {SEAL} was changed": lambda folder: (folder / SEAL).write_text(
        (folder / SEAL).read_text().replace("1024", "1025")
    ),
}


def test_a_sound_folder_is_read_and_not_made_again(tmp_path, messages):
    folder = made(tmp_path / "cache" / "key")
    before = content(folder)
    assert made(folder, fill=pytest.fail) == folder
    assert content(folder) == before
    assert messages == []


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_folder_is_named_and_made_again(tmp_path, why, messages):
    folder = made(tmp_path / "key")
    sound = content(folder)
    DAMAGE[why](folder)
    made(folder)
    assert messages == [f"the token cache {folder} is damaged ({why}); rebuilding it."]
    assert content(folder) == sound
    made(folder)
    assert len(messages) == 1
    assert os.listdir(tmp_path) == ["key"]


def test_a_file_in_place_of_the_folder_is_replaced(tmp_path, messages):
    (tmp_path / "key").write_text("x")
    assert damage(made(tmp_path / "key")) == ""
    assert len(messages) == 1


def test_the_seal_covers_the_facts_in_it(tmp_path):
    fill(tmp_path)
    seal(tmp_path, finished=True, checksum=7)
    assert damage(tmp_path) == ""
    (tmp_path / SEAL).write_text((tmp_path / SEAL).read_text().replace("true", "false"))
    assert damage(tmp_path) == f"its {SEAL} was changed"


def test_a_seal_that_lost_its_own_checksum_is_damaged(tmp_path):
    fill(tmp_path)
    seal(tmp_path, step=3)
    (tmp_path / SEAL).write_text((tmp_path / SEAL).read_text().replace('"checksum"', '"cheksum"'))
    assert damage(tmp_path) == f"its {SEAL} was changed"


def test_what_another_process_rebuilt_meanwhile_is_kept(tmp_path, monkeypatch):
    folder = made(tmp_path / "key")
    flip(folder / "a.bin")
    inodes = []

    def other_process_is_faster(_):
        monkeypatch.undo()
        made(folder)
        inodes.append(folder.stat().st_ino)

    monkeypatch.setattr(logger, "warning", other_process_is_faster)
    made(folder, fill=pytest.fail)
    assert inodes == [folder.stat().st_ino]
