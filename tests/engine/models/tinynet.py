"""The two-block network of the dtype tutorials, with the weights that `manual_seed(123)` gives."""

import torch
from torch import nn


class TinyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(123)
        self.token_embedding = nn.Embedding(2, 2)
        self.linear_1 = nn.Linear(2, 2)
        self.layernorm_1 = nn.LayerNorm(2)
        self.linear_2 = nn.Linear(2, 2)
        self.layernorm_2 = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.token_embedding(token_ids)
        hidden = self.layernorm_1(self.linear_1(hidden))
        hidden = self.layernorm_2(self.linear_2(hidden))
        return self.head(hidden)


def example_inputs() -> tuple[torch.Tensor]:
    return (torch.tensor([[1, 0], [0, 1]]),)
