"""The work of measured steps as compact data: `scripts/bench/plan_times.py` writes it, and a test plans it again."""

from forgather.planner.work import Message, Operation, RankWork, RunWork

SIZES = [name for name in RunWork.__dataclass_fields__ if name != "ranks"]


class Figures:
    """Texts that occur often are numbers in a table."""

    def __init__(self, texts=()):
        self.texts = list(texts)

    def packed(self, work):
        """Returns a `RunWork` as data. What an evaluation does is left out: it is no part of a step."""
        return {
            **{name: getattr(work, name) for name in SIZES},
            "ranks": [
                [one.ranks, one.stages, self._pack(one.operations, 3), self._pack(one.messages, 2)]
                for one in work.ranks
            ],
        }

    def work(self, data):
        """Returns the `RunWork` of such data."""
        ranks = tuple(
            RankWork(
                ranks=tuple(ranks),
                stages=tuple(stages),
                operations=self._unpack(operations, 3, Operation),
                messages=self._unpack(messages, 2, Message),
            )
            for ranks, stages, operations, messages in data["ranks"]
        )
        return RunWork(**{name: data[name] for name in SIZES if name in data}, ranks=ranks)

    def _pack(self, counts, texts):
        return [
            [*map(self._number, one[:texts]), *one[texts:], count]
            for one, count in counts.items()
            if one.phase != "evaluation"
        ]

    def _unpack(self, rows, texts, kind):
        return {kind(*(self.texts[number] for number in row[:texts]), *row[texts:-1]): row[-1] for row in rows}

    def _number(self, text):
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)
