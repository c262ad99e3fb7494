"""Damage to files, as disks, copies and people do it.

Takes the content of a file and a source of randomness; gives other content. Keeps true: what is given is never the same.
"""

import shutil

BLOCK = 4096


def flip(content, dice):
    """One bit is another."""
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << dice.randrange(8))]) + content[place + 1 :]


def cut(content, dice):
    """The end is gone."""
    return content[: dice.randrange(len(content))]


def zero(content, dice):
    """A block is zeros, as after a loss of power."""
    blocks = range(0, len(content), BLOCK)
    held = [start for start in blocks if any(content[start : start + BLOCK])]
    start = dice.choice(held)
    return content[:start] + bytes(len(content[start : start + BLOCK])) + content[start + BLOCK :]


DAMAGES = {"flipped": flip, "cut": cut, "zeroed": zero}


class Damaged:
    """A block in which a file has other content; it has its own again afterwards."""

    def __init__(self, file, damage, dice):
        self.file = file
        self.content = file.read_bytes()
        self.damaged = damage(self.content, dice)

    def __enter__(self):
        assert self.damaged != self.content
        self.file.write_bytes(self.damaged)

    def __exit__(self, *_):
        self.file.write_bytes(self.content)


def swap(first, second):
    """Two files have each other's content."""
    beside = first.with_name(f"{first.name}.beside")
    shutil.move(first, beside)
    shutil.move(second, first)
    shutil.move(beside, second)
