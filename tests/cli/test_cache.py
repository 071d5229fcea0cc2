"""A kept folder is complete or not there."""

import os
from pathlib import Path

import pytest

from quaver.cli.demo.cache import cache_root, keep_folder
from quaver.cli.errors import CommandError


def fill(folder: Path) -> None:
    (folder / "one").write_text("1")
    (folder / "two").write_text("2")


def test_the_folder_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("QUAVER_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "quaver"


def test_a_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_CACHE_DIR", "~nouser/x")
    with pytest.raises(CommandError, match="cache folder ~nouser/x is in no home folder"):
        cache_root()


def test_a_folder_is_kept_whole(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    keep_folder(target, fill)
    assert {file.name for file in target.iterdir()} == {"one", "two"}
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_stopped_half_way_leaves_nothing(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        (folder / "one").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_folder(tmp_path / "model", stop)
    assert list(tmp_path.iterdir()) == []


def test_the_target_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    def look(folder: Path) -> None:
        fill(folder)
        assert not (tmp_path / "model").exists()
        assert folder.parent == tmp_path

    keep_folder(tmp_path / "model", look)
    assert (tmp_path / "model" / "two").read_text() == "2"


def test_whoever_is_first_wins(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        fill(folder)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").write_text("0")

    keep_folder(tmp_path / "model", overtaken)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["theirs"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_in_time(tmp_path: Path) -> None:
    old, recent = tmp_path / ".unfinished-old", tmp_path / ".unfinished-recent"
    old.mkdir()
    recent.mkdir()
    os.utime(old, (0, 0))
    keep_folder(tmp_path / "model", fill)
    assert not old.exists()
    assert recent.exists()
