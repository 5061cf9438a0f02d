"""A multi-layer perceptron for classification. The loss is a function beside the model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build(num_features: int = 32, width: int = 64, num_hidden: int = 7, num_classes: int = 16) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(num_features, width), nn.ReLU()]
    for _ in range(num_hidden - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def loss(logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def example_inputs(batch_size: int = 32, num_features: int = 32, num_classes: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, num_features), torch.randint(num_classes, (batch_size,))
