"""Prints names under which the standard library offers what no config may call, as JSON: [module, symbol, home].

Usage: python aliases.py (imports most of the standard library, and calls nothing).
"""

import importlib
import json
import sys
import types
import warnings

HOMES = ("os", "posix", "subprocess", "shutil", "importlib", "pickle", "marshal", "ctypes", "runpy", "pty", "code")
HOMES += ("builtins", "functools", "inspect", "types", "sys", "signal", "socket", "threading", "io")
SKIPPED = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test", "lib2to3", "__main__"}
PURE = {"getcwd", "cpu_count", "fspath", "getpid", "sched_getaffinity", "process_cpu_count", "StringIO", "BytesIO"}
PURE |= {"SimpleNamespace", "MappingProxyType", "getsizeof", "reduce"}


def modules():
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        try:
            yield name, importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112 - a module of another system
            continue


def main():
    warnings.simplefilter("ignore")
    found = set()
    loaded = dict(modules())
    for name, module in loaded.items():
        for part, thing in list(vars(module).items()):
            if not isinstance(thing, types.ModuleType) or part.startswith("__"):
                continue
            if thing.__name__ in HOMES and thing is not module:
                symbols = [word for word in vars(thing) if not word.startswith("_") and word not in PURE]
                calls = [word for word in symbols if isinstance(getattr(thing, word), types.BuiltinFunctionType)]
                calls += [word for word in symbols if isinstance(getattr(thing, word), types.FunctionType)]
                found |= {(name, f"{part}.{word}", thing.__name__) for word in calls}
    print(json.dumps(sorted(found)))


main()
