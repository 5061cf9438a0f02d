"""Causal attention where an axis splits the queries."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias, CausalVariant

from .randomness import seeded


def causal_attention_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis: DeviceMesh,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int = 0,
) -> torch.Tensor:
    """Causal attention of this rank's run of queries over whole keys and values.

    The last query sees the keys up to its own position in the whole sequence; later keys are cut off, which aligns the
    causal mask with the lower right corner.
    """
    end = query.size(-2) * (axis.get_local_rank() + 1)
    # As causal_lower_right makes it, whose constructor does not run under selective checkpointing (torch 2.13).
    mask = torch.empty(0).as_subclass(CausalBias)
    mask.__init__(CausalVariant.LOWER_RIGHT, query.size(-2), end)
    with seeded(seed, query.device):
        return F.scaled_dot_product_attention(
            query, key[..., :end, :], value[..., :end, :], mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )
