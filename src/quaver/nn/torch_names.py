"""State dicts of torch's attention and transformer layers, under the names that ours have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rename(state: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Rename, in place, what begins with a key of `names` behind `prefix`; a taken name is left."""
    for key in [key for key in state if key.startswith(prefix)]:
        own = key.removeprefix(prefix)
        for theirs, ours in names.items():
            renamed = f"{prefix}{ours}{own.removeprefix(theirs)}"
            if own.startswith(theirs) and renamed not in state:
                state[renamed] = state.pop(key)
                break


def rename_attention(
    state: dict[str, Any],
    prefix: str,
    projections: Mapping[str, Sequence[str]],
    widths: Mapping[str, int],
) -> None:
    """Rename, in place, what torch.nn.MultiheadAttention has in its state_dict.

    Args:
        prefix: of the attention's keys.
        projections: ours, by name, and which of query, key and value each gives.
        widths: of the three, in this order. Where they do not add up to the rows of torch's
            weight, it is left under its name, for load_state_dict to complain of.
    """
    rename(state, prefix, {"out_proj.": "proj."})
    for kind in ("weight", "bias"):
        key = f"{prefix}in_proj_{kind}"
        if key not in state or state[key].shape[:1] != (sum(widths.values()),):
            continue
        joined, begin = state.pop(key), 0
        for name, members in projections.items():
            end = begin + sum(widths[member] for member in members)
            state[f"{prefix}{name}.{kind}"] = joined[begin:end]
            begin = end


def rename_layer(state: dict[str, Any], prefix: str, norms: Sequence[str]) -> None:
    """Rename, in place, what torch's TransformerEncoderLayer or DecoderLayer has in its state_dict.

    Args:
        prefix: of the layer's keys.
        norms: what the names of our norms' parameters begin with, in the order of torch's norm1,
            norm2, ... If there are others than torch's, those are left under their names.
    """
    names = {
        "self_attn.": "self_attention.",
        "multihead_attn.": "inter_attention.",
        "linear1.": "layernorm_mlp.fc1_",
        "linear2.": "layernorm_mlp.fc2_",
    }
    names |= {f"norm{index}.": name for index, name in enumerate(norms, 1)}
    rename(state, prefix, names)
