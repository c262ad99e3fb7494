"""The trainer: its arguments, its loop, and the small modules that prepare and follow a run."""
