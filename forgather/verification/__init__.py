"""The proof that generated code builds the same objects as its config, on stand-ins for all imported objects."""
