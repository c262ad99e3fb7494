"""The trainer: training arguments, training loop, data loading, checkpoints, and one trainer class per strategy."""
