"""Measuring drafters."""

from .comparison import Comparison, compare, repeated_share

__all__ = ["Comparison", "compare", "repeated_share"]
