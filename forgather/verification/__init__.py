"""Proof that generated code builds what its config builds, with stand-ins for everything that a config names."""
