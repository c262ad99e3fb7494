from tests.isolation import private_folders, warm_cache  # noqa: F401
