"""Findings about a config that is correct YAML: probable mistakes in its text, and calls that do not fit."""
