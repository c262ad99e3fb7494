"""Generates a Python module from a graph.

The input is a graph and the names of targets; the output is the source of a module that builds the same objects by
plain calls. The module does not import `forgather.config`. It makes the same calls as `config.materialize`, in the same
order and with the same shared objects, and `ruff format` leaves it unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Names
from dataclasses import dataclass

from forgather.codegen.python import names as naming
from forgather.codegen.python.builtin_calls import source_lines
from forgather.codegen.python.imports import OWN_NAMES, Imports
from forgather.codegen.python.ir import (
    Statement,
    bracketed,
    layout,
    names_read,
    quoted,
    width,
    without_unused,
)
from forgather.codegen.python.lowering import Lowering
from forgather.codegen.python.parameters import Parameter, parameters_of
from forgather.codegen.python.reachability import Reach
from forgather.config.graph import Call, CallKind, Graph
from forgather.config.path import Key, PlainScalar

__all__ = ["PythonCode", "Setting", "emit_python"]


@dataclass(frozen=True, slots=True)
class PythonCode:
    """A generated module.

    Args:
        text: the source of the module.
        targets: the targets that the module's function `build` returns: one object, or a dict of several.
        parameters: the name of the parameter of `build` for each variable of the config.
        imports: the imports that the config names, as "module:symbol" or as the path of a file.
    """

    text: str
    targets: tuple[str, ...]
    parameters: dict[str, str]
    imports: tuple[str, ...]


def emit_python(graph: Graph, targets: Names[str] = ("main",), setting: Setting | None = None) -> PythonCode:
    """Returns a module whose function `build` returns the same objects as the construction of the targets.

    Args:
        graph: the graph of the config.
        targets: the names of the targets.
        setting: the location of the module, and facts about its project; None for the defaults.

    Raises:
        UnknownTargetError: if the graph does not have one of the targets.
        GraphError: FG331 if plain Python cannot express a node; FG304, FG305, FG330 or FG332 if the config itself
            cannot be built.
    """
    setting = setting or Setting()
    wanted = list(dict.fromkeys(targets))
    reach = Reach(graph, wanted)
    names = naming.Names(set(OWN_NAMES))
    imports = Imports(names, setting.system_path)
    # Imports get their names first, so that they keep the names of the imported objects. A variable of the same
    # name gets a number.
    imports.reserve(node for _, node in reach.nodes if isinstance(node, Call))
    parameters = parameters_of(graph, wanted, reach, names)
    lowering = Lowering(graph, reach, imports, names, parameters, project_dir=setting.project_dir)
    built = []
    for target in wanted:
        expression = lowering.build(graph.target(target).value, (Key(target),))
        # With several targets, each gets a variable, so that they are built one after the other.
        built.append(expression if len(wanted) == 1 else lowering.bind(expression, target))
    members = zip((f"{lowering.key(target).text}: " for target in wanted), built, strict=True)
    result = built[0] if len(wanted) == 1 else bracketed("{", members, "}", pure=True)
    statements = [*lowering.block, Statement("return ", result)]
    # Only if it is needed: the search for unused variables parses the whole function.
    if lowering.drops:
        statements = without_unused(statements)
        imports.drop_unused(names_read(statements))
    # A default is written inline at any length: no statement can run before the signature.
    head = signature(parameters.values(), lambda value: lowering.literal(value, (), 10**6).text)
    imports.own |= {"UNSET"} if any(parameter.unset for parameter in parameters.values()) else set()
    tail = ending(graph, wanted, parameters.values(), setting.seed)
    imports.own |= {"seed_everything"} if tail and setting.seed is not None else set()
    text = module_text(setting, wanted, statements, imports, head, tail)
    known = {variable: parameter.name for variable, parameter in parameters.items()}
    return PythonCode(text, tuple(wanted), known, tuple(imports.named_imports()))


# A copy of the file import of `config.resolve`, so that the generated module does not need this package.
_FILE_IMPORT = '''\
def import_file(source, folders=()):
    """Imports a file of the project, or a module in `folders`; it finds its neighbors by relative imports."""
    folders = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    places = [os.path.abspath(os.path.join(PROJECT_DIR, os.path.expanduser(folder))) for folder in folders]
    if source.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(os.path.join(PROJECT_DIR, os.path.expanduser(source))))
        places, source = [folder, *places], "." + file.removesuffix(".py")
    places = [os.path.realpath(place) for place in dict.fromkeys(places)]
    digest = hashlib.sha256("\\0".join(places).encode("utf-8", "surrogateescape")).hexdigest()
    package = f"_forgather_folder_{digest[:16]}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = places
        sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(package + source)
    except ModuleNotFoundError as error:
        if error.name != package + source:
            raise
        text = f"no {source[1:]!r} in {', '.join(places)}: PROJECT_DIR, above, has to be the project's folder"
        raise ModuleNotFoundError(text, name=error.name) from None'''
_GIVEN = '''\
def given(value, variable):
    """Returns the value of a variable that has to be given."""
    if value is UNSET:
        raise NameError(f"the variable {variable!r} has no value")
    return value'''
_OWN_TRAINER = "forgather.ml:Trainer"
_FILE_NEEDS = ("os", "sys", "hashlib", "importlib", "importlib.machinery", "importlib.util", "PROJECT_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The location of a generated module, and facts about its project.

    Args:
        config: the name of the config.
        project: the name of the project.
        project_dir: the project's folder.
        folder: the folder of the generated module.
        system_path: the folders that the project adds to `sys.path`.
        seed: the seed that the module sets before it constructs the config; None to set no seed.
    """

    config: str = "a config"
    project: str = ""
    project_dir: str = "."
    folder: str = "."
    system_path: tuple[str, ...] = ()
    seed: int | None = None


