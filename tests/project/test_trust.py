"""Only what is on the list, or what the user trusts, is imported and called (guarantee S2)."""

import builtins
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forgather import Project
from forgather.config.builtin_names import SHORT
from forgather.config.callables import Standing, judge_found
from forgather.config.remote import containers
from forgather.config.resolve import Resolver
from forgather.errors import ForgatherError, ProjectError, ResolveError
from forgather.project.check import check_project
from forgather.project.checks.trusted_calls import needs_of
from forgather.project.guard import ProjectGuard
from forgather.project.metadata_cache import load_meta
from forgather.project.trust import Trust, add_trust, current_trust, parse_trust, store_trust, stored_trust, trust_file
from forgather.project.untrusted import Needs
from tests.forked import run_forked
from tests.patience import patience
from tests.project.workbench import ROOT, make_project

pytestmark = pytest.mark.usefixtures("warm_cache")

CANARY = "import pathlib\npathlib.Path(__file__).with_name('CANARY').write_text('ran')\n"
MODEL = f"{CANARY}from os import system\nfrom subprocess import run\ndef make(*args, **kwargs): return (args, kwargs)\n"
GIVES = "def give(): return system\n"
# What others deny by name, and what would let a config do anything.
DENIED = """
os:system os:popen os:kill os:remove os:removedirs os:rmdir os:fchdir os:setuid os:fork os:forkpty os:killpg os:rename
os:renames os:truncate os:replace os:unlink os:fchmod os:fchown os:chmod os:chown os:chroot os:lchown os:getenv os:chdir
os:putenv os:spawnl os:execv os:posix_spawn os:open os:environ.get posix:system shutil:rmtree shutil:move shutil:chown
shutil:copy subprocess:Popen subprocess:run subprocess:call subprocess:check_output subprocess:getoutput pty:spawn
sys:exit sys:settrace sys:modules.get importlib:import_module importlib:reload importlib.util:spec_from_file_location
runpy:run_path runpy:run_module pickle:loads pickle:load pickle:Unpickler marshal:loads shelve:open ctypes:CDLL
ctypes:PyDLL code:InteractiveInterpreter code:interact codeop:compile_command timeit:timeit timeit:Timer cProfile:run
pdb:run bdb:Bdb doctest:testfile unittest:main multiprocessing:Process threading:Thread socket:socket
urllib.request:urlopen http.client:HTTPConnection webbrowser:open tempfile:mkdtemp zipfile:ZipFile.extractall
functools:partialmethod functools:singledispatch functools:lru_cache
operator:attrgetter operator:methodcaller operator:call itertools:starmap types:FunctionType types:CodeType types:MethodType
types:DynamicClassAttribute typing:get_type_hints inspect:getattr_static dataclasses:make_dataclass string:Formatter
string:Formatter.get_field contextlib:contextmanager contextlib:ExitStack abc:abstractmethod weakref:finalize
atexit:register signal:signal gc:get_objects logging.config:dictConfig logging:os.system logging:FileHandler
random:_os.system collections:_sys.exit pathlib:os.remove pathlib:Path.write_text pathlib:Path.unlink json:codecs.open
builtins:abs.__self__.exec builtins:type.__subclasses__ builtins:str.__class__ uuid:uuid1 uuid:getnode
""".split()
BUILTINS = [
    word for word in dir(builtins) if not word.startswith("_") and callable(getattr(builtins, word))
]  # fmt: skip
HARMLESS = {"abs", "all", "any", "bin", "bool", "bytearray", "bytes", "chr", "complex", "dict", "divmod", "enumerate",
            "float", "format", "frozenset", "hash", "hex", "int", "isinstance", "issubclass", "iter", "len", "list",
            "max", "min", "next", "object", "oct", "ord", "pow", "print", "range", "repr", "reversed", "round", "set",
            "slice", "sorted", "str", "sum", "tuple", "zip"}  # fmt: skip


@pytest.fixture
def untrusted(monkeypatch):
    """Nothing is trusted."""
    monkeypatch.delenv("FORGATHER_TRUST")


def guarded(folder, trust=Trust()):  # noqa: B008 - a frozen value
    return Resolver(str(folder), guard=ProjectGuard(load_meta(str(folder)), lambda: trust))


