"""A Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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
    hidden: int
    tied: bool = False
    rope_theta: float = 500_000.0


PRESETS = {
    "tiny": Config(
        vocab_size=256, context=64, num_layers=8, num_heads=8, num_kv_heads=4, width=64, hidden=192
    ),
    "1b": Config(
        vocab_size=128256, context=8192, num_layers=16, num_heads=32, num_kv_heads=8, width=2048, hidden=8192, tied=True
    ),
    "8b": Config(
        vocab_size=128256, context=8192, num_layers=32, num_heads=32, num_kv_heads=8, width=4096, hidden=14336
    ),
    "70b": Config(
        vocab_size=128256, context=8192, num_layers=80, num_heads=64, num_kv_heads=8, width=8192, hidden=28672
    ),
    "405b": Config(
        vocab_size=128256, context=8192, num_layers=126, num_heads=128, num_kv_heads=8, width=16384, hidden=53248
    ),
}  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.wq = nn.Linear(config.width, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        head_dim = config.width // config.num_heads
        inv_freq = config.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device)
        angles = torch.outer(positions, self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
    tied: bool | None = None,
) -> Llama:
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
        tied=tied,
    )
    return Llama(config)


def example_inputs(
    batch_size: int = 8, preset: str = "tiny", context: int | None = None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    config = _config(preset, context=context, vocab_size=vocab_size)
    ids = torch.randint(config.vocab_size, (batch_size, config.context + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
