"""Writes lines of the standard library with a tag for each token, as data/names.jsonl and data/words.jsonl.

names: the dotted names of a line as entities, in the tags of IOB2: CALL if the name is called, SET if it gets a value,
READ otherwise. words: the kind of each token. The same Python writes the same files.

Usage: python make_data.py [ROWS]
"""

import json
import keyword
import sys
import sysconfig
import tokenize
from pathlib import Path

KINDS = {tokenize.NAME: "name", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "sign"}
SETS = {"=", "+=", "-=", "*=", ":="}


def lines(folder):
    """Yields the tokens of each line that has between 3 and 20 of them, each line once."""
    seen = set()
    for file in sorted(folder.glob("*.py")):
        line = []
        with tokenize.open(file) as stream:
            for token in tokenize.generate_tokens(stream.readline):
                if token.type in KINDS and "\n" not in token.string and len(token.string) < 30:
                    line.append(token)
                elif token.type == tokenize.NEWLINE:
                    text = tuple(one.string for one in line)
                    if 3 <= len(text) <= 20 and text not in seen:
                        seen.add(text)
                        yield line
                    line = []


def name_tags(words):
    """Returns the tag of each word: what happens to the dotted name that it belongs to."""
    tags, place = [], 0
    while place < len(words):
        end = place + 1
        if not words[place].isidentifier() or keyword.iskeyword(words[place]):
            tags.append("O")
            place = end
            continue
        while words[end : end + 1] == ["."] and end + 1 < len(words):
            end += 2
        after = words[end] if end < len(words) else ""
        kind = "CALL" if after == "(" else "SET" if after in SETS else "READ"
        tags += [f"B-{kind}", *[f"I-{kind}"] * (end - place - 1)]
        place = end
    return tags


def main(rows):
    out = Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    with open(out / "names.jsonl", "w") as names, open(out / "words.jsonl", "w") as kinds:
        for line, _ in zip(lines(Path(sysconfig.get_paths()["stdlib"])), range(rows), strict=False):
            words = [token.string for token in line]
            of_words = ["keyword" if keyword.iskeyword(token.string) else KINDS[token.type] for token in line]
            names.write(json.dumps({"tokens": words, "tags": name_tags(words)}) + "\n")
            kinds.write(json.dumps({"tokens": words, "tags": of_words}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
