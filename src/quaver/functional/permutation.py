"""Sending tokens to their experts and back, for mixtures of experts.

`moe_permute` sorts copies of the tokens by expert; `moe_unpermute` adds a token's copies up again.
Each row is gathered, forward and backward, and sums run over a token's slots in order of the
expert: nothing is accumulated atomically, so results repeat bit for bit, on every device alike.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from quaver.devices import on_device, operands_device

MapType = Literal["mask", "index"]


class Route(NamedTuple):
    """Where each token goes.

    Attributes:
        rows: int32 [tokens, slots]; the row of a token's copy in the permuted tensor, -1: none.
        columns: int32 [tokens, slots]; the column of `merging_probs` that weighs it.
        source: int64 [rows]; for each row token * slots + slot, -1 for a row of padding.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    source: torch.Tensor


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    map_type: MapType = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the tokens, sorted by expert; among one expert's, in the order of the tokens.

    Args:
        inp: [tokens, hidden].
        routing_map: for map_type "mask" [tokens, experts], non-zero where a token goes to an
            expert; for "index" integers [tokens, k], the experts of each token, -1 for none.
        num_out_tokens: how many rows to return: further copies are dropped, missing ones are
            zeros. -1: as many as there are.

    Returns:
        The rows [num_out_tokens, hidden], and the map that `moe_unpermute` needs.

    Raises:
        ValueError: the shapes do not fit, or `map_type` is unknown.
        DeviceMismatchError: inp and routing_map lie on two devices.
    """
    route = _route_tokens(inp, routing_map, num_out_tokens, map_type)
    rows: torch.Tensor = _Permute.apply(inp, route)  # type: ignore[no-untyped-call]
    return rows, torch.stack((route.rows, route.columns), dim=-1)


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `moe_permute` with a mask; the probabilities are permuted with the tokens.

    Args:
        inp, routing_map, num_out_tokens: as for `moe_permute`.
        probs: [tokens, experts].

    Returns:
        The rows, the probability of each row [num_out_tokens] (0 for padding), and the map.
    """
    if probs.shape != routing_map.shape:
        raise ValueError(
            f"probs must have routing_map's shape {tuple(routing_map.shape)}, "
            f"not {tuple(probs.shape)}"
        )
    operands_device(("inp", "probs"), (inp, probs))
    route = _route_tokens(inp, routing_map, num_out_tokens, "mask")
    rows: torch.Tensor = _Permute.apply(inp, route)  # type: ignore[no-untyped-call]
    with on_device(inp.device):
        # Each element is taken at most once, so its gradient is no sum.
        picked = probs.gather(1, route.columns.long())
        chosen = _take(picked.reshape(-1, 1), route.source, 1).squeeze(1)
    return rows, chosen, torch.stack((route.rows, route.columns), dim=-1)


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each token the sum of its rows, weighted if asked.

    Args:
        inp: [rows, hidden], as many rows as `moe_permute` returned.
        row_id_map: what `moe_permute` returned beside them.
        merging_probs: the weights, of the routing map's shape; None: 1.

    Returns:
        [tokens, hidden] in inp's dtype; sums are taken in float32. A token without a row is zeros.

    Raises:
        ValueError: row_id_map is not from `moe_permute`, or merging_probs has another shape.
        DeviceMismatchError: the tensors lie on two devices.
    """
    names = ("inp", "row_id_map", "merging_probs")
    operands_device(names, (inp, row_id_map, merging_probs))
    if row_id_map.dim() != 3 or row_id_map.shape[-1] != 2:
        raise ValueError(
            "row_id_map must be what moe_permute returned, [tokens, slots, 2], "
            f"not {tuple(row_id_map.shape)}"
        )
    tokens = row_id_map.shape[0]
    if merging_probs is not None and merging_probs.shape[:-1] != (tokens,):
        raise ValueError(
            f"merging_probs must be [{tokens}, ...], of the routing map's shape, "
            f"not {tuple(merging_probs.shape)}"
        )
    with on_device(inp.device):
        rows, columns = row_id_map.unbind(-1)
        route = Route(rows, columns, _sources(rows, inp.shape[0]))
        weights = None
        if merging_probs is not None:  # one element a slot, as in moe_permute_with_probs
            weights = merging_probs.gather(1, columns.long())
        merged: torch.Tensor = _Unpermute.apply(inp, weights, route)  # type: ignore[no-untyped-call]
    return merged


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """The chunks of inp [rows, ...] with `split_sizes` rows each, in the order `sorted_index`."""
    operands_device(("inp", "split_sizes", "sorted_index"), (inp, split_sizes, sorted_index))
    chunks = inp.split(split_sizes.tolist())
    if inp.shape[0] == 0:
        return inp
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


# ---- routes


def _route_tokens(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, map_type: MapType
) -> Route:
    if map_type not in ("mask", "index"):
        raise ValueError(f'map_type must be "mask" or "index", not {map_type!r}')
    if inp.dim() != 2 or routing_map.dim() != 2 or inp.shape[0] != routing_map.shape[0]:
        raise ValueError(
            "inp must be [tokens, hidden] and routing_map [tokens, ...] with as many tokens, "
            f"not {tuple(inp.shape)} and {tuple(routing_map.shape)}"
        )
    with on_device(operands_device(("inp", "routing_map"), (inp, routing_map))):
        if map_type == "index":
            experts = routing_map.long()
            columns = torch.arange(experts.shape[1], device=inp.device).expand_as(experts)
            valid = experts >= 0
        else:
            experts, valid = _experts_of_mask(routing_map)
            columns = experts
        return _route(experts, valid, columns, num_out_tokens)


def _experts_of_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token in ascending order, and which slots hold one."""
    chosen = mask != 0
    slots = int(chosen.sum(1).max()) if chosen.numel() else 0
    # A stable sort puts the chosen experts first, and keeps their order.
    experts = torch.argsort(~chosen, dim=1, stable=True)[:, :slots]
    return experts, chosen.gather(1, experts)