def module_text(
    setting: Setting,
    targets: list[str],
    statements: list[Statement],
    imports: Imports,
    signature: list[str],
    ending: list[str],
) -> str:
    """Returns the source of a module.

    Args:
        setting: the location of the module, and facts about its project.
        targets: the names of the targets.
        statements: the statements in the body of `build`.
        imports: the imports of the module.
        signature: the lines of `def build`.
        ending: the lines that run if the module is executed as a script.
    """
    # Before the import lines are written: importing files needs further imports.
    files = imports.file_lines()
    if "import_file" in imports.own:
        imports.own.update(_FILE_NEEDS)
    relative = _relative(setting.project_dir, setting.folder)
    system_path = [_joined(relative, folder, setting) for folder in setting.system_path]
    if system_path:
        imports.own.add("os")
    parts = ["\n".join(_docstring(setting, targets, imports))]
    if lines := imports.lines(system_path):
        parts.append("\n".join(lines))
    head = "\n\n".join(parts)
    constants = []
    if "PROJECT_DIR" in imports.own:
        constants.append(f"PROJECT_DIR = {_folder_expression(relative)}")
    if "UNSET" in imports.own:
        constants.append("UNSET = object()")
    if constants:
        head += "\n\n" + "\n".join(constants)
    blocks = [head, *_helpers(imports)]
    # `ruff format` puts an empty line between a docstring and a local function.
    gap = [""] if statements[0].is_function else []
    function = [*signature, *_own_docstring(targets), *gap, *layout(statements, "    ")]
    joined = "\n\n\n".join(blocks)
    joined += "\n\n\n" + "\n".join(files) if files else ""
    text = joined + "\n\n\n" + "\n".join(function) + "\n"
    return text + "\n\n" + "\n".join(ending) + "\n" if ending else text


def _helpers(imports: Imports) -> list[str]:
    helpers = [_FILE_IMPORT] if "import_file" in imports.own else []
    helpers += [_GIVEN] if "given" in imports.own else []
    return helpers + ["\n".join(source_lines(word, local)) for word, local in imports.short.items()]


