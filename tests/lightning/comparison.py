"""Compares what a script came to with what was recorded, within the rounding of float32."""

import json

TOLERANCE = 1e-6


def differences(expected, found, place=""):
    """The places in which two values of lists, mappings, numbers and names differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        return [
            one
            for name in names
            for one in differences(expected.get(name, "nothing"), found.get(name, "nothing"), f"{place}.{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list):
        sizes = [] if len(expected) == len(found) else [f"{place}: {len(expected)} entries, found {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=False))
        return sizes + [one for number, (a, b) in pairs for one in differences(a, b, f"{place}[{number}]")]
    if isinstance(expected, float) and isinstance(found, int | float):
        return (
            []
            if abs(expected - found) <= TOLERANCE * max(1.0, abs(expected))
            else [f"{place}: {expected!r}, found {found!r}"]
        )
    return [] if expected == found else [f"{place}: {expected!r}, found {found!r}"]


def plain(value):
    return json.loads(json.dumps(value))
