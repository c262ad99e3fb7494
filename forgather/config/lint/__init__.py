"""Findings about a config that is correct YAML: probable mistakes in its text, and arguments that do not fit a call."""
