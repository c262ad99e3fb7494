"""Code generation: a graph written as text that means the same."""
