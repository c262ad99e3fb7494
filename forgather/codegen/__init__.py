"""Code generation: the graph of a config as Python code, YAML or a diagram."""
