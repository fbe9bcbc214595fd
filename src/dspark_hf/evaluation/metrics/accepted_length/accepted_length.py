"""Accepted length of speculative decoding, for `evaluate.load`."""

from __future__ import annotations

from typing import Any

import evaluate

from dspark_hf.evaluation import acceptance
from dspark_hf.evaluation.metrics.info import ROUNDS, metric_info

_DESCRIPTION = """
Mean tokens per round of drafting and verification, the target's own (bonus) token included, and how often the drafted
token at each position is accepted.
"""

_INPUTS = """
Args:
    verified: drafted tokens that were verified in each round of one row.
    survived: how many of them verification accepted, from the first on.
    emitted: tokens added to the text: those and the bonus token, less what an end cut off.
Returns:
    accepted_length: mean of `emitted`; NaN without rounds.
    predicted_accepted_length: 1 + p1 + p1 p2 + ..., from the conditional acceptances p.
    conditional_acceptance: for each position, the share of tokens that were accepted where all before them were.
    prefix_acceptance: for each position, the share of rounds in which it and all before it were accepted.
"""


class AcceptedLength(evaluate.Metric):
    """`evaluate.load("<folder of this file>")`; computed by `dspark_hf.evaluation.acceptance`."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(_DESCRIPTION, _INPUTS, ROUNDS)

    def _compute(self, verified: Any, survived: Any, emitted: Any) -> dict[str, Any]:
        rounds = acceptance.Rounds(verified, survived, emitted)
        return {
            "accepted_length": rounds.accepted_length,
            "predicted_accepted_length": rounds.predicted_length,
            "conditional_acceptance": rounds.conditional_acceptance(),
            "prefix_acceptance": rounds.prefix_acceptance(),
        }
