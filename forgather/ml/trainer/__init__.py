"""The trainer: its arguments, its training loop, its data, its checkpoints, and the strategies' entry points."""
