"""Random operations whose draws depend on a seed alone: recomputed, they repeat; replicated, they agree."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F


def seed_of(step: int, microbatch: int, operation: int, coordinates: tuple[int, ...] = ()) -> int:
    """A seed for one random operation; `coordinates` are this rank's on the axes that split its result."""
    seed = 0
    for number in (step, microbatch, operation, len(coordinates), *coordinates):
        # One round of splitmix64, so that near numbers give unrelated seeds.
        seed = (seed + number + 0x9E3779B97F4A7C15) % 2**64
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) % 2**64
        seed ^= seed >> 31
    return seed % 2**63


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers on `device` from `seed`; the generators go on afterwards as if nothing had been drawn."""
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
        torch.manual_seed(seed)
        yield


def seeded_draw(draw: Callable[[], torch.Tensor], seed: int, device: torch.device) -> torch.Tensor:
    """What `draw` draws from `seed`."""
    with seeded(seed, device):
        return draw()


def seeded_dropout(x: torch.Tensor, p: float, training: bool, seed: int) -> torch.Tensor:
    """Dropout that draws from `seed`."""
    if not training:
        return x
    with seeded(seed, x.device):
        return F.dropout(x, p)


def seeded_native_dropout(x: torch.Tensor, p: float, training: bool | None, seed: int) -> tuple[torch.Tensor, ...]:
    """Dropout that draws from `seed` and returns its mask too."""
    with seeded(seed, x.device):
        return torch.native_dropout(x, p, training)


def seeded_feature_dropout(x: torch.Tensor, p: float, training: bool, seed: int) -> torch.Tensor:
    """Dropout of whole channels that draws from `seed`."""
    if not training:
        return x
    with seeded(seed, x.device):
        return torch.feature_dropout(x, p, True)


def seeded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int,
) -> torch.Tensor:
    """Attention whose dropout draws from `seed`."""
    with seeded(seed, query.device):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def seeded_recurrent(
    x: torch.Tensor,
    states: torch.Tensor | tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
    kind: str,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """`torch.lstm` and its kind, whose dropout between layers draws from `seed`."""
    run, options = getattr(torch, kind), (has_biases, num_layers, dropout, training, bidirectional, batch_first)
    if not training:
        return run(x, states, weights, *options)
    # Dropout of cuDNN goes on from where it was, whatever the seed.
    with seeded(seed, x.device), torch.backends.cudnn.flags(enabled=False):
        return run(x, states, weights, *options)
