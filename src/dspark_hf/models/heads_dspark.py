"""The sequential heads (equations 4 to 6 of the DSpark paper) and the confidence head (equation 7).

Shape symbols: `...` any leading shape, `block` the drafted positions, `d` the hidden size, `r` the Markov rank and
`vocab` the tokens that the drafter predicts. A sequential head turns the token before each position, which may be any
of the target's, into a bias on that position's base logits, so `p_k(v) ∝ exp(U_k(v) + B_k(v))`.
"""

from __future__ import annotations

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class VanillaMarkovHead(nn.Module):
    """First-order bias `B_k = W_1[x_{k-1}] W_2` of rank `r` (equation 5)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.predicted_vocab_size, bias=False)

    def embed(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """Markov embeddings `W_1[x_{k-1}]`: `(...)` token ids to `(..., r)`."""
        return self.markov_w1(previous_ids)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """State before the first position for `hidden` of shape `(..., d)`; memoryless heads have none."""
        return None

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Features of one position: `embedding (..., r)`, `hidden (..., d)` to `(..., r)` and the next state."""
        return embedding, None

    def bias(self, features: torch.Tensor) -> torch.Tensor:
        """Logit bias `B_k`: features `(..., r)` to `(..., vocab)`."""
        return self.markov_w2(features)

    def forward(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Teacher-forced biases of whole blocks.

        Args:
            previous_ids: `(..., block)`, the anchor followed by the tokens before each further position.
            hidden: `(..., block, d)`, the backbone's output.

        Returns:
            `(..., block, vocab)` biases to add to the base logits.
        """
        return self.bias(self.features(self.embed(previous_ids), hidden))

    def features(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Features of whole blocks: `(..., block, r)` and `(..., block, d)` to `(..., block, r)`."""
        return self.step(embeddings, hidden, None)[0]


class GatedMarkovHead(VanillaMarkovHead):
    """First-order bias with a gate: `B_k = W_2 (σ(W_g [h_k ; W_1[x_{k-1}]]) ⊙ W_1[x_{k-1}])`."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the base class."""
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
        return gate * embedding, None


class RNNMarkovHead(VanillaMarkovHead):
    """Recurrent bias (equation 6).

    With `z_k = [s_{k-1} ; W_1[x_{k-1}] ; h_k]` and one joint projection cut into gate, candidate and output:
    `s_k = σ(g) ⊙ s_{k-1} + (1 - σ(g)) ⊙ tanh(c)` and `B_k = W_2 tanh(o)`, from `s_0 = 0`.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros of shape `(..., r)` for `hidden (..., d)`."""
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w1.embedding_dim)

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See the base class."""
        if state is None:
            state = self.initial_state(hidden)
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        return torch.tanh(output), torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))

    def features(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class; positions are visited from left to right."""
        state: torch.Tensor | None = self.initial_state(hidden[..., 0, :])
        features = []
        for position in range(hidden.shape[-2]):
            feature, state = self.step(embeddings[..., position, :], hidden[..., position, :], state)
            features.append(feature)
        return torch.stack(features, dim=-2)


class ConfidenceHead(nn.Module):
    """Logit of `c_k = σ(w^T [h_k ; W_1[x_{k-1}]])`, the chance that `x_k` survives if all before it did (equation 7).

    It never sees `x_k` itself: a cut that depends on a token's own identity would not be lossless.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """`hidden (..., d)` and, with Markov features, `embedding (..., r)` to float32 logits `(...)`."""
        features = hidden if embedding is None else torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1)
        return self.proj(features).squeeze(-1).float()


SEQUENTIAL_HEADS: dict[str, type[VanillaMarkovHead]] = {
    "vanilla": VanillaMarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNMarkovHead,
}


def build_sequential_head(config: DSparkConfig) -> VanillaMarkovHead | None:
    """The sequential head that `config` asks for, `None` where `markov_rank` is 0."""
    return SEQUENTIAL_HEADS[config.markov_head_type](config) if config.markov_rank > 0 else None


__all__ = [
    "SEQUENTIAL_HEADS",
    "ConfidenceHead",
    "GatedMarkovHead",
    "RNNMarkovHead",
    "VanillaMarkovHead",
    "build_sequential_head",
]
