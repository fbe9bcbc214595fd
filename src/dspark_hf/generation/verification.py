"""The acceptance rule: which drafted tokens stay, and which token follows them.

Left to right, a drafted token x is kept with probability min(1, p(x) / q(x)), where q is the distribution it was
really drawn from and p the target's, both after every logits processor. At the first rejection the next token is
drawn from norm(max(p - q, 0)), and from p after a full acceptance; so each token has exactly the law p (Leviathan et
al. 2023; DSpark paper, section 2). Greedily, a drafted token is kept while it is the target's argmax.

Shape symbols: `batch`, `k` drafted tokens, `vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Verdict:
    """Outcome of one verification.

    Attributes:
        accepted: `(batch,)`, number of drafted tokens kept.
        next_ids: `(batch,)`, the token after them (the bonus token where all were kept).
    """

    accepted: torch.Tensor
    next_ids: torch.Tensor


def leading_true(flags: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of true values: `(batch, k)` to `(batch,)`."""
    return flags.long().cumprod(dim=1).sum(dim=1)


def verify_greedy(
    draft_ids: torch.Tensor, target_scores: torch.Tensor, lengths: torch.Tensor | None = None
) -> Verdict:
    """Greedy rule.

    Args:
        draft_ids: `(batch, k)`.
        target_scores: `(batch, k + 1, vocab)`, the target's processed scores.
        lengths: `(batch,)`, how many of a row's drafted tokens count, all if not given; what follows is filling.
    """
    choices = target_scores.argmax(dim=-1)
    accepted = leading_true(draft_ids == choices[:, :-1])
    if lengths is not None:
        accepted = torch.minimum(accepted, lengths)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> Verdict:
    """Rejection sampling.

    Args:
        draft_ids: `(batch, k)`.
        draft_probs: `(batch, k, vocab)`, the q that each drafted token was drawn from.
        target_probs: `(batch, k + 1, vocab)`, the target's p at the same positions and one further.
        uniforms: `(batch, k)` in [0, 1); drawn here if not given.
        lengths: `(batch,)`, how many of a row's drafted tokens count, all if not given; what follows is filling.
    """
    p = target_probs[:, :-1].gather(2, draft_ids[..., None]).squeeze(-1)
    q = draft_probs.gather(2, draft_ids[..., None]).squeeze(-1)
    if uniforms is None:
        uniforms = torch.rand_like(p)
    accepted = leading_true(uniforms * q < p)
    if lengths is not None:
        accepted = torch.minimum(accepted, lengths)
    return Verdict(accepted, sample(_next_distribution(accepted, draft_probs, target_probs, lengths)))


def _next_distribution(
    accepted: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Distribution `(batch, vocab)` of the token after `accepted (batch,)` kept ones of `lengths (batch,)`."""
    vocab, drafted = target_probs.shape[-1], draft_probs.shape[1]
    p = target_probs.gather(1, accepted[:, None, None].expand(-1, 1, vocab)).squeeze(1)
    if drafted == 0:
        return p
    rejected = accepted.clamp(max=drafted - 1)[:, None, None].expand(-1, 1, vocab)
    residual = (p - draft_probs.gather(1, rejected).squeeze(1)).clamp(min=0)
    total = residual.sum(dim=-1, keepdim=True)
    # A rejection where p and q agree to the last bit has no residual left; p is its limit.
    use_target = (accepted == (drafted if lengths is None else lengths))[:, None] | (total <= 0)
    return torch.where(use_target, p, residual / total.clamp(min=torch.finfo(total.dtype).tiny))


def sample(probs: torch.Tensor) -> torch.Tensor:
    """One token from each row: `(batch, vocab)` to `(batch,)`; -1 for a row that is no distribution (NaN)."""
    return draw(probs).where(probs.sum(dim=-1).isfinite(), -1)


def draw(probs: torch.Tensor) -> torch.Tensor:
    """As `sample`, but any token for a row that is no distribution.

    The first token at which the cumulated probabilities exceed a uniform variate: one variate per row, where
    `torch.multinomial` draws one for each entry of the vocabulary, which on a CPU takes longer than the rest of a
    drafted token. Cumulated in double precision, so that large vocabularies lose nothing.
    """
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    levels = torch.rand(probs.shape[0], 1, dtype=torch.float64, device=probs.device) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, levels, right=True).clamp_(max=probs.shape[-1] - 1).squeeze(-1)
