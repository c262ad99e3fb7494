from tests.isolation import private_folders  # noqa: F401
