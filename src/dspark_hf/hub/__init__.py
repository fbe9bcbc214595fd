"""Drafters on the Hub: their repositories, model cards, and the code that travels with them."""

from .card import CardRecipe, keep_evaluation, write_card
from .repository import push_drafter, save_repository

__all__ = ["CardRecipe", "keep_evaluation", "push_drafter", "save_repository", "write_card"]
