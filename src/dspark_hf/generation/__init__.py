"""Speculative decoding inside `generate`."""

from .engine import Request, SpeculativeEngine
from .hook import custom_generate, install, uninstall
from .stats import GenerationStats, RoundStats

__all__ = ["GenerationStats", "Request", "RoundStats", "SpeculativeEngine", "custom_generate", "install", "uninstall"]
