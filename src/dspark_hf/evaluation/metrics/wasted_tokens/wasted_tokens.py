"""Verified tokens that speculative decoding did not keep, for `evaluate.load`."""

from __future__ import annotations

from typing import Any

import evaluate

from dspark_hf.evaluation import acceptance
from dspark_hf.evaluation.metrics.info import ROUNDS, metric_info

_DESCRIPTION = """
Drafted tokens that the target verified in vain: rejected, behind a rejected one, or behind the end of the text.
"""

_INPUTS = """
Args:
    verified: drafted tokens that were verified in each round of one row.
    survived: how many of them verification accepted, from the first on.
    emitted: tokens added to the text: those and the bonus token, less what an end cut off.
Returns:
    wasted_tokens: verified tokens that are not in the text.
    verified_tokens: all verified tokens.
    acceptance_rate: share of the verified tokens that are in the text; NaN where none was verified.
"""


class WastedTokens(evaluate.Metric):
    """`evaluate.load("<folder of this file>")`; computed by `dspark_hf.evaluation.acceptance`."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(_DESCRIPTION, _INPUTS, ROUNDS)

    def _compute(self, verified: Any, survived: Any, emitted: Any) -> dict[str, Any]:
        rounds = acceptance.Rounds(verified, survived, emitted)
        return {
            "wasted_tokens": int(rounds.wasted.sum()),
            "verified_tokens": int(rounds.verified.sum()),
            "acceptance_rate": rounds.acceptance_rate,
        }
