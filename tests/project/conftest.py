from tests.isolation import private_folders, warm_cache, warm_settings  # noqa: F401
