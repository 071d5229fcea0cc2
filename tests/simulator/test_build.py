"""Building: once, whole or not at all, and in one clear line when it cannot be.

The compiler here is a script that takes notes; the real one has built what these tests run on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quaver.errors import SimulatorUnavailableError
from quaver.simulator import build

BUILD = [sys.executable, "-m", "quaver.simulator"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make CXX a shell script whose last argument, "$out", is the file to write."""

    def install(body: str) -> Path:
        script, notes = tmp_path / "c++", tmp_path / "notes"
        script.write_text(f'#!/bin/sh\nfor out; do :; done\necho "$$" >> "{notes}"\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return notes

    return install


def test_no_compiler_is_one_line_with_the_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    result = subprocess.run(BUILD, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "needs a C++ compiler (g++), and none was found" in line
    assert "apt-get install g++" in line
    assert "--devices cpu" in line


def test_a_compiler_that_is_not_there_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(SimulatorUnavailableError, match=r"CXX=/nowhere/g\+\+ -m64 is not there"):
        build.library()


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_setting_is_none(
    blank: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", blank)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimulatorUnavailableError, match="and none was found"):
        build.library()


def test_a_compiler_with_bad_quotes_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(
        SimulatorUnavailableError, match="CXX=g\\+\\+ 'half cannot be read"
    ) as caught:
        build.library()
    assert "\n" not in str(caught.value)


def test_a_cache_in_the_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_CACHE_DIR", "~nouser/x")
    with pytest.raises(SimulatorUnavailableError, match=r"~nouser/x .* set QUAVER_CACHE_DIR"):
        build.library()


def test_a_failed_compilation_names_its_first_error_and_the_log(
    cache: Path, compiler: Callable[[str], Path]
) -> None:
    compiler("echo 'x.h:1: warning: w' >&2; echo 'x.h:2: error: no such thing' >&2; exit 1")
    with pytest.raises(SimulatorUnavailableError) as caught:
        build.library()
    message = str(caught.value)
    log = build.library_path().with_suffix(".log")
    assert "error: no such thing" in message
    assert str(log) in message
    assert "\n" not in message
    assert "warning: w" in log.read_text()
    assert not build.library_path().exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(SimulatorUnavailableError, match="set QUAVER_CACHE_DIR"):
        build.library()


def test_two_processes_build_once(cache: Path, compiler: Callable[[str], Path]) -> None:
    notes = compiler('sleep 2; echo built > "$out"')
    processes = [subprocess.Popen(BUILD, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert outputs == [str(build.library_path())] * 2
    assert build.library_path().read_text() == "built\n"
    assert len(notes.read_text().splitlines()) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]


def test_a_process_killed_half_way_leaves_nothing_to_load(
    cache: Path, compiler: Callable[[str], Path]
) -> None:
    notes = compiler('echo half > "$out"; exec sleep 60')
    process = subprocess.Popen(BUILD)
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()  # the compiler lives on, as an orphan
    process.wait()
    try:
        assert not build.library_path().exists()
        compiler('echo whole > "$out"')
        assert build.library().read_text() == "whole\n"
    finally:
        os.kill(int(notes.read_text().splitlines()[0]), signal.SIGKILL)


def test_a_built_library_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    build.library_path().write_text("built")
    monkeypatch.setenv("PATH", str(cache))
    assert build.library() == build.library_path()


def test_the_name_changes_with_the_sources_the_flags_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build.library_path().name}
    sources = tmp_path / "csrc"
    sources.mkdir()
    for source in build._SOURCES.iterdir():
        (sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build.library_path().name in names  # the place does not matter
    (sources / "device.h").write_text("// another")
    names.add(build.library_path().name)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    names.add(build.library_path().name)
    monkeypatch.setattr("torch.__version__", "9.9.9")
    names.add(build.library_path().name)
    assert len(names) == 4
