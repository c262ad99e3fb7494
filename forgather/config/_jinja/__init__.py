"""The template engine, the only importer of jinja2. The first call of `render` imports it."""