@pytest.fixture
def project(tmp_path, untrusted):
    files = {"templates/configs/plain.yaml": "main: !call:models.py:make [1]\nlisted: !call:dict {a: 1}\n"}
    folder = make_project(tmp_path / "own", files)
    (folder / "models.py").write_text(MODEL)
    return folder


def refusal(resolver, constructor):
    try:
        resolver.resolve(constructor)
    except ResolveError as error:
        return error.code
    return "let in"


@pytest.mark.parametrize("trusts", [False, True], ids=["nothing trusted", "the project trusted"])
def test_what_no_config_may_call_is_refused_whatever_is_trusted(project, trusts):
    resolver = guarded(project, Trust(folders=(str(project.resolve()),), packages=("os",)) if trusts else Trust())

    assert dict.fromkeys(DENIED, "FG339") == {name: refusal(resolver, name) for name in DENIED}
    assert dict.fromkeys(set(BUILTINS) - HARMLESS, "FG339") == {
        name: found for name in BUILTINS if (found := refusal(resolver, name)) != "let in"
    }
    assert "FG339" == refusal(resolver, "models.py:system") or not trusts
    assert "FG339" == refusal(resolver, "models.py:run") or not trusts


def test_every_alias_that_the_standard_library_offers_is_refused(project):
    script = Path(__file__).with_name("aliases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=project)
    found = json.loads(done.stdout.splitlines()[-1])
    aliases = [it for it in found if it[2] != "builtins" or it[1].rpartition(".")[2] not in HARMLESS]
    resolver = guarded(project)
    let_in = [
        f"{module}:{symbol}" for module, symbol, _ in aliases if refusal(resolver, f"{module}:{symbol}") != "FG339"
    ]

    assert len(aliases) >= 500
    assert [] == let_in


def test_the_object_is_judged_and_not_its_name(tmp_path):
    import logging
    from functools import partial

    found = {
        "alias": logging.os.system,
        "wrapped": partial(partial(eval), "1"),
        "unbound": Path.unlink,
        "bound": Path("x").unlink,
        "of a module": sys.modules.get,
    }
    standing = {name: {verdict.standing for verdict in judge_found(thing)} for name, thing in found.items()}

    assert standing.pop("of a module") == {Standing.ALLOWED}, (
        "what it gives is a module, with which nothing can be done"
    )
    assert {name: True for name in standing} == {name: Standing.DENIED in found for name, found in standing.items()}


ACTS = [
    "!call:os:system ['touch CANARY']",
    "!call:logging:os.system ['touch CANARY']",
    "!call:subprocess:run [[touch, CANARY]]",
    '!call:eval [\'open("CANARY", "w")\']',
    "!call:open [CANARY, w]",
    "!call:pathlib:Path.write_text [!call:pathlib:Path [CANARY], x]",
    "!call:call [!partial:os:system ['touch CANARY']]",
    "!call:list [!call:map [!partial:os:system [], ['touch CANARY']]]",
    "!call:getattr [!call:importlib:import_module [os], system]",
    "!call:models.py:system ['touch CANARY']",
    "!call:models:system ['touch CANARY']",
    "!call:functools:partial [!partial:models.py:make []]",
    "!call:numpy:savetxt [CANARY, [1.0]]",
    "!meta:models.py:make [1]",
    "!factory:.models:make {submodule_searchpath: [.], args: []}",
    "!call:forgather:from_project [other, null, main]",
    "!call:forgather.cli.main:main [[ls]]",
]


@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_run_of_a_project_that_is_not_trusted(project, monkeypatch, act):
    (project / "templates/configs/act.yaml").write_text(f"main: {act}\n")
    other = make_project(project / "other", {"templates/configs/plain.yaml": "main: !call:x.py:make []\n"})
    (other / "x.py").write_text(MODEL)
    monkeypatch.chdir(project)

    with pytest.raises(ForgatherError) as caught:
        Project("act", str(project))()

    assert caught.value.code in ("FG339", "FG440", "FG320")
    assert caught.value.span is not None
    assert [] == [str(file) for file in project.rglob("CANARY")]


def test_the_sample_runs_where_nothing_guards(project, monkeypatch):
    """The control: the same constructors leave a canary without the guard."""
    monkeypatch.chdir(project)
    Resolver(str(project)).resolve("logging:os.system")("touch CANARY")
    assert (project / "CANARY").exists()


def test_a_user_trusts_a_folder_and_edits_of_its_code_are_not_asked_about_again(project):
    add_trust(Trust(folders=(str(project.resolve()),)))
    assert ((1,), {}) == Project("plain", str(project))()

    (project / "more.py").write_text("def make(): return 2\n")
    (project / "templates/configs/more.yaml").write_text("main: !call:more.py:make []\n")
    assert 2 == Project("more", str(project))()
    store_trust(stored_trust().minus(Trust(folders=(str(project.resolve()),))))
    with pytest.raises(ResolveError, match="you do not trust yet"):
        Project("more", str(project))()


def test_a_caller_from_python_says_so(project):
    assert ((1,), {}) == Project("plain", str(project), trust=True)()
    assert {"a": 1} == Project("plain", str(project))("listed"), "what is on the list needs no trust"
    (project / "templates/configs/evil.yaml").write_text("main: !call:os:system ['true']\n")
    with pytest.raises(ResolveError) as caught:
        Project("evil", str(project), trust=True)()
    assert "FG339" == caught.value.code


def test_a_link_into_a_trusted_folder_and_a_name_that_begins_alike_are_judged_by_real_paths(tmp_path):
    trusted, beside = tmp_path / "mine", tmp_path / "mine-too"
    for folder in (trusted, beside):
        folder.mkdir()
    (tmp_path / "link").symlink_to(trusted)
    (trusted / "out").symlink_to(beside)
    trust = parse_trust([str(trusted)])

    assert trust.has_folder(str(tmp_path / "link"))
    assert not trust.has_folder(str(beside))
    assert not trust.has_folder(str(trusted / "out"))


def test_code_behind_a_link_in_a_trusted_project_belongs_to_its_real_folder(tmp_path, untrusted):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "model.py").write_text(MODEL)
    folder = make_project(tmp_path / "mine", {"templates/configs/plain.yaml": "main: !call:link/model.py:make []\n"})
    (folder / "link").symlink_to(beside)
    add_trust(parse_trust([str(folder)]))

    with pytest.raises(ResolveError) as caught:
        Project("plain", str(folder))()

    assert ("FG440", True) == (caught.value.code, str(beside.resolve()) in caught.value.message)


