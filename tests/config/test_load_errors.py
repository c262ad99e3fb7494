"""Documents that cannot be loaded: each gives one located error, soon.

The left side is the document, the right side the whole error as one line.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from documents import origin, rendered

from forgather.config.load import load
from forgather.errors import ForgatherError
from forgather.source import Origin, Site, Span

HOSTILE = {
    "empty file": (
        "",
        "LoadError /project/t.yaml:1: [FG202] t.yaml renders to an empty document (a config is a mapping of targets: main: !singleton:module:symbol)",
    ),
    "only comments": (
        "# nothing\n",
        "LoadError /project/t.yaml:1: [FG202] t.yaml renders to an empty document (a config is a mapping of targets: main: !singleton:module:symbol)",
    ),
    "a scalar as root": (
        "hello\n",
        "LoadError /project/t.yaml:1: [FG202] the root of a config is a mapping of targets, found the value 'hello' (write 'name: value' at column 0; a tag belongs after a key)",
    ),
    "a sequence as root": (
        "- a\n- b\n",
        "LoadError /project/t.yaml:1: [FG202] the root of a config is a mapping of targets, found a sequence (write 'name: value' at column 0; a tag belongs after a key)",
    ),
    "a tagged root": (
        "!singleton:a:b\nx: 1\n",
        "LoadError /project/t.yaml:1: [FG202] the root of a config is a mapping of targets, found !singleton:a:b (write 'name: value' at column 0; a tag belongs after a key)",
    ),
    "a target name that is a number": (
        "1: x\n",
        "LoadError /project/t.yaml:1: [FG217] the target name 1 is not a string (quote it)",
    ),
    "key indented more than its neighbour": (
        "trainer:\n  lr: 1\n   steps: 2\n",
        "LoadError /project/t.yaml:3: [FG201] 'steps' is indented by 3, its neighbour 'lr' (/project/t.yaml:2) by 2 (give both lines the same indent)",
    ),
    "key indented less than its neighbour": (
        "trainer:\n    lr: 1\n  steps: 2\n",
        "LoadError /project/t.yaml:3: [FG201] 'steps' is indented by 2, its neighbour 'lr' (/project/t.yaml:2) by 4 (give both lines the same indent)",
    ),
    "key that falls out of a nested block": (
        "trainer:\n    opt:\n        lr: 1\n     steps: 2\n",
        "LoadError /project/t.yaml:4: [FG201] 'steps' is indented by 5, its neighbour 'opt' (/project/t.yaml:2) by 4 (give both lines the same indent)",
    ),
    "item indented less than its neighbour": (
        "a:\n    - 1\n  - 2\n",
        "LoadError /project/t.yaml:3: [FG201] '- 2' is indented by 2, its neighbour '- 1' (/project/t.yaml:2) by 4 (give both lines the same indent)",
    ),
    "item where a key should stand": (
        "a: 1\n- b\n",
        "LoadError /project/t.yaml:2: [FG200] a '- item' among the 'key: value' lines of a mapping (the value around it is a mapping: write `name: b`)",
    ),
    "tab in the indentation": (
        "a:\n\tb: 1\n",
        "LoadError /project/t.yaml:2: [FG219] a tab in the indentation (indent with spaces)",
    ),
    "tab behind blanks": (
        "a:\n  b: 1\n \tc: 2\n",
        "LoadError /project/t.yaml:3: [FG219] a tab in the indentation (indent with spaces)",
    ),
    "undefined alias": (
        "a: &model 1\nb: *modle\n",
        "LoadError /project/t.yaml:2: [FG203] *modle refers to an anchor that is not defined above it (did you mean 'model'?)",
    ),
    "undefined alias without anchors": (
        "a: *x\n",
        "LoadError /project/t.yaml:1: [FG203] *x refers to an anchor that is not defined above it (define it above with &x)",
    ),
    "alias above its anchor": (
        "a: *x\nb: &xy 1\nc: [2, &x 3]\n",
        "LoadError /project/t.yaml:1: [FG203] *x refers to an anchor that is not defined above it "
        "(&x is defined below, at /project/t.yaml:3; move it above this line)",
    ),
    "alias inside its own anchor": (
        "a: &a\n  b: [*a]\n",
        "LoadError /project/t.yaml:2: [FG205] *a is inside &a, which begins at /project/t.yaml:2: a value cannot contain itself (refer to a part of it, or make the reference in Python)",
    ),
    "anchor with a foreign letter": (
        "a: &é 1\n",
        "LoadError /project/t.yaml:1: [FG200] an anchor name that YAML cannot read (letters, digits, '_' and '-' only: &name)",
    ),
    "unknown tag": (
        "a: !singelton:torch:nn\n",
        "LoadError /project/t.yaml:1: [FG210] unknown tag '!singelton' (did you mean '!singleton'?)",
    ),
    "unknown tag handle": (
        "a: !e!x 1\n",
        "LoadError /project/t.yaml:1: [FG210] unknown tag '!e!x' (a tag is written !kind:module:symbol)",
    ),
    "verbatim tag": (
        "a: !<tag:x> 1\n",
        "LoadError /project/t.yaml:1: [FG210] unknown tag '!<tag:x>' (a tag is written !kind:module:symbol)",
    ),
    "tag that swallowed a comma": (
        "a: [!call:x:y, 1]\n",
        "LoadError /project/t.yaml:1: [FG211] the tag '!call:x:y,' swallowed ',': in YAML it is part of the tag (put a space before it: '!call:x:y ,')",
    ),
    "tag that swallowed a bracket": (
        "a: [!call:x:y]\n",
        "LoadError /project/t.yaml:1: [FG211] the tag '!call:x:y]' swallowed ']': in YAML it is part of the tag (put a space before it: '!call:x:y ]')",
    ),
    "tag that runs into a brace": (
        "a: {b: !call:x:y}\n",
        "LoadError /project/t.yaml:1: [FG211] the tag '!call:x:y}' runs into '}' (put a space before '}')",
    ),
    "tag with a blank": (
        "a: !call:my module:x\n",
        "LoadError /project/t.yaml:1: [FG211] a space inside the tag: '!call:my' ends at the space before 'module:x' (a tag cannot contain spaces; rename what it refers to)",
    ),
    "tag with a foreign letter": (
        "a: !call:modulé:x\n",
        "LoadError /project/t.yaml:1: [FG211] the tag '!call:modulé:x' contains a non-ASCII character (rename what it refers to)",
    ),
    "tag at column 0 above its mapping": (
        "a:\n!call:x:y\n  b: 1\n",
        "LoadError /project/t.yaml:2: [FG211] the tag '!call:x:y' is at column 0, outside the key that it should belong to (indent it under its key, or put it on the line of the key)",
    ),
    "tag at column 0 between keys": (
        "a: 1\n!call:x:y\nb: 1\n",
        "LoadError /project/t.yaml:2: [FG211] the tag '!call:x:y' is at column 0, outside the key that it should belong to (indent it under its key, or put it on the line of the key)",
    ),
    "tag without constructor": (
        "a: !singleton\n",
        "LoadError /project/t.yaml:1: [FG211] the tag '!singleton' names no constructor (write !singleton:module:symbol)",
    ),
    "constructor that is no builtin": (
        "a: !call:itmes {}\n",
        "LoadError /project/t.yaml:1: [FG211] 'itmes' is not a builtin and names no module (did you mean 'items'?)",
    ),
    "constructor without symbol": (
        "a: !call:torch:\n",
        "LoadError /project/t.yaml:1: [FG211] '!call:torch:': the constructor needs both sides of its ':' (write module:symbol)",
    ),
    "file without symbol": (
        "a: !call:models/x.py\n",
        "LoadError /project/t.yaml:1: [FG211] '!call:models/x.py' names a file without a symbol (write models/x.py:symbol)",
    ),
    "name that is empty": (
        "a: !call:x:y@\n",
        "LoadError /project/t.yaml:1: [FG211] '!call:x:y@': no name after '@' (write @name, or leave the '@' out)",
    ),
    "container tag with constructor": (
        "a: !list:x:y []\n",
        "LoadError /project/t.yaml:1: [FG211] '!list:x:y': !list takes no constructor, found 'x:y' (to name it, write !list:@name)",
    ),
    "list tag on a mapping": (
        "a: !list {b: 1}\n",
        "LoadError /project/t.yaml:1: [FG212] !list is followed by a mapping (!list takes a sequence; !dlist reads a mapping as a list)",
    ),
    "dict tag on a sequence": (
        "a: !dict [b]\n",
        "LoadError /project/t.yaml:1: [FG212] !dict is followed by a sequence (!dict takes a mapping)",
    ),
    "dlist tag on a scalar": (
        "a: !dlist b\n",
        "LoadError /project/t.yaml:1: [FG212] !dlist is followed by 'b' (!dlist takes a mapping)",
    ),
    "var without name": (
        "a: !var\n",
        "LoadError /project/t.yaml:1: [FG212] !var is followed by nothing (write !var NAME, or !var {name: NAME, default: VALUE})",
    ),
    "var with a strange key": (
        "a: !var {nme: x}\n",
        "LoadError /project/t.yaml:1: [FG212] !var is followed by a mapping of 'nme' (write !var NAME, or !var {name: NAME, default: VALUE})",
    ),
    "var on a sequence": (
        "a: !var [x]\n",
        "LoadError /project/t.yaml:1: [FG212] !var is followed by a sequence (write !var NAME, or !var {name: NAME, default: VALUE})",
    ),
    "env with an equals sign": (
        "a: !env A=B\n",
        "LoadError /project/t.yaml:1: [FG212] 'A=B' cannot be the name of an environment variable (write !env NAME, or !env {name: NAME, default: VALUE})",
    ),
    "calc on a mapping": (
        "a: !calc {b: 1}\n",
        "LoadError /project/t.yaml:1: [FG212] !calc is followed by a mapping of 'b' (write !calc \"max(1, total // batch)\")",
    ),
    "explicit args that are no sequence": (
        "a: !call:x:y\n  args: 3\n",
        "LoadError /project/t.yaml:2: [FG213] 'args' of the explicit form is the value '3'; it must be a sequence of positional arguments (for a keyword argument named args write kwargs: {args: ...})",
    ),
    "explicit kwargs that are no mapping": (
        "a: !call:x:y\n  kwargs: [1]\n",
        "LoadError /project/t.yaml:2: [FG213] 'kwargs' is a sequence; it must be a mapping of keyword arguments (for a keyword argument of that name write kwargs: {kwargs: ...})",
    ),
    "keyword that is a number": (
        "a: !call:x:y\n  1: 2\n",
        "LoadError /project/t.yaml:2: [FG213] the keyword argument 1 is not a string (keyword arguments are strings; quote the key, or use the explicit args:)",
    ),
    "repeated key": (
        "a:\n  lr: 1\n  lr: 2\n",
        "LoadError /project/t.yaml:3: [FG206] the key 'lr' appears twice in one block with different values; the first is at /project/t.yaml:2 (remove one of them; to override a parent's line, put it in a child's block)",
    ),
    "repeated target": (
        "a: 1\nb: 2\na: 3\n",
        "LoadError /project/t.yaml:3: [FG206] the key 'a' appears twice in one block with different values; the first is at /project/t.yaml:1 (remove one of them; to override a parent's line, put it in a child's block)",
    ),
    "merge of a scalar": (
        "a:\n  <<: 3\n",
        "LoadError /project/t.yaml:2: [FG218] '<<' merges something that is not a mapping (write <<: *name of a mapping, or <<: [*a, *b]; quote '<<' if it is a key)",
    ),
    "merge of a list of scalars": (
        "a:\n  <<: [1]\n",
        "LoadError /project/t.yaml:2: [FG218] '<<' merges something that is not a mapping (write <<: *name of a mapping, or <<: [*a, *b]; quote '<<' if it is a key)",
    ),
    "mapping as key": (
        "{a: 1}: 2\n",
        "LoadError /project/t.yaml:1: [FG217] a key cannot be a mapping or a nested sequence (a key is a plain value, or a sequence of plain values)",
    ),
    "tagged key": (
        "!call:x:y : 2\n",
        "LoadError /project/t.yaml:1: [FG217] a key cannot be the tag '!call:x:y' (a key is a plain value, or a sequence of plain values)",
    ),
    "timestamp": (
        "a: 2024-01-01\n",
        "LoadError /project/t.yaml:1: [FG214] '2024-01-01' is a YAML timestamp (quote it to make it a string: \"2024-01-01\")",
    ),
    "long timestamp": (
        "a: 2024-01-01T10:00:00Z\n",
        "LoadError /project/t.yaml:1: [FG214] '2024-01-01T10:00:00Z' is a YAML timestamp (quote it to make it a string: \"2024-01-01T10:00:00Z\")",
    ),
    "lone equals sign": (
        "a: =\n",
        "LoadError /project/t.yaml:1: [FG214] a lone '=' is a YAML value key, which has no meaning here (quote it: '=')",
    ),
    "set tag": (
        "a: !!set {b, c}\n",
        "LoadError /project/t.yaml:1: [FG214] the tag '!!set' is not part of the language (write a sequence, and !call:set around it)",
    ),
    "binary tag": (
        "a: !!binary aGVsbG8=\n",
        "LoadError /project/t.yaml:1: [FG214] the tag '!!binary' is not part of the language (keep the bytes in a file and name the file)",
    ),
    "python object tag": (
        "a: !!python/object/apply:os.system ['true']\n",
        "LoadError /project/t.yaml:1: [FG214] the tag '!!python/object/apply:os.system' is not part of the language (call the constructor: !singleton:module:symbol)",
    ),
    "int tag on a word": (
        "a: !!int word\n",
        "LoadError /project/t.yaml:1: [FG212] !!int is followed by 'word' (leave the tag out)",
    ),
    "YAML directive": (
        "%YAML 1.1\n---\na: 1\n",
        "LoadError /project/t.yaml:1: [FG215] %YAML, %TAG and other directives are not part of the language (remove the line)",
    ),
    "TAG directive": (
        "%TAG ! tag:x\n---\na: 1\n",
        "LoadError /project/t.yaml:1: [FG215] %YAML, %TAG and other directives are not part of the language (remove the line)",
    ),
    "unknown directive": (
        "%FOO bar\n---\na: 1\n",
        "LoadError /project/t.yaml:1: [FG215] %YAML, %TAG and other directives are not part of the language (remove the line)",
    ),
    "header of a sub-template without its hash": (
        "a: 1\n--- part ---\nb: 2\n",
        "LoadError /project/t.yaml:2: [FG215] a second document begins here, named 'part'; a config is one document (a sub-template begins with #--- part ---)",
    ),
    "second document": (
        "a: 1\n---\nb: 2\n",
        "LoadError /project/t.yaml:2: [FG215] a second document begins here; a config is one document (remove the '---' or '...'; a sub-template begins with `#--- name ---`)",
    ),
    "text after the end of the document": (
        "a: 1\n...\nb\n",
        "LoadError /project/t.yaml:3: [FG215] a second document begins here; a config is one document (remove the '---' or '...'; a sub-template begins with `#--- name ---`)",
    ),
    "next-line character": (
        "a: 1\nb: x\x85y\n",
        'LoadError /project/t.yaml:2: [FG216] U+0085 is a line break in YAML, but not in an editor (remove it, or write it as an escape in double quotes: "\\u0085")',
    ),
    "line separator": (
        "a: x\u2028y\n",
        'LoadError /project/t.yaml:1: [FG216] U+2028 is a line break in YAML, but not in an editor (remove it, or write it as an escape in double quotes: "\\u2028")',
    ),
    "paragraph separator": (
        "a: x\u2029y\n",
        'LoadError /project/t.yaml:1: [FG216] U+2029 is a line break in YAML, but not in an editor (remove it, or write it as an escape in double quotes: "\\u2029")',
    ),
    "lone carriage return": (
        "a: x\ry\n",
        'LoadError /project/t.yaml:1: [FG216] U+000D is a line break in YAML, but not in an editor (remove it, or write it as an escape in double quotes: "\\u000d")',
    ),
    "half a character": (
        "a: \ud800\n",
        "LoadError /project/t.yaml:1: [FG216] U+D800 is half of a surrogate pair (remove it)",
    ),
    "NUL": (
        "a: x\x00y\n",
        'LoadError /project/t.yaml:1: [FG216] the character U+0000 is not allowed in a document (remove it, or write it as an escape in double quotes: "\\x00")',
    ),
    "escape character": (
        "a: \x1b[0m\n",
        'LoadError /project/t.yaml:1: [FG216] the character U+001B is not allowed in a document (remove it, or write it as an escape in double quotes: "\\x1b")',
    ),
    "unclosed double quote": (
        'a: "x\nb: 1\n',
        "LoadError /project/t.yaml:1: [FG200] a quote that opens here is never closed (close the quote)",
    ),
    "unclosed single quote": (
        "a: 'x\n",
        "LoadError /project/t.yaml:1: [FG200] a quote that opens here is never closed (close the quote)",
    ),
    "unclosed bracket": (
        "a: [1, 2\nb: 3\n",
        "LoadError /project/t.yaml:1: [FG200] a '[' that is not closed, or a missing ',' (close it with ']')",
    ),
    "unclosed brace": (
        "a: {b: 1\n",
        "LoadError /project/t.yaml:1: [FG200] a '{' that is not closed, or a missing ',' (close it with '}')",
    ),
    "unknown escape": (
        'a: "\\q"\n',
        "LoadError /project/t.yaml:1: [FG200] an unknown escape in a double-quoted string (double the backslash, or use single quotes)",
    ),
    "escape of half a character": (
        'a: "\\ud800"\n',
        "LoadError /project/t.yaml:1: [FG200] an escape that names no character (write \\xXX, \\uXXXX or \\UXXXXXXXX)",
    ),
    "two colons in one line": (
        "a: b: c\n",
        "LoadError /project/t.yaml:1: [FG200] a second ': ' in one line (quote the value: key: \"a: b\")",
    ),
    "a key and its value between braces, without a blank": (
        "a: {lr:3}\n",
        "LoadError /project/t.yaml:1: [FG200] a ':' inside a plain value between brackets (quote the value: [\"a:b\"])",
    ),
    "value that begins with @": (
        "a: @x\n",
        "LoadError /project/t.yaml:1: [FG200] '@' cannot begin a value (quote the value)",
    ),
    "value that begins with a backquote": (
        "a: `x`\n",
        "LoadError /project/t.yaml:1: [FG200] '`' cannot begin a value (quote the value)",
    ),
    "value that begins with a percent sign": (
        "a: %x\n",
        "LoadError /project/t.yaml:1: [FG200] '%' cannot begin a value (quote the value)",
    ),
    "line that is no key": (
        "a: 1\nb\nc: 2\n",
        "LoadError /project/t.yaml:2: [FG200] a line that is neither 'key: value' nor '- item' (add the ':' after its key)",
    ),
    "dash behind a key": (
        "a: - b\n",
        "LoadError /project/t.yaml:1: [FG200] '- ' in a place where no item can begin (put it on a line of its own)",
    ),
    "unexpected closing bracket": (
        "a: ]\n",
        "LoadError /project/t.yaml:1: [FG200] a value is missing (write the value)",
    ),
}

HUGE = {
    "one million digits": (
        "a: " + "9" * 1000000 + "\n",
        "BudgetError /project/t.yaml:1: [FG220] an integer of 1000000 digits; the limit is 4300 (quote it if it is a string)",
    ),
    "hexadecimal with many digits": (
        "a: 0x" + "f" * 5000 + "\n",
        "BudgetError /project/t.yaml:1: [FG220] an integer of 5002 digits; the limit is 4300 (quote it if it is a string)",
    ),
    "six million characters": (
        "a: " + "x" * 6000000 + "\n",
        "BudgetError /project/t.yaml:1: [FG220] a document of 6000004 characters; the limit is 5000000 (move data out of the config)",
    ),
    "depth in brackets": (
        "a: " + "[" * 100000 + "\n",
        "BudgetError /project/t.yaml:1: [FG220] nested deeper than 100 (use fewer levels)",
    ),
    "depth in braces": (
        "a: " + "{a: " * 50000 + "\n",
        "BudgetError /project/t.yaml:1: [FG220] nested deeper than 100 (use fewer levels)",
    ),
    "depth in blocks": (
        "".join(" " * n + "a:\n" for n in range(1000)),
        "BudgetError /project/t.yaml:101: [FG220] nested deeper than 100 (use fewer levels)",
    ),
    "depth in dashes": (
        "a: \n  " + "- " * 10000 + "1\n",
        "BudgetError /project/t.yaml:2: [FG220] nested deeper than 100 (use fewer levels)",
    ),
    "depth through aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)),
        "BudgetError /project/t.yaml:101: [FG220] nested deeper than 100 once its aliases are followed (use fewer levels)",
    ),
    "alias bomb": (
        "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)),
        "BudgetError /project/t.yaml:6: [FG220] this value has more than 100000 parts once its aliases are followed (use fewer or smaller aliased values)",
    ),
    "alias bomb of mappings": (
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 20)),
        "BudgetError /project/t.yaml:6: [FG220] this value has more than 100000 parts once its aliases are followed (use fewer or smaller aliased values)",
    ),
    "merge bomb": (
        ".a0: &a0 {"
        + ", ".join(f"k{i}: {i}" for i in range(1000))
        + "}\n"
        + "".join(f".a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)),
        "BudgetError /project/t.yaml:5: [FG220] this value has more than 100000 parts once its aliases are followed (use fewer or smaller aliased values)",
    ),
    "many values": (
        "a: [" + "1, " * 200000 + "]\n",
        "BudgetError /project/t.yaml:1: [FG220] more than 100000 values (split the data off into a file)",
    ),
    "many keys": (
        "a:\n" + "".join(f"  k{n}: 1\n" for n in range(60000)),
        "BudgetError /project/t.yaml:50000: [FG220] more than 100000 values (split the data off into a file)",
    ),
}


def report(text: str) -> str:
    with pytest.raises(ForgatherError) as caught:
        load(rendered(text))
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize(("text", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_malformed_document_gives_one_located_error(text, expected):
    assert expected == report(text)


@pytest.mark.parametrize(("text", "expected"), HUGE.values(), ids=HUGE.keys())
def test_a_document_that_would_explode_is_refused_with_its_place(text, expected):
    assert expected == report(text)


def test_a_column_is_given_where_the_rendered_line_is_the_line_of_the_file():
    with pytest.raises(ForgatherError) as caught:
        load(rendered("a: 1\nb: *c\n"))
    assert (2, 4) == (caught.value.span.line, caught.value.span.column)


def test_an_error_says_which_config_and_through_which_lines_it_was_reached():
    writer = origin((7, "config.yaml", "model"), (3, "part.yaml", None))
    with pytest.raises(ForgatherError) as caught:
        load(rendered("a: *b\n", {1: writer}))
    assert "/project/part.yaml:3" == str(caught.value.span)
    assert ("config t.yaml", "printed at config.yaml:7") == caught.value.context


def test_an_error_in_a_printed_value_says_where_the_value_was_set():
    writer = replace(origin((4, "config.yaml", None)), sets=origin((2, "config.yaml", None)).sites)
    with pytest.raises(ForgatherError) as caught:
        load(rendered("a: *b\n", {1: writer}))
    assert "/project/config.yaml:4" == str(caught.value.span)
    assert ("config t.yaml", "set at config.yaml:2") == caught.value.context


def test_a_line_of_a_sub_template_is_named_by_its_file():
    site = Site(Span("/project/config.yaml", 9), "parts.model", "model")
    writer = Origin((site, *origin((3, "part.yaml", None)).sites))
    with pytest.raises(ForgatherError) as caught:
        load(rendered("a: *b\n", {1: writer}))
    assert ("config t.yaml", "printed at /project/config.yaml:9") == caught.value.context


TOGETHER = """\
a: *nope
b: !nope {x: 1}
c: {x: 1, x: 2, <<: *gone}
d: !!binary x
"""


def test_mistakes_that_the_reading_can_go_on_after_are_told_together():
    with pytest.raises(ForgatherError) as caught:
        load(rendered(TOGETHER))
    found = [caught.value.diagnostic, *caught.value.others]
    assert [("FG203", 1), ("FG210", 2), ("FG203", 3), ("FG206", 3), ("FG214", 4)] == [
        (one.code, one.span.line) for one in found
    ]


@pytest.mark.parametrize("last", ["b: [1\n", "b: !call: x\n", "*x : 1\n"])
def test_a_mistake_that_ends_the_reading_is_told_after_the_others(last):
    with pytest.raises(ForgatherError) as caught:
        load(rendered(f"a: *nope\n{last}c: *nope\n"))
    assert ("FG203", 1) == (caught.value.code, caught.value.span.line)
    assert 1 == len(caught.value.others)


def test_more_than_a_screen_of_mistakes_is_cut():
    with pytest.raises(ForgatherError) as caught:
        load(rendered("".join(f"a{number}: *nope\n" for number in range(100))))
    assert 10 == len(caught.value.others)
