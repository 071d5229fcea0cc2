"""Files of TransformerEngine's users."""

import io
from pathlib import Path

import pytest
import torch

import quaver as qv
from quaver.checkpoint import load_te_checkpoint


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def extra_state() -> io.BytesIO:
    content = {}
    for suffix, n in (("fwd", 3), ("bwd", 2)):
        content[f"scale_{suffix}"] = torch.arange(n) + 2.0
        content[f"amax_history_{suffix}"] = torch.ones(16, n)
    data = io.BytesIO()
    torch.save(content | {"extra_fp8_variables": {"num_gemms": 1}}, data)
    return data


def test_a_state_dict_with_buffers_is_loaded(tmp_path: Path) -> None:
    state = {"weight": torch.randn(16, 16), "_extra_state": extra_state()}
    torch.save(state, tmp_path / "te.pt")
    layer = qv.Linear(16, 16, bias=False)
    layer.load_state_dict(load_te_checkpoint(tmp_path / "te.pt"))
    assert torch.equal(layer.weight, state["weight"])
    assert layer.recipe_states["forward"].scale.tolist() == [2.0, 3.0, 4.0]
    assert torch.serialization.get_safe_globals().count(io.BytesIO) == 0


def test_anything_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:50])
    torch.save([1], tmp_path / "list.pt")
    for name in ("evil.pt", "cut.pt", "list.pt", "absent.pt"):
        with pytest.raises(qv.CheckpointError) as caught:
            load_te_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
    assert capsys.readouterr().out == ""