def test_a_module_of_the_project_does_not_stand_in_for_a_listed_package(tmp_path, untrusted):
    files = {"templates/configs/plain.yaml": "main: !call:peft_of_nobody:make []\n"}
    folder = make_project(tmp_path / "shadow", files, meta="name: x\nsystem_path: lib\n")
    (folder / "lib").mkdir()
    (folder / "lib/peft_of_nobody.py").write_text(MODEL)

    with pytest.raises(ResolveError) as caught:
        Project("plain", str(folder))()

    assert "FG440" == caught.value.code
    assert str(folder.resolve()) in caught.value.message
    assert str(folder / "lib") not in sys.path
    assert not (folder / "lib/CANARY").exists()


def test_a_package_that_no_list_names_is_trusted_by_its_name(tmp_path, untrusted):
    text = "main: !call:ruamel.yaml:YAML {typ: safe}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    with pytest.raises(ResolveError, match="calls 'ruamel'"):
        Project("plain", str(folder))()

    add_trust(parse_trust(["ruamel"]))
    assert "YAML" == type(Project("plain", str(folder))()).__name__


def test_words_of_the_environment_are_folders_only_with_a_slash(project, monkeypatch):
    (project / "json_kit").mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("FORGATHER_TRUST", f"json_kit{os.pathsep}{project}")

    assert ("json_kit",) == current_trust().packages, "a folder of that name in a project is not what was meant"
    assert (str(project.resolve()),) == current_trust().folders