def _docstring(setting: Setting, targets: list[str], imports: Imports) -> list[str]:
    what = f"the target {targets[0]!r}" if len(targets) == 1 else f"{len(targets)} targets"
    where = f" of the project {_docstring_text(setting.project)}" if setting.project else ""
    lines = [f'"""Builds {_docstring_text(what)} of the config {_docstring_text(setting.config)}{where}.']
    lines = lines if width(lines[0]) < 110 else [f'"""Builds {_docstring_text(what)} of a config.']
    if any(fact.startswith("forgather") and fact.endswith(":from_project") for fact in imports.named_imports()):
        lines += ["", "`from_project` reads another config when it is called, from a folder below the working folder."]
    if "PROJECT_DIR" in imports.own:
        what = "It imports files of the project, from" if "import_file" in imports.own else "Its folders begin at"
        lines += ["", f"{what} `PROJECT_DIR`."]
    return [lines[0] + '"""'] if len(lines) == 1 else [*lines, '"""']


def _own_docstring(targets: list[str]) -> list[str]:
    if len(targets) == 1:
        return [f'    """Returns the target \'{_docstring_text(targets[0])}\'."""']
    return ['    """Returns the targets by name."""']


def _docstring_text(text: str) -> str:
    """Returns a name from the config as text that is safe in a docstring: no quotes, escapes or control characters."""
    shown = quoted("".join(char if char.isprintable() else "?" for char in text.replace("\\", "/"))[:60])[1:-1]
    return shown.replace("\\", "").replace('"', "'")


def signature(parameters: Iterable[Parameter], literal: Callable[[PlainScalar], str]) -> list[str]:
    """Returns the lines of `def build`.

    Args:
        parameters: the parameters of `build`.
        literal: the function that returns the text of a plain default.
    """
    ordered = sorted(parameters, key=lambda parameter: not parameter.required)
    texts = [parameter.text(literal) for parameter in ordered]
    line = f"def build(*, {', '.join(texts)}):" if texts else "def build():"
    return [line] if width(line) <= 120 else ["def build(", "    *,", *(f"    {text}," for text in texts), "):"]


def _relative(project_dir: str, folder: str) -> str:
    return os.path.relpath(os.path.abspath(project_dir), os.path.abspath(folder))


def _folder_expression(relative: str) -> str:
    here = "os.path.dirname(os.path.abspath(__file__))"
    if relative == ".":
        return here
    parts = ", ".join(quoted(part) for part in relative.split(os.sep))
    return f"os.path.normpath(os.path.join({here}, {parts}))"


def _joined(relative: str, folder: str, setting: Setting) -> str:
    below = _relative(folder, setting.project_dir)
    return _folder_expression(os.path.normpath(os.path.join(relative, below)))


def ending(graph: Graph, targets: list[str], parameters: Iterable[Parameter], seed: int | None) -> list[str]:
    """Returns the lines that run if the module is executed as a script: they train a trainer, or call a callable.

    Args:
        graph: the graph of the config.
        targets: the names of the targets; the result is empty unless `main` is the only one.
        parameters: the parameters of `build`.
        seed: the seed that the script sets first; None to set no seed.
    """
    main = graph.targets.get("main")
    if main is None or targets != ["main"] or not isinstance(main.value, Call):
        return []
    if any(parameter.required for parameter in parameters):
        return []
    lines = ['if __name__ == "__main__":', *([] if seed is None else [f"    seed_everything({seed})"])]
    if main.value.kind is CallKind.PARTIAL:
        return [*lines, "    build()()"]
    if main.value.constructor == _OWN_TRAINER:
        return [*lines, "    build().train()"]
    if main.value.constructor.endswith("Trainer"):
        # Unlike the trainers of this package, those of transformers do not save the final model.
        return [*lines, "    trainer = build()", "    trainer.train()", "    trainer.save_model()"]
    lines += ["    main = build()", '    if callable(getattr(main, "train", None)):', "        main.train()"]
    return [*lines, "    elif callable(main):", "        main()"]
