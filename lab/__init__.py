"""Vocabulary and bench of the treewy lab: model shapes, draft trees, state methods, oracle, profiles."""

__version__ = "0.1.0"
