"""Networks of this project."""
