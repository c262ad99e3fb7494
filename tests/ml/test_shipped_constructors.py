"""Everything that shipped configs name is on the list, judged by the object, without anybody's trust."""

import contextlib
import io
import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from forgather import Project
from forgather.config.callables import Standing, judge_name
from forgather.config.graph import Call
from forgather.config.materialize import materialize
from forgather.config.partials import CallPlace, PartialObject
from forgather.config.resolve import Resolver
from forgather.config.traverse import roots, walk
from forgather.errors import ForgatherError, ResolveError
from forgather.project.check import check_project
from forgather.project.guard import ProjectGuard
from forgather.project.trust import Trust, add_trust, parse_trust
from forgather.requirements import needed_by_call
from tests.project.workbench import make_project

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "trust"


def usual() -> list[str]:
    """Returns what people name who write their own configs."""
    lines = (HERE / "usual.txt").read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def constructors():
    for meta in sorted((ROOT / "projects").glob("*/meta.yaml")):
        for config in sorted((meta.parent / "templates/configs").rglob("*.yaml")):
            graph = Project(config.stem, str(meta.parent)).graph
            found = (node.constructor for _, node in walk(roots(graph)) if isinstance(node, Call))
            # A module of the project's own, as projects/vision/cnn.py, is what the user has to trust.
            yield from (name for name in found if ".py:" not in name)


def test_shipped_and_usual_constructors_need_no_trust():
    meta = Project(None, str(ROOT / "projects/tiny_llama")).meta
    resolver = Resolver(meta.project_dir, guard=ProjectGuard(meta, Trust))
    refused, names = {}, dict.fromkeys([*constructors(), *usual()])
    for name in names:
        if ":" in name and judge_name(*name.rsplit(":", 1)).standing is not Standing.ALLOWED:
            refused[name] = "by its name"
        try:
            resolver.resolve(name)
        except (ResolveError, ModuleNotFoundError) as error:
            # The check names a library that is an extra and not installed.
            if not any(one.lack() for one in needed_by_call(name)):
                refused[name] = str(error)
    assert {} == refused
    assert len(names) > 400


LOADERS = """
torch:hub.load torch.hub:load torch:save torch:jit.load torch.package:PackageImporter torch.utils.benchmark:Timer
torch.fx:GraphModule torch.multiprocessing:spawn torch.serialization:add_safe_globals torch.hub:load_state_dict_from_url
torch.utils.model_zoo:load_url torch.utils.collect_env:main torch.distributed.rpc:init_rpc torch:ops.load_library
torch:classes.load_library torch:os.system torch:sys.exit torch:export.load
torch.distributed.checkpoint:FileSystemReader torch.distributed:broadcast_object_list torch:_C._jit_clear_class_registry
torch:nn.Linear.__init__.__globals__.get torch:storage.UntypedStorage.from_file
transformers.dynamic_module_utils:get_class_from_dynamic_module transformers.testing_utils:execute_subprocess_async
transformers.utils.import_utils:direct_transformers_import transformers:utils.import_utils.importlib.import_module
accelerate:notebook_launcher accelerate:debug_launcher accelerate.utils:load accelerate.test_utils:execute_subprocess_async
datasets.utils._dill:dump datasets:Dataset.to_csv datasets:Dataset.save_to_disk
numpy:save numpy:savetxt numpy:vectorize numpy:ctypeslib.load_library numpy:memmap numpy:ndarray.tofile
safetensors.torch:save_file forgather.ml.distributed.launcher:launch forgather.config.resolve:Resolver
forgather.config.materialize:materialize forgather.launch.in_process:run forgather:Project
transformers.exporters.utils:import_dotted_path accelerate.utils.other:recursive_getattr torch.backends.xeon.run_cpu:main
datasets.streaming:extend_module_for_streaming datasets.load:import_main_class torch:ops.import_module
builtins:str.format builtins:str.format_map builtins:list.sort torch.compiler:load_compiled_function
torch.cuda.memory:CUDAPluggableAllocator torch.xpu.memory:XPUPluggableAllocator
accelerate.checkpointing:load_custom_state numpy.lib.npyio:NpzFile numpy:generic.tofile
datasets.io.csv:CsvDatasetWriter torch:FloatStorage.from_file torch:PyTorchFileWriter accelerate.utils.other:save
transformers:PreTrainedConfig.to_json_file
""".split()


