"""Matrix factorisation for recommendations: a vector and a bias for every user and item."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MatrixFactorization(nn.Module):
    def __init__(self, num_users: int, num_items: int, rank: int):
        super().__init__()
        self.users = nn.Embedding(num_users, rank)
        self.items = nn.Embedding(num_items, rank)
        self.user_bias = nn.Embedding(num_users, 1)
        self.item_bias = nn.Embedding(num_items, 1)
        for table in (self.users, self.items, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
        score = (self.users(users) * self.items(items)).sum(dim=-1)
        score = score + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)
        return F.mse_loss(score, ratings)


def build(num_users: int = 1024, num_items: int = 512, rank: int = 100) -> MatrixFactorization:
    return MatrixFactorization(num_users, num_items, rank)


def example_inputs(batch_size: int = 64, num_users: int = 1024, num_items: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    users = torch.randint(num_users, (batch_size,))
    items = torch.randint(num_items, (batch_size,))
    return users, items, 1 + 4 * torch.rand(batch_size)
