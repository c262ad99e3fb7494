"""Everything that shipped configs name is on the list, judged by the object, without anybody's trust."""

from pathlib import Path

import pytest

from forgather import Project
from forgather.config.graph import Call
from forgather.config.resolve import Resolver
from forgather.config.traverse import roots, walk
from forgather.errors import ResolveError
from forgather.project.guard import ProjectGuard
from forgather.project.trust import Trust
from tests.project.workbench import make_project

ROOT = Path(__file__).parents[2]
# What people name who write their own.
FURTHER = """
torch:nn.Linear torch:nn.Sequential torch.nn:CrossEntropyLoss torch:zeros torch:tensor torch:manual_seed torch:relu
torch.nn.functional:cross_entropy torch:Generator torch:compile torch:nn.init.zeros_ torch:load torch:device
torch.optim:SGD torch.optim:Muon torch.optim.lr_scheduler:LambdaLR torch.utils.data:DataLoader
torch.utils.data:random_split torch.utils.tensorboard:SummaryWriter torch.distributed.device_mesh:init_device_mesh
transformers:AutoTokenizer.from_pretrained transformers:AutoModelForCausalLM.from_pretrained transformers:pipeline
transformers:DataCollatorWithPadding transformers:EarlyStoppingCallback transformers:BitsAndBytesConfig
transformers:get_scheduler transformers:set_seed transformers:Trainer transformers:TrainingArguments
transformers.utils.logging:set_verbosity_error transformers:PrinterCallback transformers:GenerationConfig
datasets:load_dataset datasets:Dataset.from_list datasets:concatenate_datasets datasets:interleave_datasets
datasets:load_from_disk datasets.distributed:split_dataset_by_node accelerate:Accelerator
accelerate.utils:DistributedDataParallelKwargs tokenizers:Tokenizer.from_file tokenizers.models:BPE
tokenizers.pre_tokenizers:ByteLevel numpy:load numpy:array numpy:arange numpy.random:default_rng numpy:sqrt
math:sqrt math:prod fractions:Fraction datetime:date.fromisoformat datetime:timedelta pathlib:Path pathlib:Path.home
collections:OrderedDict collections:Counter json:loads os:getcwd os.path:join os.path:expanduser random:Random random:seed
itertools:chain.from_iterable operator:itemgetter re:compile textwrap:dedent types:SimpleNamespace copy:deepcopy
logging:getLogger uuid:uuid4 hashlib:sha256 zlib:crc32 string:Template contextlib:nullcontext decimal:Decimal
argparse:Namespace statistics:mean time:time glob:glob urllib.parse:quote html:escape json:dumps
""".split()


def constructors():
    for meta in sorted((ROOT / "projects").glob("*/meta.yaml")):
        for config in sorted((meta.parent / "templates/configs").rglob("*.yaml")):
            graph = Project(config.stem, str(meta.parent)).graph
            yield from (node.constructor for _, node in walk(roots(graph)) if isinstance(node, Call))


def test_shipped_and_usual_constructors_need_no_trust():
    meta = Project(None, str(ROOT / "projects/tiny_llama")).meta
    resolver = Resolver(meta.project_dir, guard=ProjectGuard(meta, Trust))
    refused = {}
    for name in dict.fromkeys([*constructors(), *FURTHER]):
        try:
            resolver.resolve(name)
        except ResolveError as error:
            refused[name] = error.message
    assert {} == refused


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
forgather.config.materialize:materialize forgather.launch.running:run forgather:Project
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


@pytest.mark.parametrize(
    "text",
    [
        "numpy:load [a.npy, null, true]",
        "numpy:load {file: a.npy, allow_pickle: true}",
        "torch:load [a.pt, null, json]",
        "max {arg0: [1, 2], key: !partial:len []}",
        "sorted {arg0: [1, 2], key: !partial:len []}",
    ],
)
def test_an_argument_that_runs_code_is_refused_by_name_and_by_position(text, tmp_path):
    folder = make_project(tmp_path, {"templates/configs/a.yaml": f"main: !call:{text}\n"})
    with pytest.raises(ResolveError, match="FG340"):
        Project("a", folder)("main")
