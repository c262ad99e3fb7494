"""Facts of hardware: memory, peak rates and links of devices, each with its source.

Takes the name of a device, the name that its driver gives, or a JSON file that describes one; gives a `Hardware`. The
table `hardware.json` is the only place for such facts: plans, and the model FLOPs utilization of runs, read it.

Units:
    bytes, bytes per second, floating-point (or integer) operations per second.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from forgather.errors import PlanError
from forgather.json_text import JsonFault, Path, parse_json
from forgather.planner.efficiency import EFFICIENCIES, Efficiency, Range, assumed_of
from forgather.planner.memory_plan import parse_size
from forgather.source import Span
from forgather.spelling import close_matches

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
KINDS = ("cuda", "rocm", "cpu")
LINKS = ("nvlink", "infinity fabric", "pcie", "network")
_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hardware.json")
_KEYS = (
    "title",
    "kind",
    "source",
    "dense_tflops",
    "sparse_tflops",
    "memory_mib",
    "memory_gb_per_second",
    "links_gb_per_second",
    "network_is_shared",
    "efficiency",
)
_ABOUT_EFFICIENCY: Mapping[str, Any] = {"source": str, "fitted": list, "largest_error": (int, float)}
_FORMS = {"source": "a text", "fitted": "a list of names", "largest_error": "a number"}
_FORM = "docs/reference/hardware.md has the form of such a file"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Facts of one device.

    Args:
        name: the name in the table, or the name of the file.
        title: the name for people.
        kind: "cuda", "rocm" or "cpu".
        memory_bytes: the memory that the driver reports; None if unknown, as for processors.
        memory_bytes_per_second: the peak bandwidth of this memory; None if unknown.
        peak_flops: the peak rate of dense operations, by the type of the numbers (one of `DTYPES`). Rates of 16-bit
            types are those with sums in 32 bits, which training uses.
        sparse_flops: the same with structured sparsity, which training does not use; data sheets often give only these.
        links: the peak rate of each link in one direction: "nvlink" or "infinity fabric" between the devices of a
            machine, "pcie" to the host, "network" to other machines.
        network_is_shared: whether all devices of a machine share one "network" link; otherwise each has its own.
        aliases: other names in the table.
        sources: the document and the date of each fact, by its name: "memory_mib", a type, a link, and so on.
        checked: where the facts of each source were found again, by source.
        unverified: the names of facts that were written from memory and not found again in a document.
        efficiency: the shares of these rates that runs were found to reach; None for a device that is not calibrated.
    """

    name: str
    title: str
    kind: str = "cuda"
    memory_bytes: int | None = None
    memory_bytes_per_second: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    sparse_flops: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    network_is_shared: bool = False
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    checked: Mapping[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    efficiency: Efficiency | None = None

    @property
    def gives_times(self) -> bool:
        """Whether the rates are known that the time of a step follows from."""
        return bool(self.peak_flops and self.memory_bytes_per_second)

    def as_data(self) -> dict[str, Any]:
        """Returns the facts as plain data."""
        return asdict(self)


def hardware_names() -> list[str]:
    """Returns the names of the table."""
    return list(_table()["hardware"])


def hardware(name: str) -> Hardware:
    """Returns the facts of a device.

    Args:
        name: a name of the table, in any spelling ("H200", "rtx-4090", "A100 80GB"), or a path that ends in ".json".

    Raises:
        PlanError: FG994 if the table has no such device; FG995 if the file does not describe one.
    """
    if name.endswith(".json"):
        return hardware_from_file(name)
    entries = _table()["hardware"]
    by_spelling = {_plain(alias): key for key, entry in entries.items() for alias in (key, *entry["names"])}
    key = by_spelling.get(_plain(name))
    if key is None:
        near = [by_spelling[spelling] for spelling in close_matches(_plain(name), by_spelling)]
        meant = f"did you mean {_listed(dict.fromkeys(near))}? " if near else ""
        raise PlanError(
            f"the table of hardware has no {name!r}",
            code="FG994",
            hint=_size_hint(name)
            or f"{meant}known are {', '.join(entries)}; other devices are described by a file: --hardware FILE.json",
            found=name,
        )
    return _from_table(key)


def _size_hint(name: str) -> str | None:
    """Returns what to do with a size in place of a name; None if the name is no size."""
    wanted = parse_size(name)
    if wanted is None:
        return None
    size = "".join(name.split())
    sized = [key for key in hardware_names() if abs((_from_table(key).memory_bytes or 0) / wanted - 1) < _SAME_SIZE]
    named = f"--hardware takes a device; of this size: {', '.join(sized)}. " if sized else ""
    return f"{named}For a size alone, --free {size} says whether the run fits, and --memory {size} the largest batch"


_SAME_SIZE = 0.09  # 24 GB and 24 GiB are 7 % apart


def hardware_of_device(device_name: str) -> Hardware | None:
    """Returns the facts of the device that a driver calls `device_name`; None if the table does not have it.

    Example:
        >>> hardware_of_device("NVIDIA H200").name
        'h200'
    """
    for key, entry in _table()["hardware"].items():
        if device_name in entry["device_names"]:
            return _from_table(key)
    return None


def hardware_from_file(file: str) -> Hardware:
    """Returns the facts of a device that a JSON file describes. All keys are optional, `memory_mib` excepted.

    Args:
        file: the path of the file. It holds a mapping with keys of `hardware.json`: `title`, `kind`, `source`,
            `dense_tflops`, `sparse_tflops`, `memory_mib`, `memory_gb_per_second`, `links_gb_per_second`,
            `network_is_shared`; and `efficiency`, which `fgcli plan --calibrate` writes.

    Raises:
        PlanError: FG995 if the file cannot be read, or with the line of the first value that is wrong.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise PlanError(f"the hardware file {file!r} cannot be read: {why}", code="FG995", hint=_FORM) from error
    try:
        parsed = parse_json(text)
    except JsonFault as error:
        raise PlanError(
            f"the hardware file is {error}", code="FG995", span=Span(file, error.line), hint=_FORM
        ) from error
    entry = parsed.value
    if (fault := _fault(entry)) is not None:
        path, message = fault
        raise PlanError(message, code="FG995", span=Span(file, parsed.lines.get(path, 1)), hint=_FORM)
    own = {"title": os.path.basename(file), "source": os.path.basename(file), "dense_tflops": {}}
    return _from_entry(os.path.basename(file), {**own, **entry}, {})


def _fault(entry: Any) -> tuple[Path, str] | None:
    """Returns the path of the first value of an own file that is wrong, and what is wrong; None if nothing is."""
    if not isinstance(entry, dict):
        return (), f"a hardware file holds one mapping, and this one holds {type(entry).__name__}"
    for key, value in entry.items():
        if key not in _KEYS:
            near = close_matches(key, _KEYS, n=1)
            return (key,), f"unknown key {key!r}: " + (
                f"did you mean {near[0]!r}?" if near else f"use {_listed(_KEYS)}"
            )
        if key in ("title", "kind", "source"):
            if not isinstance(value, str) or (key == "kind" and value not in KINDS):
                return (key,), f"{key} is {value!r:.80}, and not " + (_listed(KINDS) if key == "kind" else "a text")
        elif key in ("memory_mib", "memory_gb_per_second"):
            if not _is_positive(value):
                return (key,), f"{key} is {value!r:.80}, and not a number above 0"
        elif key == "network_is_shared":
            if not isinstance(value, bool):
                return (key,), f"{key} is {value!r:.80}, and not true or false"
        elif not isinstance(value, dict):
            return (key,), f"{key} is {value!r:.80}, and not a mapping of names to numbers"
        elif (fault := (_efficiency_fault if key == "efficiency" else _rates_fault)(key, value)) is not None:
            return fault
    if "memory_mib" not in entry:
        return (), "memory_mib is missing: without it, nothing can be said about what fits"
    return None


def _rates_fault(key: str, found: Mapping[str, Any]) -> tuple[Path, str] | None:
    known, noun = (DTYPES, "type") if key.endswith("tflops") else (LINKS, "link")
    for name, number in found.items():
        if name not in known:
            return (key, name), f"{key} has no {noun} {name!r}; the {noun}s are {', '.join(known)}"
        if not _is_positive(number):
            return (key, name), f"{name} of {key} is {number!r:.80}, and not a number above 0"
    return None


def _efficiency_fault(key: str, found: Mapping[str, Any]) -> tuple[Path, str] | None:
    for name, value in found.items():
        if name in EFFICIENCIES:
            if not _is_positive(value):
                return (key, name), f"{name} of efficiency is {value!r:.80}, and not a number above 0"
        elif name not in _ABOUT_EFFICIENCY:
            near = close_matches(name, EFFICIENCIES, n=1)
            words = f"did you mean {near[0]!r}?" if near else f"use {_listed((*EFFICIENCIES, *_ABOUT_EFFICIENCY))}"
            return (key, name), f"efficiency has no {name!r}: {words}"
        elif not isinstance(value, _ABOUT_EFFICIENCY[name]) or isinstance(value, bool):
            return (key, name), f"{name} of efficiency is {value!r:.80}, and not {_FORMS[name]}"
        elif name == "fitted" and (wrong := [one for one in value if one not in EFFICIENCIES]):
            return (key, name), f"fitted of efficiency names {wrong[0]!r:.80}; the names are {', '.join(EFFICIENCIES)}"
    return None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


@cache
def _table() -> dict[str, Any]:
    with open(_TABLE, encoding="utf-8") as stream:
        table: dict[str, Any] = json.load(stream)
    return table


def _from_table(key: str) -> Hardware:
    table = _table()
    titles = {name: f"{source['title']} ({source['date']})" for name, source in table["sources"].items()}
    checked = {titles[name]: source["checked"] for name, source in table["sources"].items() if "checked" in source}
    return replace(_from_entry(key, table["hardware"][key], titles), checked=checked)


def _from_entry(name: str, entry: Mapping[str, Any], titles: Mapping[str, str]) -> Hardware:
    links = entry.get("links_gb_per_second", {})
    cells = [*entry["dense_tflops"], *links]
    cells += [cell for cell in ("memory_mib", "memory_gb_per_second") if entry.get(cell) is not None]
    own = entry.get("cell_sources", {})
    sources = {cell: own.get(cell, entry["source"]) for cell in cells}
    memory, bandwidth = entry.get("memory_mib"), entry.get("memory_gb_per_second")
    return Hardware(
        name=name,
        title=entry["title"],
        kind=entry.get("kind", "cuda"),
        memory_bytes=None if memory is None else int(memory * 2**20),
        memory_bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
        peak_flops={dtype: number * 1e12 for dtype, number in entry["dense_tflops"].items()},
        sparse_flops={dtype: number * 1e12 for dtype, number in entry.get("sparse_tflops", {}).items()},
        links={link: number * 1e9 for link, number in links.items()},
        network_is_shared=entry.get("network_is_shared", False),
        aliases=tuple(entry.get("names", ())),
        unverified=tuple(entry.get("unverified", ())),
        efficiency=_efficiency(entry.get("efficiency"), entry.get("kind", "cuda")),
        sources={cell: titles.get(source, source) for cell, source in sources.items()},
    )


def _efficiency(found: Mapping[str, Any] | None, kind: str) -> Efficiency | None:
    if found is None:
        return None
    values = {name: Range(found[name], found[name]) for name in EFFICIENCIES if name in found}
    said = [str(found.get("source", "given by the hardware file"))]
    if "largest_error" in found:
        said.append(f"which it gives within {found['largest_error']:.0%}")
    if "fitted" in found:
        own = [name.removesuffix("_seconds") for name in found["fitted"]]
        said.append(f"{_listed(own, 'and')} fitted apart" if own else "all by one common factor")
    return replace(assumed_of(kind), **values, source=", ".join(said))


def as_entry(device: Hardware) -> dict[str, Any]:
    """Returns the content of a hardware file that describes a device; of its sources, only one is kept."""
    cells = sorted(set(device.sources.values()))
    return {
        "title": device.title,
        "kind": device.kind,
        "source": cells[0] if len(cells) == 1 else f"{device.name} of the table of hardware",
        "dense_tflops": {name: float(f"{rate / 1e12:.6g}") for name, rate in device.peak_flops.items()},
        "sparse_tflops": {name: float(f"{rate / 1e12:.6g}") for name, rate in device.sparse_flops.items()},
        "links_gb_per_second": {name: float(f"{rate / 1e9:.6g}") for name, rate in device.links.items()},
        "network_is_shared": device.network_is_shared,
        **({} if device.memory_bytes is None else {"memory_mib": round(device.memory_bytes / 2**20)}),
        **(
            {}
            if device.memory_bytes_per_second is None
            else {"memory_gb_per_second": float(f"{device.memory_bytes_per_second / 1e9:.6g}")}
        ),
    }


def _plain(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd)?(geforce|tesla|instinct)?", "", letters)


def _listed(names: Iterable[str], word: str = "or") -> str:
    *first, last = list(names)
    return f"{', '.join(first)} {word} {last}" if first else last