def test_loaders_of_code_inside_allowed_packages_are_refused():
    meta = Project(None, str(ROOT / "projects/tiny_llama")).meta
    resolver = Resolver(meta.project_dir, guard=ProjectGuard(meta, Trust))
    let_in = []
    for name in LOADERS:
        try:
            resolver.resolve(name)
        except ResolveError as error:
            if error.code in ("FG339", "FG440"):
                continue
        let_in.append(name)
    assert [] == let_in


@pytest.mark.parametrize("name", ["torch:os.system", "transformers:os.system", "datasets:os.system"])
def test_an_alias_inside_an_allowed_package_is_what_it_is(name):
    with pytest.raises((ResolveError, AttributeError)):
        meta = Project(None, str(ROOT / "projects/tiny_llama")).meta
        Resolver(meta.project_dir, guard=ProjectGuard(meta, Trust)).resolve(name)


def routes() -> dict[str, dict[str, Any]]:
    """Returns the ways to have code run, by name."""
    kinds = YAML(typ="safe").load((HERE / "routes.yaml").read_text(encoding="utf-8"))
    return {f"{kind}: {name}": route for kind, of_kind in kinds.items() for name, route in of_kind.items()}


ROUTES = routes()
CANARY = "import pathlib\npathlib.Path('CANARY').touch()\n"
MODEL = f"{CANARY}from transformers import LlamaModel\nclass Model(LlamaModel): pass\n"
RUN = f"{CANARY}dependencies = []\ndef run(*args): return 1\ndef text(match): return ''\ndef one(step): return 1.0\n"
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}


class Payload:
    """What a pickle runs when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch CANARY",)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A project that nobody trusts, with files that run when they are loaded."""
    import numpy
    import torch

    configs = {f"templates/configs/r{at}.yaml": f"main: {route['main']}\n" for at, route in enumerate(ROUTES.values())}
    folder = make_project(tmp_path_factory.mktemp("routes") / "own", configs)
    other = make_project(folder / "other", {"templates/configs/plain.yaml": "main: !call:evil.py:run []\n"})
    for file in (folder / "evil.py", folder / "hubconf.py", folder / "test_evil.py", other / "evil.py"):
        file.write_text(RUN)
    (folder / "evil.sh").write_text("#!/bin/sh\ntouch CANARY\n")
    (folder / "evil.sh").chmod(0o755)
    (folder / "evil.pkl").write_bytes(pickle.dumps(Payload()))
    numpy.save(folder / "evil.npy", numpy.array([Payload()], dtype=object), allow_pickle=True)
    torch.save(Payload(), folder / "evil.pt")
    classes = {"code_model": {"AutoModel": "evil_model.Model"}, "code_config": {"AutoConfig": "evil_model.Model"}}
    for name in ("model", *classes):
        (folder / name).mkdir()
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
        config |= {"auto_map": classes[name]} if name in classes else {}
        (folder / name / "config.json").write_text(json.dumps(config))
        torch.save({"x": Payload()}, folder / name / "pytorch_model.bin")
        (folder / name / "evil_model.py").write_text(MODEL)
    return folder


@pytest.fixture
def inside(hostile, monkeypatch, tmp_path):
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("FORGATHER_TRUST")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(hostile))
    (hostile / "CANARY").unlink(missing_ok=True)
    return hostile


@pytest.mark.parametrize(("at", "name"), list(enumerate(ROUTES)), ids=list(ROUTES))
def test_no_route_leads_to_code_that_nobody_trusts(inside, at, name):
    with pytest.raises(ForgatherError) as caught:
        Project(f"r{at}", str(inside))()

    assert [] == list(inside.rglob("CANARY"))
    assert caught.value.code in ("FG339", "FG340", "FG341", "FG440"), caught.value
    assert caught.value.span is not None


def test_the_routes_lead_there_where_nothing_guards(inside):
    """The control: without the guard, the canary is found."""
    silent = []
    for at, (name, route) in enumerate(ROUTES.items()):
        if not route.get("control"):
            continue
        with warnings.catch_warnings(), contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            # Files that a route leaves open.
            warnings.simplefilter("ignore")
            graph = Project(f"r{at}", str(inside)).graph
            materialize(graph, targets=["main"], resolver=Resolver(str(inside)))
        found = list(inside.rglob("CANARY"))
        silent += [] if found else [name]
        for file in found:
            file.unlink()
        for module in [it for it in sys.modules if "evil" in it or it.startswith("_forgather_folder_")]:
            del sys.modules[module]
    assert [] == silent