def _route(
    experts: torch.Tensor, valid: torch.Tensor, columns: torch.Tensor, num_out_tokens: int
) -> Route:
    """The route of tokens to experts, both [tokens, slots]."""
    flat_valid = valid.reshape(-1)
    last = int(experts.max()) + 1 if experts.numel() else 0
    keys = torch.where(flat_valid, experts.reshape(-1), last)
    order = torch.argsort(keys, stable=True)
    count = int(flat_valid.sum())
    size = count if num_out_tokens < 0 else num_out_tokens
    kept = min(size, count)
    places = torch.argsort(order)  # a permutation's inverse
    rows = torch.where(flat_valid & (places < kept), places, -1).reshape(experts.shape)
    source = torch.cat((order[:kept], order.new_full((size - kept,), -1)))
    return Route(rows.int(), columns.int(), source)


def _sources(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The source of each of `size` rows; they are numbered from 0 on, padding stands last."""
    flat = rows.reshape(-1)
    order = torch.argsort(torch.where(flat < 0, size, flat), stable=True)[:size]
    order = torch.where(flat[order] >= 0, order, -1)
    return torch.cat((order, order.new_full((size - order.shape[0],), -1)))


# ---- gathers


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.save_for_backward(route.rows)
        with on_device(inp.device):
            return _take(inp, route.source, max(1, route.rows.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        with on_device(grad.device):
            return _merge(grad, rows, None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, weights: torch.Tensor | None, route: Route
    ) -> torch.Tensor:
        ctx.save_for_backward(None if weights is None else inp, weights, *route)
        return _merge(inp, route.rows, weights)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        inp, weights, rows, _, source = ctx.saved_tensors
        d_inp = d_weights = None
        with on_device(grad.device):
            if ctx.needs_input_grad[0]:
                d_inp = _take(grad, source, max(1, rows.shape[1]))
                if weights is not None:
                    weight = _take(weights.reshape(-1, 1), source, 1)
                    d_inp = (d_inp.float() * weight.float()).to(grad.dtype)
            if weights is not None and ctx.needs_input_grad[1]:
                parts = [_copies(inp, column) for column in rows.unbind(1)]
                sums = [(part.float() * grad.float()).sum(1) for part in parts]
                d_weights = torch.stack(sums, 1).to(weights.dtype) if sums else weights.clone()
        return d_inp, d_weights, None


def _take(x: torch.Tensor, source: torch.Tensor, slots: int) -> torch.Tensor:
    """The row source // slots of x for each source; zeros where it is -1."""
    if x.shape[0] == 0 or source.shape[0] == 0:
        return x.new_zeros(source.shape[0], x.shape[1])
    taken = x[source.clamp(min=0) // slots]
    return torch.where((source >= 0).unsqueeze(1), taken, 0)


def _copies(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The row of x for each token; zeros where it is -1."""
    return _take(x, rows.long(), 1)


def _merge(x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """For each token the sum of its rows of x, in the order of the slots, in float32."""
    total = x.new_zeros(rows.shape[0], x.shape[1], dtype=torch.float32)
    for slot, column in enumerate(rows.unbind(1)):
        part = _copies(x, column).float()
        if weights is not None:  # a slot that is not used has some expert's weight, NaN perhaps
            part *= torch.where(column < 0, 0.0, weights[:, slot].float()).unsqueeze(1)
        total += part
    return total.to(x.dtype)
