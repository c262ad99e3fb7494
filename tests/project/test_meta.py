import pytest

from forgather.errors import ForgatherError
from forgather.project.locations import library_dir
from forgather.project.metadata_cache import load_meta
from tests.project.workbench import make_project


def load(folder, meta):
    return load_meta(str(make_project(folder, meta=meta)))


def test_an_empty_meta_file_is_a_project_with_every_default(tmp_path):
    meta = load(tmp_path / "tiny", "")

    assert "tiny" == meta.name
    assert ("", "configs", None) == (meta.description, meta.config_prefix, meta.default_config)
    assert (str(tmp_path / "tiny" / "templates"),) == meta.searchdir
    assert (str(tmp_path / "tiny" / "templates"), library_dir()) == meta.searchpath
    assert () == meta.diagnostics


def test_all_keys_are_read(tmp_path):
    (tmp_path / "shared").mkdir()
    meta = load(
        tmp_path / "tiny",
        "name: Tiny\ndescription: one line\nsearchdir: [templates, ../shared]\n"
        "config_prefix: runs\ndefault_config: a\nsystem_path: [src]\n",
    )

    assert ("Tiny", "one line", "runs", "a") == (
        meta.name,
        meta.description,
        meta.config_prefix,
        meta.default_config,
    )
    assert (str(tmp_path / "tiny/templates"), str(tmp_path / "shared")) == meta.searchdir
    assert (str(tmp_path / "tiny/src"),) == meta.system_path


def test_meta_is_a_template_that_sees_the_standard_variables(tmp_path):
    meta = load(tmp_path / "tiny", "name: {{ basename(project_dir) | upper }}\n## gone\n")

    assert "TINY" == meta.name


def test_meta_extends_a_template_of_the_workspace(tmp_path):
    shared = tmp_path / "forgather_workspace"
    shared.mkdir()
    (shared / "meta_defaults.yaml").write_text("description: {{ workspace_root }}\n-- block more\n-- endblock more\n")

    meta = load(tmp_path / "tiny", "-- extends 'meta_defaults.yaml'\n[more]\nname: Tiny\n")

    assert ("Tiny", str(tmp_path)) == (meta.name, meta.description)
    assert str(tmp_path) == meta.workspace_root
    assert str(shared) in meta.searchpath


def test_meta_finds_templates_of_the_user(tmp_path, private_folders):
    folder = private_folders / "config" / "forgather" / "templates"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("description: of the user\n")

    assert "of the user" == load(tmp_path / "tiny", "-- include 'mine.yaml'\n").description


def test_the_project_stands_in_for_a_missing_workspace(tmp_path):
    assert str(tmp_path / "tiny") == load(tmp_path / "tiny", "description: {{ workspace_root }}\n").description


def test_an_unknown_key_is_an_error_with_a_suggestion(tmp_path):
    with pytest.raises(ForgatherError, match="meta.yaml has no key 'default_confg'") as caught:
        load(tmp_path, "name: Tiny\ndefault_confg: a\n")

    error = caught.value
    assert ("FG402", 2, "did you mean 'default_config'?") == (error.code, error.span.line, error.hint)


def test_all_unknown_keys_are_reported_together(tmp_path):
    with pytest.raises(ForgatherError) as caught:
        load(tmp_path, "nam: Tiny\nsearch: a\n")

    assert ["meta.yaml has no key 'search'"] == [other.message for other in caught.value.others]


def test_definitions_may_have_any_name(tmp_path):
    assert "Tiny" == load(tmp_path, ".n: &n Tiny\nname: *n\n").name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [a]\n", "'name' in meta.yaml is \\['a'\\], and must be a text"),
        ("searchdir: {a: b}\n", "'searchdir' in meta.yaml is .*and must be a folder or a list of folders"),
        ("searchdir: [1]\n", "'searchdir' in meta.yaml"),
        ("name: !call:os:getcwd\n", "'name' in meta.yaml holds a call of 'os:getcwd', and may hold plain data only"),
        ("name: !var x\n", "holds a '!var'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_with_its_place(tmp_path, text, message):
    with pytest.raises(ForgatherError, match=message) as caught:
        load(tmp_path, text)

    assert ("FG403", 1) == (caught.value.code, caught.value.span.line)


@pytest.mark.parametrize("prefix", ["../x", "/etc", "a/../../b"])
def test_a_prefix_that_leads_out_is_refused(tmp_path, prefix):
    with pytest.raises(ForgatherError, match="leads out of the search folders") as caught:
        load(tmp_path, f"config_prefix: {prefix}\n")

    assert "FG407" == caught.value.code


def test_a_search_folder_that_is_missing_is_a_warning_that_names_it(tmp_path):
    (warning,) = load(tmp_path, "searchdir: [templates, templatez]\n").diagnostics

    assert ("FG404", "search folder 'templatez' does not exist", "warning") == (
        warning.code,
        warning.message,
        warning.severity,
    )
    assert str(tmp_path / "meta.yaml") == warning.span.file


def test_a_folder_of_modules_that_is_missing_is_a_warning_at_its_line(tmp_path):
    (warning,) = load(tmp_path, "system_path:\n  - .\n  - scr\n").diagnostics

    assert ("FG404", "folder 'scr' does not exist", "warning", 3) == (
        warning.code,
        warning.message,
        warning.severity,
        warning.span.line,
    )


def test_a_text_is_one_search_folder(tmp_path):
    assert (str(tmp_path / "templates"),) == load(tmp_path, "searchdir: templates\n").searchdir
