"""A GPT as in nanoGPT: learned positions, pre-norm blocks, fused qkv, tied embeddings, loss inside."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    width: int
    dropout: float = 0.0
    bias: bool = True
    hidden: int | None = None  # of the MLP; None: 4 x width


PRESETS = {
    "tiny": Config(vocab_size=256, context=64, num_layers=8, num_heads=8, width=64),
    "124m": Config(vocab_size=50304, context=1024, num_layers=12, num_heads=12, width=768),
    "1.3b": Config(vocab_size=50304, context=2048, num_layers=24, num_heads=16, width=2048),
}


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        k = k.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        v = v.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.c_fc = nn.Linear(config.width, hidden, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(hidden, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        T = ids.size(1)
        positions = torch.arange(T, device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def _config(preset: str, **changes: float | None) -> Config:
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})


def build(
    preset: str = "tiny",
    vocab_size: int | None = None,
    context: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    width: int | None = None,
    dropout: float | None = None,
    bias: bool | None = None,
    hidden: int | None = None,
) -> GPT:
    """A preset; every argument given changes that one field of it."""
    config = _config(
        preset,
        vocab_size=vocab_size,
        context=context,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        dropout=dropout,
        bias=bias,
        hidden=hidden,
    )
    return GPT(config)


def example_inputs(
    batch_size: int = 8, preset: str = "tiny", context: int | None = None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    config = _config(preset, context=context, vocab_size=vocab_size)
    ids = torch.randint(config.vocab_size, (batch_size, config.context + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def training_batches(
    batch_size: int, preset: str = "tiny", context: int | None = None, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of Python's own documentation, as bytes; the same order for the same seed."""
    length = _config(preset, context=context).context
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch_size,), generator=generator)
        ids = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long()
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
