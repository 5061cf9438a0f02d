"""A mixture-of-experts decoder: grouped-query attention, and a top-k router over SwiGLU experts of limited capacity.

Routing is done sequence by sequence, the "groups" of GShard (arXiv:2006.16668, algorithm 1): every expert takes up to
`capacity` tokens of a sequence, first come first served, and the load-balancing loss is a mean over sequences. So a
sample is routed alike whatever batch, microbatch or rank it is in.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    width: int
    hidden: int  # of one expert
    num_experts: int
    experts_per_token: int = 2
    capacity_factor: float = 1.25  # room of an expert over its even share
    balance: float = 0.01  # weight of the load-balancing loss


PRESETS = {
    "tiny": Config(
        vocab_size=256, context=32, num_layers=4, num_heads=4, num_kv_heads=4, width=32, hidden=64, num_experts=4
    ),
    # The sizes of Mixtral 8x7B, with learned positions.
    "8x7b": Config(
        vocab_size=32000, context=4096, num_layers=32, num_heads=32, num_kv_heads=8, width=4096, hidden=14336,
        num_experts=8,
    ),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class Experts(nn.Module):
    """Every expert is a slice of the weights: (experts, in, out)."""

    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.num_experts, config.width, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.width))
        self.w3 = nn.Parameter(torch.empty(config.num_experts, config.width, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(experts, tokens, width) -> the same."""
        return torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        even_share = config.context * config.experts_per_token / config.num_experts
        self.capacity = min(config.context, int(config.capacity_factor * even_share))
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens, and the load-balancing loss of every sequence."""
        B, T, D = x.shape
        E, K, C = self.num_experts, self.experts_per_token, self.capacity
        probabilities = F.softmax(self.router(x), dim=-1)
        weights, experts = probabilities.topk(K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        choice = F.one_hot(experts, E)
        # The place of every choice in the queue of its expert; those behind the capacity are dropped.
        place = (choice.flatten(1, 2).cumsum(1).view(B, T, K, E) * choice).sum(-1) - 1
        ones = torch.ones_like(weights)
        chosen = choice * ones.unsqueeze(-1)
        slot = F.one_hot(place.clamp(max=C - 1), C) * (ones * (place < C)).unsqueeze(-1)
        # (B, T, E, C): which place of which expert a token goes to, and with what weight it comes back.
        dispatch = torch.matmul(chosen.transpose(2, 3), slot)
        combine = torch.matmul((chosen * weights.unsqueeze(-1)).transpose(2, 3), slot)
        tokens = torch.matmul(dispatch.flatten(2).transpose(1, 2), x).view(B, E, C, D)
        out = self.experts(tokens.transpose(0, 1).reshape(E, B * C, D)).view(E, B, C, D)
        y = torch.matmul(combine.flatten(2), out.transpose(0, 1).reshape(B, E * C, D))
        balance = E * (chosen.mean((1, 2)) * probabilities.mean(1)).sum(-1)
        return y, balance


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.moe = MoE(config)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, more = self.moe(self.moe_norm(x))
        return x + y, balance + more


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.balance = config.balance
        self.embeddings = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embeddings(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        balance = x.new_zeros(x.size(0))
        for layer in self.layers:
            x, balance = layer(x, balance)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.balance * balance.mean()


def _config(preset: str, **changes: float | None) -> Config:
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})


def build(
    preset: str = "tiny",
    vocab_size: int | None = None,
    context: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    num_experts: int | None = None,
    experts_per_token: int | None = None,
    capacity_factor: float | None = None,
) -> MixtureOfExperts:
    """A preset; every argument given changes that one field of it."""
    config = _config(
        preset,
        vocab_size=vocab_size,
        context=context,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        hidden=hidden,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        capacity_factor=capacity_factor,
    )
    return MixtureOfExperts(config)


def example_inputs(
    batch_size: int = 8, preset: str = "tiny", context: int | None = None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    config = _config(preset, context=context, vocab_size=vocab_size)
    ids = torch.randint(config.vocab_size, (batch_size, config.context + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