def test_the_list_is_for_its_user_alone(untrusted):
    add_trust(Trust(packages=("a",)))
    file = Path(trust_file())
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)

    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(ProjectError, match="can be written by others") as caught:
            current_trust()
        assert "FG442" == caught.value.code
    file.chmod(0o600)
    file.write_text("[1]")
    with pytest.raises(ProjectError, match="JSON object"):
        current_trust()


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [
        ("{weights_only: false}", "FG340"),
        ("{weights_only: !calc '1 > 2'}", "FG340"),
        ("{weights_only: true}", None),
        ("{pickle_module: !call:dict []}", "FG340"),
    ],
)
def test_a_loader_of_pickles_does_not_run_them(tmp_path, untrusted, kwargs, code):
    pytest.importorskip("torch")
    text = f"main: !partial:torch:load {{args: [x.pt], kwargs: {kwargs}}}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    if code is None:
        assert callable(Project("plain", str(folder))())
        return
    with pytest.raises(ResolveError) as caught:
        Project("plain", str(folder))()
    assert code == caught.value.code


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("kwargs", "refused"),
    [
        ("{trust_remote_code: true}", True),
        ("{trust_remote_code: true, revision: main}", True),
        (f"{{trust_remote_code: true, revision: {COMMIT[:-1]}}}", True),
        (f"{{trust_remote_code: true, revision: {COMMIT}}}", True),
        (f"{{trust_remote_code: true, code_revision: {COMMIT}}}", True),
        (f"{{trust_remote_code: true, revision: {COMMIT}, code_revision: {COMMIT}}}", False),
        (f"{{trust_remote_code: true, revision: {COMMIT}, code_revision: main}}", True),
        ("{trust_remote_code: false}", False),
        ("{model_kwargs: {trust_remote_code: true}}", True),
        ("{}, latent_args: {trust_remote_code: true}", True),
        ("{encoder_trust_remote_code: true}", True),
        (f"{{a_trust_remote_code: true, a_revision: {COMMIT}, a_code_revision: {COMMIT}}}", False),
        (f"{{a_trust_remote_code: true, b_revision: {COMMIT}, b_code_revision: {COMMIT}}}", True),
        ("{decoder_attn_implementation: owner/kernel}", True),
        ("{attn_implementation: owner/kernel}", True),
        (f"{{attn_implementation: owner/kernel@{COMMIT}}}", False),
        ("{attn_implementation: {text_config: owner/kernel, vision_config: sdpa}}", True),
        ("{attn_implementation: sdpa}", False),
        ("{use_kernels: true}", True),
        ("{use_kernels: false, kernel_config: null}", False),
    ],
)
def test_code_of_the_hub_is_pinned_to_a_commit(tmp_path, kwargs, refused):
    text = f"main: !call:named_dict {{args: [], kwargs: {kwargs}}}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    found = [finding.code for finding in check_project(Project("plain", str(folder))).errors]

    assert (["FG341"] if refused else []) == found
    if refused:
        with pytest.raises(ResolveError) as caught:
            Project("plain", str(folder))()
        assert "FG341" == caught.value.code
    else:
        Project("plain", str(folder))()


def test_a_folder_that_nobody_trusts_counts_whatever_another_name_says(untrusted, tmp_path):
    (tmp_path / "model").mkdir()
    text = f"main: !call:named_dict {{trust_remote_code: true, revision: {COMMIT}, code_revision: {COMMIT}, path: foo, config: {tmp_path}/model}}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    with pytest.raises(ResolveError, match="FG341"):
        Project("plain", str(folder))()


@pytest.mark.parametrize(("classes", "refused"), [("one.Model", False), ("someone/other--one.Model", True)])
def test_a_trusted_folder_does_not_bring_code_of_the_hub_unpinned(tmp_path, untrusted, classes, refused):
    text = f"main: !call:named_dict {{trust_remote_code: true, path: {tmp_path}/model}}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"auto_map": {"AutoModel": classes}}))
    add_trust(parse_trust([str(tmp_path / "model")]))
    if refused:
        with pytest.raises(ResolveError, match="code_revision"):
            Project("plain", str(folder))()
        (folder / "templates/configs/plain.yaml").write_text(text.replace("true,", f"true, code_revision: {COMMIT},"))
    Project("plain", str(folder))()


