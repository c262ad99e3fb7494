"""Requests that a run must refuse: malformed, too large, of unknown words, of values that no setting has.

Each is the bytes that a client writes to the socket of a run. The client then closes its side for writing.
"""

import json
import pickle

GOOD = {"form": 1, "action": "set", "settings": {"learning_rate": 1e-4}, "host": "here"}


def changed(**values):
    return json.dumps({**GOOD, **values}).encode() + b"\n"


def raw(text):
    return json.dumps(GOOD).replace("0.0001", text).encode() + b"\n"


HOSTILE = {
    "an empty line": b"\n",
    "no JSON": b"pause\n",
    "a request of HTTP": b"POST /pause HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a greeting of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    "no UTF-8": b'{"form": "\xff\xfe"}\n',
    "a null byte": b"\x00" * 32 + b"\n",
    "a pickle": pickle.dumps(GOOD, protocol=0) + b"\n",
    "a list": b"[1, 2]\n",
    "a text": b'"pause"\n',
    "nested deeply": b"[" * 60_000 + b"\n",
    "a line that is too long": json.dumps({**GOOD, "host": "x" * (1 << 16)}).encode() + b"\n",
    "no end of the line": b"x" * (1 << 17),
    "a part of a request": json.dumps(GOOD).encode()[:20],
    "an unknown action": changed(action="shutdown", settings={}),
    "an action of another type": changed(action=["stop"]),
    "another form": changed(form=2),
    "a form that is true": changed(form=True),
    "a further key": changed(exec="rm -rf /"),
    "a missing key": json.dumps({"form": 1, "action": "stop"}).encode() + b"\n",
    "a key twice": b'{"form": 1, "action": "stop", "action": "pause", "settings": {}, "host": ""}\n',
    "not a number": raw("NaN"),
    "infinity": raw("Infinity"),
    "more than a float": raw("1e999"),
    "a number of many digits": raw("9" * 4000),
    "more digits than Python reads": raw("9" * 5000),
    "a negative rate": raw("-0.5"),
    "a rate of 0": raw("0"),
    "a rate that is a text": raw('"1e-4"'),
    "a rate that is true": raw("true"),
    "a rate that is a list": raw("[0.1]"),
    "a setting that nobody may set": changed(settings={"output_dir": 1}),
    "an attribute of Python": changed(settings={"__class__": 1}),
    "half a step": changed(settings={"save_steps": 1.5}),
    "no step": changed(settings={"save_steps": 0}),
    "nothing to set": changed(settings={}),
    "settings of a stop": changed(action="stop"),
    "settings that are a list": changed(settings=[["learning_rate", 1]]),
    "a host with control characters": changed(host="a\x1b[2Jb\nc"),
    "a host that is too long": changed(host="h" * 300),
    "a host that is no text": changed(host={"a": 1}),
}
