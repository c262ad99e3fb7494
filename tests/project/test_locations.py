import os
import stat

from forgather.project.locations import cache_dir, config_dir, error_pages_dir


def test_the_cache_folder_is_private(private_folders):
    folder = cache_dir("templates")

    assert str(private_folders / "cache" / "forgather" / "templates") == folder
    assert 0o700 == stat.S_IMODE(os.stat(folder).st_mode)
    assert 0o700 == stat.S_IMODE(os.stat(os.path.dirname(folder)).st_mode)


def test_an_open_cache_folder_is_closed(private_folders):
    folder = cache_dir("templates")
    os.chmod(folder, 0o755)

    assert folder == cache_dir("templates")
    assert 0o700 == stat.S_IMODE(os.stat(folder).st_mode)


def test_the_cache_can_be_switched_off(monkeypatch, private_folders):
    monkeypatch.setenv("FORGATHER_CACHE", "off")

    assert cache_dir("templates") is None
    assert not (private_folders / "cache").exists()


def test_a_cache_folder_that_cannot_be_made_is_none(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert cache_dir("templates") is None


def test_a_cache_folder_that_is_a_link_is_not_used(private_folders, tmp_path):
    top = private_folders / "cache" / "forgather"
    top.mkdir(parents=True)
    (top / "templates").symlink_to(tmp_path)

    assert cache_dir("templates") is None


def test_the_config_folder_is_where_xdg_says(private_folders):
    assert str(private_folders / "config" / "forgather") == config_dir()


def test_the_error_pages_are_found_in_a_clone():
    assert os.path.isfile(os.path.join(error_pages_dir(), "FG400.md"))
