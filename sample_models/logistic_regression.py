"""Logistic regression: one weight for each feature."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LogisticRegression(nn.Module):
    def __init__(self, num_features: int):
        super().__init__()
        self.linear = nn.Linear(num_features, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.linear(x).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, y)


def build(num_features: int = 64) -> LogisticRegression:
    return LogisticRegression(num_features)


def example_inputs(batch_size: int = 64, num_features: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, num_features), torch.randint(2, (batch_size,)).float()
