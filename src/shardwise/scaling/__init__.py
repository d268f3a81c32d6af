"""Hyperparameters that transfer across width and depth, for models that nobody annotated."""