def test_a_partial_that_a_worker_of_a_loader_gets_looks_at_its_arguments_there_too(inside):
    resolver = Resolver(str(inside), guard=ProjectGuard(Project("r0", str(inside)).meta, Trust))
    for name, given, code in (
        ("numpy:load", {"file": "evil.npy", "allow_pickle": True}, "FG340"),
        ("transformers:AutoModel.from_pretrained", {"path": "./code_model", "trust_remote_code": True}, "FG341"),
    ):
        load = resolver.resolve(name)
        sent = PartialObject(load, (), {}, {}, CallPlace(name, "main", None), resolver.guard.later(load))
        with pytest.raises(ResolveError, match=code):
            pickle.loads(pickle.dumps(sent))(**given)


# A call, and the beginning of what it returns.
HARMLESS = """
max {arg0: [[1], [2, 3]], key: !partial:len []} -> [2, 3]
sorted {arg0: [[1, 2], [3]], key: !partial:len []} -> [[3], [1, 2]]
call [!call:functools:partial [!partial:operator:add [1]], 2] -> 3
functools:reduce [!partial:operator:mul [], [2, 3, 4]] -> 24
list [!call:itertools:accumulate [[1, 2, 3], !partial:operator:mul []]] -> [1, 2, 6]
re:sub [b+, !call:operator:itemgetter [0], abba] -> 'abba'
json:loads {arg0: '{"a": 1}', object_hook: !partial:dict []} -> {'a': 1}
getitem [!call:collections:defaultdict [!partial:list []], 1] -> []
torch.nn:Module.apply [!call:torch.nn:Linear [2, 2], !partial:torch.nn:Module.eval []] -> Linear(
accelerate.utils:TorchDynamoPlugin {backend: inductor, options: {triton.cudagraphs: false, max_autotune: true}} -> TorchDynamoPlugin(
call [!partial:torch.utils.data:default_collate [], [1, 2]] -> tensor([1, 2])
inspect:signature [!partial:len []] -> <Signature (obj, /)>
"""


@pytest.mark.parametrize("line", HARMLESS.strip().splitlines())
def test_callables_that_were_judged_are_called_back(inside, line):
    text, _, expected = line.partition(" -> ")
    (inside / "templates/configs/harmless.yaml").write_text(f"main: !call:{text}\n")
    assert repr(Project("harmless", str(inside))()).startswith(expected)


def test_a_part_of_a_listed_package_is_trusted_by_its_dotted_name(inside):
    config = inside / "templates/configs/part.yaml"
    config.write_text("main: !call:torch.overrides:is_tensor_like [1]\n")
    notes = [found for found in check_project(Project("part", str(inside))).findings if found.code == "FG440"]
    assert ["look at it, then: fgcli trust torch.overrides"] == [note.hint.partition("  (")[0] for note in notes]
    with pytest.raises(ResolveError, match="'torch.overrides', a part of torch that not every config may call"):
        Project("part", str(inside))()

    add_trust(parse_trust(["torch.overrides"]))
    assert Project("part", str(inside))() is False
    config.write_text("main: !call:torch.overides:is_tensor_like [1]\n")
    assert "FG440" not in {found.code for found in check_project(Project("part", str(inside))).findings}


@pytest.mark.parametrize(
    "text",
    [
        "numpy:load [a.npy, null, true]",
        "numpy:load {file: a.npy, allow_pickle: true}",
        "torch:load [a.pt, null, json]",
        "transformers:AutoModel.from_pretrained {arg0: m, model_kwargs: {weights_only: false}}",
        "torch:compile {arg0: 1, options: {cpp.cxx: [./a]}}",
    ],
)
def test_an_argument_that_runs_code_is_refused_by_name_and_by_position(text, tmp_path):
    folder = make_project(tmp_path, {"templates/configs/a.yaml": f"main: !call:{text}\n"})
    with pytest.raises(ResolveError, match="FG340"):
        Project("a", folder)("main")
