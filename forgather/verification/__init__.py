"""The proof that generated code builds the same objects as its config; stand-ins replace all imported objects."""
