"""Speculative decoding inside `generate`."""

from .hook import custom_generate, install, uninstall
from .stats import GenerationStats, RoundStats

__all__ = ["GenerationStats", "RoundStats", "custom_generate", "install", "uninstall"]
