"""Files and folders that are too large: each is a located error, or passed over, for little time and memory."""

import contextlib
import io
import os
import re
import resource
import threading

import pytest

import forgather.config.load as loading
from forgather import bounded, process_limits
from forgather.cli.main import main
from forgather.config._jinja.budget import Account
from forgather.errors import BudgetError
from forgather.project import metadata_file
from forgather.project import project as project_module
from forgather.project.project import Project
from tests.measured import measured
from tests.project.workbench import make_project

GB = 1 << 30


def sparse(file, size):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as stream:
        stream.truncate(size)


def told(*arguments, under=contextlib.nullcontext):
    """The cost of a command, with its status and what it says.

    Args:
        under: called in the process of the command, before it: what it changes there is changed nowhere else.
    """
    return measured(said_by, arguments, under)


def said_by(arguments, under):
    under()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = main(list(arguments))
    return status, said.getvalue()


CODE = "main: !call:big.py:f [1]\nother: !call:mod:g\n"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "p", {"templates/configs/a.yaml": "main: 1\n", "templates/configs/c.yaml": CODE})
    (folder / "meta.yaml").write_text("name: Large\ndefault_config: a\nsystem_path: .\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("command", ["ls", "pp", "check"])
@pytest.mark.parametrize("known", [False, True])
def test_a_meta_file_of_three_gigabytes(bench, command, known):
    if known:
        main(["pp"])
    sparse(bench / "meta.yaml", 3 * GB)
    cost = told(command)
    status, said = cost.result

    assert 1 == status and "meta.yaml" in said and "FG1" in said
    assert cost.is_small


@pytest.mark.parametrize("name", ["templates/configs/a.yaml", "templates/part.yaml"])
def test_a_template_of_ten_gigabytes(bench, name):
    (bench / "templates/configs/a.yaml").write_text("main: 1\n-- include 'part.yaml'\n")
    sparse(bench / name, 10 * GB)
    cost = told("pp")
    status, said = cost.result

    assert 1 == status and name.rpartition("/")[2] in said and "FG1" in said
    assert cost.is_small


@pytest.mark.parametrize("command", ["check", "graph", "code", "blame"])
def test_code_of_ten_gigabytes(bench, command):
    (bench / "big.py").write_text("import mod\ndef f(a): pass\n")
    (bench / "mod.py").write_text("import big\ndef g(): pass\n")
    main(["-t", "c", "check"])
    sparse(bench / "big.py", 10 * GB)
    sparse(bench / "mod.py", 10 * GB)

    assert told("-t", "c", command).is_small


def test_code_that_is_too_large_is_listed_as_unchecked(bench):
    (bench / "mod.py").write_text("def g(): pass\n")
    sparse(bench / "big.py", 10 * GB)
    status, said = told("-t", "c", "check", "-v").result

    assert "big.py cannot be read, or is too large" in said


def test_a_golden_of_ten_gigabytes(bench):
    main(["golden", "--update"])
    (golden,) = (bench / "goldens").rglob("a.yaml")
    sparse(golden, 10 * GB)
    cost = told("golden")

    assert 0 != cost.result[0]
    assert cost.is_small


@pytest.mark.parametrize("name", ["run.json", "graph.yaml", "overrides.yaml", "config.yaml"])
def test_a_record_of_ten_gigabytes(bench, tmp_path, name):
    (bench / "templates/configs/a.yaml").write_text(
        f"meta: {{output_dir: {tmp_path}/out}}\nmain: !partial:builtins:int [0]\n"
    )
    assert 0 == main(["train"])
    (run,) = (tmp_path / "out" / "runs").glob("2*")
    sparse(run / name, 10 * GB)
    for command in ("diff", "rerun"):
        cost = told(command, str(run), *(["a"] if command == "diff" else []))
        assert cost.is_small
        assert name != "run.json" or 0 != cost.result[0]


def with_few_entries():
    bounded.MAX_ENTRIES = 50


@pytest.mark.parametrize("command", ["ls", "pp", "check", "tlist"])
def test_a_search_folder_that_holds_too_much(bench, command, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", "/")
    (bench / "meta.yaml").write_text("name: Large\nsearchdir:\n- /\nconfig_prefix: .\n")
    cost = told(command, under=with_few_entries)

    assert cost.is_small
    if command in ("pp", "check"):
        assert 1 == cost.result[0] and re.search(r"(meta.yaml:|^ +)2\b", cost.result[1], re.M)
        assert "FG126" in cost.result[1]


def test_a_pattern_of_data_files_that_matches_everything(bench):
    (bench / "templates/configs/a.yaml").write_text(
        "main: !call:forgather.ml.data:load_text_files\n  data_files: '/**/*/**/*.nothing'\n"
    )

    assert told("check").is_small


# -- the floor: limits of the system, under prices that are forgotten


def without_prices():
    """What a forgotten price is: nothing is charged any more."""
    for name in ("turn", "charge", "reserve"):
        setattr(Account, name, lambda *_: None)
    process_limits.CPU_SECONDS = 0


FORGOTTEN = {
    "memory": "main: {{ ('x' * 3 * 10**9) | length }}\n",
    "memory of a list": "main: {{ ([1] * 10**9) | length }}\n",
    "time": "-- for a in range(99999)\n-- for b in range(99999)\n-- endfor\n-- endfor\nmain: 1\n",
}


@pytest.mark.parametrize("name", FORGOTTEN)
@pytest.mark.parametrize("command", ["pp", "check", "train"])
def test_a_price_that_is_forgotten_is_a_located_error(bench, name, command):
    (bench / "templates/configs/a.yaml").write_text(FORGOTTEN[name])
    cost = told(command, under=without_prices)
    status, said = cost.result

    assert 1 == status and ("error[FG127]" in said or "error[FG122]" in said) and "templates/configs/a.yaml" in said
    assert cost.peak_bytes <= 700 << 20 and cost.cpu_seconds < 8


def with_an_endless_load():
    def endless(_):
        while True:
            pass

    without_prices()
    # What reads meta.yaml keeps the real one, which it has taken already.
    assert metadata_file.load is loading.load
    loading.load = endless


def test_a_load_that_takes_too_much_is_an_error_of_its_config(bench):
    status, said = told("graph", under=with_an_endless_load).result

    assert 1 == status
    assert "error[FG127]: reading the config 'a.yaml' takes more than 0 seconds of processor time" in said
    assert "templates/configs/a.yaml:1" in said


def limits():
    return [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]


def seen_by(work, *arguments):
    """What the work returns, and the limits before it, in each render, and after it."""
    before, seen, real = limits(), [], project_module.render

    def render(*given):
        seen.append(limits())
        return real(*given)

    project_module.render = render
    return work(*arguments), before, seen, limits()


def test_limits_hold_while_a_config_is_read_and_are_put_back(bench):
    status, before, seen, after = measured(seen_by, main, ["graph"]).result

    assert 0 == status
    assert before == after
    assert seen and all(
        within < outside for found in seen for (within, _), (outside, _) in zip(found, before, strict=True)
    )
    assert [hard for _, hard in before] == [hard for _, hard in seen[0]]


def made(config, folder):
    return Project(config, folder)()


def test_a_program_of_others_is_never_limited(bench):
    value, before, seen, _ = measured(seen_by, made, "a", bench).result

    assert (1, [before]) == (value, seen)


def test_what_is_built_is_not_limited_nor_are_configs_that_it_reads(bench):
    (bench / "templates/configs/b.yaml").write_text(
        "main: !call:forgather.project:from_project {project_dir: ., config_template: a, targets: main}\n"
    )
    status, before, seen, _ = measured(seen_by, main, ["-t", "b", "construct", "main"]).result

    assert 0 == status
    assert before != seen[0]
    assert before == seen[-1]


def printed_under_a_lower_limit():
    resource.setrlimit(resource.RLIMIT_CPU, (40, 50))
    process_limits.CPU_SECONDS = 1000
    _, _, (seen,), after = seen_by(main, ["pp"])
    return seen[1], after[1]


def test_a_lower_limit_of_the_user_stays(bench):
    assert ((40, 50), (40, 50)) == measured(printed_under_a_lower_limit).result


def test_a_system_without_limits_reads_as_before(bench, monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *arguments, **named):
        if name == "resource":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)

    assert 0 == main(["pp"])


def printed_beside_a_thread():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        return seen_by(main, ["pp"])
    finally:
        end.set()
        thread.join()


def test_a_process_with_threads_is_not_limited(bench):
    status, before, seen, _ = measured(printed_beside_a_thread).result

    assert (0, [before]) == (status, seen)


def limits_inside():
    with process_limits.limits_on(), process_limits.limits_while_reading("outer", lambda: None):
        outer = limits()
        with process_limits.limits_while_reading("inner", lambda: None):
            inner = limits()
        return outer, inner, limits()


def test_a_reading_inside_another_is_under_the_limits_of_the_outer():
    outer, *others = measured(limits_inside).result

    assert [outer, outer] == others


def error_without_memory():
    with pytest.raises(BudgetError) as caught:
        with process_limits.limits_on(), process_limits.limits_while_reading("c", lambda: "/p/c.yaml"):
            raise MemoryError
    return caught.value.code, caught.value.span.file, str(caught.value)


def test_memory_that_is_not_there_is_an_error_of_the_config():
    code, file, message = measured(error_without_memory).result

    assert ("FG127", "/p/c.yaml") == (code, file)
    assert "reading the config 'c' takes more than 400 MB of memory" in message


PROOFS = [
    "!call:builtins:str.center [x, 6000000000]",
    "!call:builtins:str.ljust [x, 6000000000]",
    "!call:builtins:str.format ['{:6000000000}', 1]",
    "!call:builtins:int.to_bytes [1, 6000000000, big]",
    "!call:round [5, -1000000000]",
    "!call [!call:getattr [x, center], 6000000000]",
    "!call:builtins:list.extend [[1], [1]]",
    "!singleton:values [!call:getattr [x, ljust]]",
]


@pytest.mark.parametrize("written", PROOFS)
def test_a_proof_makes_no_value_of_any_size(bench, written):
    (bench / "templates/configs/a.yaml").write_text(f"main: {written}\n")
    cost = told("code", "--verify")

    assert 1 == cost.result[0]
    assert cost.is_small


def test_a_proof_still_computes_with_builtins(bench):
    (bench / "templates/configs/a.yaml").write_text(
        "main: [!call:builtins:str.upper [x], !call:round [1.5, 1], !call:int ['3']]\n"
    )

    assert (0, True) == (told("code", "--verify").result[0], os.path.isfile("meta.yaml"))