def test_a_callable_that_a_call_gives_is_judged_where_it_is_handed_on(project):
    add_trust(Trust(folders=(str(project.resolve()),)))
    (project / "models.py").write_text(MODEL + GIVES)
    (project / "templates/configs/given.yaml").write_text("main: !call:functools:partial [!call:models.py:give []]\n")
    with pytest.raises(ResolveError, match="posix:system"):
        Project("given", str(project))()
    (project / "templates/configs/given.yaml").write_text("main: !call:named_list [[!call:models.py:give []]]\n")
    with pytest.raises(ResolveError, match="posix:system"):
        Project("given", str(project))()


def test_a_switch_that_construction_turns_on_is_seen(tmp_path):
    text = "main: !call:named_dict {trust_remote_code: !var now}\n"
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": text})
    assert {"trust_remote_code": False} == Project("plain", str(folder))(now=False)
    with pytest.raises(ResolveError):
        Project("plain", str(folder))(now=True)


def shipped(one_of_each=False):
    """Yields every config; with `one_of_each` those that are neither a project's first nor code's are of the full set."""
    for meta in sorted((ROOT / "projects").glob("*/meta.yaml")):
        for number, config in enumerate(sorted((meta.parent / "templates/configs").rglob("*.yaml"))):
            further = one_of_each and number and (meta.parent.name, config.stem) not in WITH_CODE
            marks = [pytest.mark.matrix] if further else []
            yield pytest.param(meta.parent, config.stem, id=f"{meta.parent.name}-{config.stem}", marks=marks)


# The examples of a module of the project's own; their READMEs say `fgcli trust`.
WITH_CODE = {("module", "wine"), ("vision", "cnn")}


@pytest.mark.parametrize(("folder", "config"), list(shipped()))
def test_no_shipped_config_needs_trust_but_those_with_code_of_their_own(untrusted, warm_settings, folder, config):
    project = Project(config, str(folder))
    own = (folder.name, config) in WITH_CODE

    assert needs_of(project) == (Needs(folders=(str(folder),), packages=()) if own else Needs())


@pytest.mark.parametrize(("folder", "config"), list(shipped(one_of_each=True)))
def test_the_check_asks_for_trust_where_a_config_has_code_of_its_own(untrusted, warm_settings, folder, config):
    own = (folder.name, config) in WITH_CODE
    codes = {found.code for found in check_project(Project(config, str(folder))).findings}
    assert ({"FG440"} if own else set()) == codes & {"FG339", "FG340", "FG341", "FG440"}


def test_short_names_are_let_in(project):
    resolver = guarded(project)
    assert {"let in"} == {refusal(resolver, name) for name in SHORT}
    assert 3 == resolver.resolve("call")(len, "abc")
    with pytest.raises(ResolveError):
        resolver.resolve("call")(eval, "1")


# the command line


def test_a_run_without_a_terminal_is_refused_with_the_command_to_type(project):
    done = run_forked(["-t", "plain", "construct", "main"], project)

    assert 1 == done.returncode
    assert f"error[FG440]: the config runs code of '{project.resolve()}'" in done.stderr
    assert f"fgcli trust {project.resolve()}" in done.stderr
    assert not (project / "CANARY").exists()
    assert 0 == run_forked(["trust", "."], project).returncode
    assert "((1,), {})" in run_forked(["-t", "plain", "construct", "main"], project).stdout


def test_a_project_that_is_made_is_trusted(tmp_path, untrusted):
    assert 0 == run_forked(["new", "project", "mine"], tmp_path).returncode
    assert f"folder {(tmp_path / 'mine').resolve()}" in run_forked(["trust", "--list"], tmp_path).stdout


def test_the_command_adds_lists_and_removes(tmp_path, untrusted):
    (tmp_path / "lib").mkdir()
    folder = str((tmp_path / "lib").resolve())
    assert f"trusted: folder {folder}" in run_forked(["trust", "lib", "sklearn", "--env", "LAB_*"], tmp_path).stdout
    facts = json.loads(run_forked(["trust", "--json"], tmp_path).stdout)
    assert {"folders": [folder], "packages": ["sklearn"], "variables": ["LAB_*"]} == {
        kind: facts[kind] for kind in ("folders", "packages", "variables")
    }
    (tmp_path / "lib").rmdir()
    run_forked(["trust", "lib", "sklearn", "--env", "LAB_*", "--remove"], tmp_path)
    assert "nothing is trusted\n" == run_forked(["trust", "--list"], tmp_path).stdout
    done = run_forked(["trust", "no/such/folder"], tmp_path)
    assert 1 == done.returncode
    assert "FG443" in done.stderr


