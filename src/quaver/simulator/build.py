"""Compile the simulator's C++ once, and keep the library in a cache.

The name of the built file carries a hash of everything that decides what it does, so a changed
source, flag or torch never meets an old library. The compiler is called directly: torch's own way
to build extensions needs one more package (ninja), and would not see that torch's headers changed.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from quaver.errors import SimulatorUnavailableError

_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")


def setting(name: str) -> str | None:
    """Read one setting of the simulator from the environment; None when unset or blank.

    ``QUAVER_CACHE_DIR`` is the folder for built libraries (default ``~/.cache/quaver``), and
    ``CXX`` the C++ compiler (default: the first found of g++, clang++ and c++).
    """
    return os.environ.get(name, "").strip() or None


def library() -> Path:
    """Return the built library, compiling it first unless the cache has it.

    Two processes may call this at once: one compiles, the other waits for it. A process that is
    killed half-way leaves nothing that another would load.

    Raises:
        SimulatorUnavailableError: there is no C++ compiler, the compilation fails, or the cache
            folder cannot be written to.
    """
    built = library_path()
    if built.exists():
        return built
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with open(built.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when a process dies
            if not built.exists():
                _compile(built)
    except OSError as error:
        raise SimulatorUnavailableError(
            f"the simulator cannot be built in {built.parent} ({error}): set QUAVER_CACHE_DIR to "
            "a folder that can be written to"
        ) from error
    return built


def library_path() -> Path:
    """Return where the built library is or will be.

    Raises:
        SimulatorUnavailableError: the cache folder is in the home of somebody unknown.
    """
    folder = setting("QUAVER_CACHE_DIR") or "~/.cache/quaver"
    try:
        return Path(folder).expanduser() / f"simulator-{_key()}.so"
    except RuntimeError:
        raise SimulatorUnavailableError(
            f"the simulator's cache folder {folder} is in no home folder that is known: set "
            "QUAVER_CACHE_DIR to a folder that can be written to"
        ) from None


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    # of torch its version, not its place: environments with the same torch share the library
    torch_build = (torch.__version__, torch.version.git_version, _abi())
    for part in (*torch_build, *_FLAGS, *_LIBRARIES, platform.machine()):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:16]


def _abi() -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def _compiler() -> list[str]:
    """Return the words of the command that CXX names, else the first compiler found."""
    wanted = setting("CXX")
    try:
        commands = [shlex.split(wanted)] if wanted else [[name] for name in _COMPILERS]
    except ValueError as error:
        raise SimulatorUnavailableError(
            f"CXX must name a C++ compiler as a shell would read it, and CXX={wanted} cannot be "
            f"read ({error}): mend its quotes, or unset it"
        ) from None
    for command in commands:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    missing = f"CXX={wanted} is not there" if wanted else "none was found"
    raise SimulatorUnavailableError(
        f"the simulator needs a C++ compiler (g++), and {missing}: install one (on Debian or "
        "Ubuntu `apt-get install g++`, on Fedora `dnf install gcc-c++`), or do without the "
        "simulator with `--devices cpu`"
    )


def _compile(built: Path) -> None:
    """Compile into a temporary name beside ``built``, then rename: a reader sees all or nothing."""
    # A name of this process's own: the compiler of a process that was killed may still write.
    partial = built.with_suffix(f".{os.getpid()}.partial")
    torch_root = Path(torch.__file__).parent
    paths = [f"-isystem{torch_root / 'include'}", f"-L{torch_root / 'lib'}"]
    source = str(_SOURCES / "simulator.cpp")
    command = [*_compiler(), *_FLAGS, _abi(), *paths, source, *_LIBRARIES, "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        os.replace(partial, built)
        return
    partial.unlink(missing_ok=True)
    log = built.with_suffix(".log")
    log.write_text(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    first = errors[0] if errors else f"exit status {result.returncode}"
    raise SimulatorUnavailableError(
        f"the simulator's C++ does not compile with {command[0]} ({first}): use another compiler "
        f"(CXX), or `--devices cpu`; all that the compiler said is in {log}"
    )
