"""Blocks with a residual gate each, and a logit scale and bias as contrastive models have them."""

import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gate.tanh() * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=16, layers=4, classes=8):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)
        self.logit_scale = nn.Parameter(torch.tensor(0.3))
        self.bias = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, labels):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) * self.logit_scale.exp() + self.bias, labels)


def build(width: int = 16, layers: int = 4):
    return Net(width, layers)


def example_inputs(batch_size: int = 16):
    return torch.randn(batch_size, 16), torch.randint(0, 8, (batch_size,))