@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_terminal_is_asked_once(project, answer, runs):
    import pty

    words = [sys.executable, "-m", "forgather", "-t", "plain", "construct", "main"]
    for attempt in range(2 if runs else 1):
        ours, theirs = pty.openpty()
        os.write(ours, answer.encode())
        done = subprocess.run(
            words, cwd=project, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, timeout=patience(60), check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        os.close(theirs)
        shown = os.read(ours, 100_000).decode()
        os.close(ours)
        assert ("[y/N]" in shown) == (attempt == 0)
        assert runs == (0 == done.returncode), shown
    assert runs == (project / "CANARY").exists()


def test_templates_read_the_variables_that_the_user_allows(tmp_path, untrusted, monkeypatch):
    monkeypatch.setenv("LAB_RACK", "7")
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": "main: {{ env('LAB_RACK', 3) }}\n"})
    with pytest.raises(ForgatherError, match="is not one that templates may read") as caught:
        _ = Project("plain", str(folder)).graph
    assert ("FG446", "!env LAB_RACK" in caught.value.hint) == (caught.value.code, True)

    add_trust(Trust(variables=("LAB_*",)))
    assert "main: 7" == Project("plain", str(folder)).rendered.text.strip()


@pytest.mark.parametrize("name", ["HOME", "USER", "DATA_DIR", "HF_HOME", "PYTHON_PATH", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "RANK"])  # fmt: skip
def test_templates_read_the_usual_variables(tmp_path, untrusted, name):
    folder = make_project(tmp_path / "p", {"templates/configs/plain.yaml": f"main: {{{{ env('{name}', 'x') }}}}\n"})
    assert Project("plain", str(folder)).rendered.text.startswith("main: ")


# roots of templates


def root_refused(folder):
    try:
        load_meta(str(folder))
    except ProjectError as error:
        return error.code
    return None


@pytest.mark.parametrize("searchdir", ["[templates, /etc]", "/", "..", "[templates, link]"])
def test_a_project_does_not_say_itself_that_it_may_read_elsewhere(tmp_path, untrusted, searchdir):
    (tmp_path / "elsewhere").mkdir()
    folder = make_project(tmp_path / "p", meta=f"searchdir: {searchdir}\n")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert "FG444" == root_refused(folder)

    add_trust(Trust(folders=(os.path.realpath("/"),)))
    assert root_refused(folder) is None
    store_trust(Trust())
    assert "FG444" == root_refused(folder), "what was kept of the project does not remember the word"


def test_the_default_folder_does_not_help(tmp_path, untrusted):
    folder = make_project(tmp_path / "p")
    (folder / "templates").rename(tmp_path / "templates")
    (folder / "templates").symlink_to(tmp_path / "templates")
    assert "FG444" == root_refused(folder)


def test_a_repository_of_the_user_around_the_project_is_his(tmp_path, untrusted, monkeypatch):
    (tmp_path / "r/shared").mkdir(parents=True)
    folder = make_project(tmp_path / "r/p", meta="searchdir: [templates, ../shared]\n")
    assert "FG444" == root_refused(folder)

    (tmp_path / "r/.git").mkdir()
    assert root_refused(folder) is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "FG444" == root_refused(folder)


def test_a_workspace_is_a_root(tmp_path, untrusted):
    (tmp_path / "w/forgather_workspace").mkdir(parents=True)
    (tmp_path / "w/shared").mkdir()
    folder = make_project(tmp_path / "w/p", meta="searchdir: [templates, ../shared]\n")
    assert root_refused(folder) is None


def test_a_data_set_of_plain_lists_is_not_walked_through_number_by_number():
    rows = [{"input_ids": [1, 2, 3], "labels": [0.5, None], "mixed": [1, print]}]
    assert [rows, rows[0], rows[0]["mixed"]] == list(containers([rows]))
