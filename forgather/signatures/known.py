"""Names of libraries whose meaning is known without reading them.

Takes a dotted name, gives what it does. Keeps true: only what is certain stands here; everything else is read from
source, or is unknown.
"""

from __future__ import annotations

# Calls, or decorators with or without arguments, that return a callable of the same signature.
SAME = frozenset(
    """
    abc.abstractmethod contextlib.contextmanager contextlib.asynccontextmanager functools.cache functools.lru_cache
    functools.total_ordering functools.wraps typing.final typing.no_type_check typing.override typing.runtime_checkable
    typing.dataclass_transform typing_extensions.dataclass_transform typing_extensions.deprecated
    typing_extensions.final typing_extensions.override typing_extensions.runtime_checkable warnings.deprecated
    enum.unique typing.type_check_only typing_extensions.type_check_only
    torch.no_grad torch.inference_mode torch.enable_grad torch.autograd.no_grad torch.jit.ignore torch.jit.unused
    torch.jit.export torch.compiler.disable torch._dynamo.disable torch.compiler.allow_in_graph
    torch._jit_internal.ignore torch._jit_internal.unused torch.utils._contextlib._DecoratorContextManager
    torch.autograd.grad_mode.no_grad torch.autograd.grad_mode.inference_mode torch.autograd.grad_mode.enable_grad
    torch._disable_dynamo torch._compile._disable_dynamo
    transformers.utils.auto_docstring transformers.utils.auto_docstring.auto_docstring
    transformers.utils.doc.add_start_docstrings transformers.utils.add_start_docstrings
    transformers.utils.doc.add_start_docstrings_to_model_forward transformers.utils.doc.add_end_docstrings
    transformers.utils.doc.add_code_sample_docstrings transformers.utils.doc.replace_return_docstrings
    transformers.utils.add_end_docstrings transformers.utils.replace_return_docstrings
    huggingface_hub.dataclasses.strict huggingface_hub.utils.validate_hf_hub_args
    transformers.utils.import_utils.requires
    """.split()
)
# Members of the standard library that are judged by name.
BY_NAME = frozenset(
    """
    dataclasses.dataclass dataclasses.field dataclasses.KW_ONLY dataclasses.InitVar dataclasses.Field
    functools.partial functools.partialmethod functools.singledispatch functools.cached_property
    collections.namedtuple enum.Enum enum.IntEnum enum.StrEnum enum.Flag enum.IntFlag enum.EnumMeta enum.EnumType
    abc.ABC abc.ABCMeta types.SimpleNamespace
    """.split()
)
# Modules all of whose names are judged by name.
TYPING = frozenset(("typing", "typing_extensions", "collections.abc", "numbers"))
# Bases that have no constructor of their own.
EMPTY_BASES = frozenset(
    """
    abc.ABC typing.Generic typing.Protocol typing_extensions.Protocol typing_extensions.Generic builtins.object
    """.split()
)
# Mutable bases whose `__new__` takes anything: an `__init__` below them decides.
OPEN_NEW = frozenset("builtins.dict builtins.list builtins.set builtins.bytearray collections.OrderedDict".split())
CODE_FREE_METACLASSES = frozenset(("abc.ABCMeta", "builtins.type"))


def is_by_name(dotted: str) -> bool:
    """Returns whether a name of a library is judged by name, and its source not read."""
    return dotted in SAME or dotted in BY_NAME or dotted.rpartition(".")[0] in TYPING
