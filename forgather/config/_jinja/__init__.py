"""Jinja, and everything that knows it: the only importer of jinja2. Imported by the first `render`."""
