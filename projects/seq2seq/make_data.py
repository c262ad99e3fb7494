"""Writes numbers with their English words, as data/numbers.jsonl. The same seed writes the same file.

Usage: python make_data.py [ROWS]
"""

import json
import random
import sys
from pathlib import Path

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
ONES += ["seventeen", "eighteen", "nineteen"]
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number):
    """Returns a number below a million in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return TENS[ten - 2] + (f" {ONES[one]}" if one else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    return f"{words(many)} {name}" + (f" {words(rest)}" if rest else "")


def main(rows):
    out = Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    draw = random.Random(0)
    numbers = list(dict.fromkeys(draw.randrange(10 ** draw.randint(2, 5)) for _ in range(2 * rows)))[:rows]
    with open(out / "numbers.jsonl", "w") as stream:
        for number in numbers:
            # A blank between the digits: each digit is then a token of its own.
            stream.write(json.dumps({"source": " ".join(str(number)), "target": words(number)}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6000)
