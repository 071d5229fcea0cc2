"""python -m quaver.shim: a script that imports transformer_engine runs on Quaver."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from quaver import shim
from quaver.integrations import transformer_engine

SCRIPT = """
import sys
import beside
import transformer_engine.pytorch as te
x = te.ops.Linear(4, 4, device="cpu").weight
print(__name__, sys.argv[1:], beside.x, te.Linear(4, 4, device="cpu")(x).shape)
"""


@pytest.fixture
def script(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("x = 7")
    yield str(tmp_path / "script.py")
    transformer_engine.disable()
    sys.modules.pop("beside", None)


def test_as_a_user_calls_it(script: str) -> None:
    command = [sys.executable, "-m", "quaver.shim", script, "--a", "b"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "__main__ ['--a', 'b'] 7 torch.Size([4, 4])"


def test_a_script_or_a_module_is_the_main_program(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([script, "--a", "b"], ["-m", "script", "--a", "b"]):
        shim.main(arguments)
        assert capsys.readouterr().out.strip() == ("__main__ ['--a', 'b'] 7 torch.Size([4, 4])")


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["-m"], 2), (["nowhere.py"], 2), (["--help"], 0)]
)
def test_nothing_to_run(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        shim.main(arguments)
    assert ended.value.code == status
    assert "usage: python -m quaver.shim SCRIPT" in capsys.readouterr().err
    assert not transformer_engine.is_enabled()
