"""Scaled dot product attention: batch, heads (by key-value group) and queries may be split.

The einsum line is "b g r q d, b g k d, b g k e -> b g r q e": g key-value heads, r query heads on each. The softmax
runs over k, the products over d; a causal mask counts queries from the start of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....cost_models.work import FLOPS_PER_MULTIPLY_ADD, Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node, TensorType
from ..placement import split
from .factors import run_option
from .registry import AxisRef, Call, Labels, LocalTypes, OpRule, Option, Saved, register
from .schema import arguments, has_tensor, one_axis_of, seed_over

SCHEMA: Mapping[str, Arg] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip
# A fused backward runs five products where the forward runs two.
BACKWARD_FACTOR = 2.5
_KERNEL_RANK = 4  # batch, heads, positions, features: what fused kernels take


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given = arguments(node, SCHEMA)
    query, key, value = operands[:3]
    count = len(query.shape)
    heads = count - 3
    # Operands that broadcast over batch or heads, beyond grouped heads, are not split.
    if count < 3 or any(len(v.shape) != count or v.shape[:heads] != query.shape[:heads] for v in (key, value)):
        return ()
    num_groups = key.shape[heads]
    if value.shape[heads] != num_groups or query.shape[heads] % num_groups:
        return ()
    if not given["enable_gqa"] and query.shape[heads] != num_groups:
        return ()
    mask = operands[3] if has_tensor(given["attn_mask"]) else None
    found = []
    for dim in range(heads + 1):
        places = _with_mask([split(dim)] * 3, mask, node.output, dim)
        extent = num_groups if dim == heads else query.shape[dim]
        if places is not None and extent > 1:
            found.append(run_option(f"d{dim}", extent, places, [split(dim)]))
    if query.shape[heads] > num_groups:
        # The query heads of every key-value head are split among ranks that all hold that head.
        places = _with_mask([split(heads), None, None], mask, node.output, heads)
        if places is not None:
            places = [place and split(place.dim, num_groups) for place in places]
            found.append(run_option("r", query.shape[heads] // num_groups, places, [split(heads, num_groups)]))
    queries = count - 2
    places = _with_mask([split(queries), None, None], mask, node.output, queries)
    is_causal = bool(given["is_causal"])
    if places is not None and query.shape[queries] > 1 and (not is_causal or query.shape[-2] == key.shape[-2]):
        rows = run_option("q", query.shape[queries], places, [split(queries)])
        # A causal mask needs to know where a rank's run of queries starts.
        found.append(replace(rows, takes_groups=False, one_axis=True) if is_causal else rows)
    return tuple(found)


def _with_mask(places: list, mask: TensorType | None, output: TensorType, dim: int) -> list | None:
    """Add the mask's place; a mask broadcasts from the right. None where the mask cannot be split like the output."""
    if mask is None:
        return places
    position = dim - (len(output.shape) - len(mask.shape))
    if position < 0 or mask.shape[position] == 1:
        return [*places, None]
    return [*places, split(position)] if mask.shape[position] == output.shape[dim] else None


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    given = arguments(node, SCHEMA)
    drawn = (*(f"d{i}" for i in range(len(node.output.shape) - 2)), "r", "q")
    kwargs: tuple[tuple[str, Arg], ...] = ()
    for name in ("scale", "enable_gqa"):
        if given[name] != SCHEMA[name]:
            kwargs += ((name, given[name]),)
    is_random = given["dropout_p"] != 0.0
    seed: tuple[tuple[str, Arg], ...] = (("seed", seed_over(labels, *drawn)),) if is_random else ()
    if given["is_causal"] and (rows := one_axis_of(labels, "q")):
        if is_random:
            kwargs += (("dropout_p", given["dropout_p"]),)
        args = (given["query"], given["key"], given["value"], AxisRef(rows))
        return Call(target="causal_attention_rows", args=args, kwargs=kwargs + seed)
    args = tuple(given[name] for name in list(SCHEMA)[:6])
    return Call(target="seeded_attention" if is_random else node.op, args=args, kwargs=kwargs + seed)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Two products over the visible pairs; with split causal queries those of the last rank, which sees the most."""
    query, key, value = operands[:3]
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    pairs = num_queries * num_keys
    if arguments(node, SCHEMA)["is_causal"]:
        pairs -= min(num_queries, num_keys) * num_queries // 2
    heads = query.numel // (num_queries * query.shape[-1])
    flops = FLOPS_PER_MULTIPLY_ADD * heads * pairs * (query.shape[-1] + value.shape[-1])
    read = sum(t.num_bytes for t in operands)
    written = outputs[0].num_bytes
    backward = Pass()
    if any(t.requires_grad for t in operands):
        backward = Pass(attention_flops=int(BACKWARD_FACTOR * flops), bytes=2 * (read + written), kernels=2)
    forward = Pass(attention_flops=flops, bytes=read + written, kernels=1)
    return Work(forward=forward, backward=backward, dtype=query.dtype)


_KERNELS = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
)


def _saved(node: Node) -> Saved:
    """Query, key, value, mask, the output and a float32 log-sum-exp for each query."""
    rows = node.output.numel // node.output.shape[-1]
    return Saved(operands=tuple(range(len(node.operands))), outputs=(0,), extra_bytes=4 * rows, kernel_bytes=4 * rows)


def _cpu_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """One kernel keeps what the CUDA kernels do; without one, the products and the softmax between them are apart."""
    given = arguments(node, SCHEMA)
    query, key, value = operands[:3]
    rows, item = query.numel // query.shape[-1], ITEM_BYTES[query.dtype]
    scores = rows * key.shape[-2]
    is_drawn = given["dropout_p"] != 0.0
    mask = operands[3] if has_tensor(given["attn_mask"]) else None
    has_one_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    is_one_kernel = len(query.shape) == _KERNEL_RANK and has_one_size and not is_drawn
    if is_one_kernel and not (mask is not None and mask.requires_grad):
        extra = sums = ITEM_BYTES["float32"] * rows
        if call.target == "causal_attention_rows":  # the last rank sees all keys, by a mask
            extra += item * query.shape[-2] * key.shape[-2]
        if mask is not None and mask.dtype == "bool":
            return Saved(operands=(0, 1, 2), outputs=(0,), extra_bytes=extra + item * mask.numel, kernel_bytes=sums)
        return Saved(operands=tuple(range(len(operands))), outputs=(0,), extra_bytes=extra, kernel_bytes=sums)
    # Scaled queries and keys, the softmax and, where it drops, factors and results; keys and values of every head.
    repeats = query.shape[-3] // key.shape[-3] if len(query.shape) > _KERNEL_RANK - 1 else 1
    extra = query.num_bytes + repeats * key.num_bytes + item * scores * (3 if is_drawn else 1)
    if repeats > 1:
        return Saved(extra_bytes=extra + repeats * value.num_bytes, kernel_bytes=item * scores)
    return Saved(operands=(2,), extra_bytes=extra, kernel_bytes=item * scores, flattened=((2, 2),))


register(
    OpRule(
        ops=("aten.scaled_dot_product_attention.default",),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"cpu": _cpu_saved},
        localise=_localise,
        kernels=_KERNELS,
    )
)
