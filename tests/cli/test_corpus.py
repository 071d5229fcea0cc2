"""The demo's text and how it is cut."""

from pathlib import Path

import pytest
import torch

from quaver.cli.demo import corpus
from quaver.cli.errors import CommandError


def numbers(count: int) -> list[int]:
    return list(range(count))


def test_the_two_parts_are_separate_and_spread() -> None:
    size = corpus.WINDOW
    cut = corpus.make_corpus("", lambda text: numbers(size * 12 + 100), longest=8192)
    assert [int(window[0, 0]) for window in cut.calibration] == [0, size]
    # Ten windows are left for four: the first and every two and a half further.
    assert [int(window[0, 0]) // size for window in cut.evaluation] == [2, 4, 7, 9]
    assert {tuple(w.shape) for w in cut.calibration + cut.evaluation} == {(1, size)}
    assert torch.equal(cut.evaluation[0], torch.arange(2 * size, 3 * size)[None])


@pytest.mark.parametrize(
    ("tokens", "longest", "size", "evaluated"),
    [(6000, 64, 64, 4), (100, 8192, 50, 1), (17, 8192, 8, 1)],
    ids=["short context", "short text", "shortest text"],
)
def test_windows_shrink(tokens: int, longest: int, size: int, evaluated: int) -> None:
    cut = corpus.make_corpus("", lambda text: numbers(tokens), longest)
    assert {tuple(w.shape) for w in cut.calibration + cut.evaluation} == {(1, size)}
    assert len(cut.calibration) >= 1
    assert len(cut.evaluation) == evaluated


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CommandError, match=r"the text has 15 tokens .* two windows of at least 8"):
        corpus.make_corpus("", lambda text: numbers(15), longest=8192)


def test_the_default_text_is_pythons_documentation() -> None:
    text = corpus.read_text(None)
    assert 'The "assert" statement' in text
    assert len(text) > 100_000


def test_a_long_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_CHARACTERS", 5)
    path = tmp_path / "text.txt"
    path.write_text("äöüßéabc", encoding="utf-8")
    assert corpus.read_text(path) == "äöüßé"


def test_unreadable_text_is_refused(tmp_path: Path) -> None:
    blank, binary = tmp_path / "blank.txt", tmp_path / "binary.bin"
    blank.write_text(" \n\t\n")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CommandError, match=r"blank\.txt is empty"):
        corpus.read_text(blank)
    with pytest.raises(CommandError, match=r"binary\.bin is not UTF-8 text"):
        corpus.read_text(binary)
    with pytest.raises(CommandError, match=r"missing\.txt cannot be read: No such file"):
        corpus.read_text(tmp_path / "missing.txt")
    with pytest.raises(CommandError, match="cannot be read: Is a directory"):
        corpus.read_text(tmp_path)
