"""The budget account of one render, which counts the work, output and memory of the templates.

The input is the limits of a load; the output is an `Account` that raises `BudgetError` when a cost would exceed a
limit. Invariants: the cost of an operation is counted before the operation runs; every unit of work that a template can
repeat is counted, so no template can exceed the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2.runtime import Undefined
from jinja2.utils import Namespace

from forgather.config.environment import Budget
from forgather.errors import BudgetError
from forgather.source import Span

# The limit of all work follows from that of one value, so that a user has one limit to set and not two.
_WORK_PER_VALUE = 10
_WORK_PER_STEP = 4
# An item takes about the memory of 32 characters: its slot in the list, and the object itself.
_ITEM_CHARS = 32
_SMALL = 1024
_TEXTS = (str, bytes)
_REPEATED = (str, bytes, list, tuple)
_SEQUENCES = (list, tuple, set, frozenset)
_FLAT = frozenset({int, float, bool, type(None), range})
# Python has no names for the types of these views.
_VIEWS = frozenset({type({}.keys()), type({}.values()), type({}.items())})
# The largest `range` that Jinja's sandbox allows has as many items.
MAX_COUNT = 100_000
# log2(10), rounded up: a number of exactly the allowed digits must pass.
BITS_PER_DIGIT = 3.33


class Account:
    """The account of one render, whose methods add a cost to the account or compare a size with a limit.

    Args:
        limits: the limits of the load.

    Raises:
        BudgetError: raised by the methods: FG120 if the templates take too many turns; FG122 if they do too much work,
            or if a value would be too large. `overflow` returns an error FG121, for output that is too long.

    Units:
        A turn is one loop iteration, one call or one item. Work and sizes are counted in characters.
    """

    def __init__(self, limits: Budget) -> None:
        self.limits = limits
        self.turns = 0
        self.work = 0
        self.depth = 0
        self._max_turns = limits.max_loop_turns
        self._max_work = limits.max_value_chars * _WORK_PER_VALUE

    def turn(self, count: int = 1) -> None:
        """Counts loop iterations, calls or items against the rendering budget.

        Raises:
            BudgetError: FG120 if the templates have taken too many turns.
        """
        self.turns += count
        if self.turns > self._max_turns:
            raise BudgetError(
                f"the templates take more than {self._max_turns:,} loop turns",
                code="FG120",
                hint="macro calls, includes, recursion and items read by filters count as turns",
            )

    def charge(self, chars: int) -> None:
        """Counts work on `chars` characters, or an equal amount of other work, against the rendering budget.

        Raises:
            BudgetError: FG122 if the templates have done too much work.
        """
        self.work += chars
        if self.work > self._max_work:
            raise BudgetError(
                f"the templates work on more than {self._max_work:,} characters in all",
                code="FG122",
                hint="do less to large values inside loops",
            )

    def reserve(self, chars: int | float, what: str) -> None:
        """Checks the size of a value before the value is made, and counts the size against the rendering budget.

        Args:
            chars: an upper bound of the size of the value, in characters.
            what: the name of the operation in the error message.

        Raises:
            BudgetError: FG122 if the value would be too large, or if the templates have done too much work.
        """
        if chars > self.limits.max_value_chars:
            raise BudgetError(
                f"{what} would make a value of more than {self.limits.max_value_chars:,} characters",
                code="FG122",
                hint="make a smaller value",
            )
        # Small values are not charged here: the turns that make them are.
        if chars > _SMALL:
            self.charge(int(chars))

    def overflow(self, span: Span | None) -> BudgetError:
        """Returns the error for output that is too long."""
        return BudgetError(
            f"the templates write more than {self.limits.max_output_chars:,} characters",
            code="FG121",
            span=span,
            hint="write less; a config is a few hundred lines",
        )

    def weigh(self, value: Any) -> Any:
        """Counts the size of an existing value against the rendering budget; a container counts with all its items.

        Returns:
            the value itself.
        """
        kind = type(value)
        if kind in _FLAT:
            # Printing or dividing an integer costs the square of its length; `max_integer_digits` bounds the length.
            if kind is int and value.bit_length() > _SMALL:
                self.charge(2 * value.bit_length())
            return value
        # Reading an undefined value raises, which is for the expression that uses it to do.
        if isinstance(value, Undefined):
            return value
        if isinstance(value, str):
            if len(value) > _SMALL:
                self.charge(len(value))
            return value
        size = self.size(value)
        if size > _SMALL:
            # `size` counts _ITEM_CHARS for each item; visiting an item is charged as four characters.
            self.charge(size // _ITEM_CHARS * 4)
        return value

    def compared(self, value: Any) -> Any:
        """Counts a comparison with a value, or a search in it, against the rendering budget, and returns the value."""
        # Searching a range for anything but an int compares item by item.
        if type(value) is range:
            self.charge(_WORK_PER_STEP * len(value))
            return value
        return self.weigh(value)

    def items(self, count: int, what: str) -> None:
        """Checks the size of a list of `count` items before the list is made; the size counts against the budget."""
        self.reserve(_ITEM_CHARS * count, what)

    def size(self, value: Any) -> int:
        """Returns the size of a value in characters.

        An object that occurs several times in a container is counted each time.

        Raises:
            BudgetError: FG122 if the value is too large.
        """
        total, pending, limit = 0, [value], self.limits.max_value_chars
        while pending:
            item = pending.pop()
            kind = type(item)
            held: Any = None
            if isinstance(item, _TEXTS):
                total += len(item)
            elif isinstance(item, dict):
                held = [*item, *item.values()]
            elif isinstance(item, _SEQUENCES) or kind in _VIEWS:
                held = item
            elif isinstance(item, Namespace):
                # Jinja's namespace hides its dictionary behind `__getattribute__`.
                held = list(object.__getattribute__(item, "_Namespace__attrs").values())
            total += _ITEM_CHARS
            if held is not None:
                total += _ITEM_CHARS * len(held)
                pending.extend([inner for inner in held if type(inner) not in _FLAT])
            if total > limit:
                raise BudgetError(
                    f"a value contains more than {limit:,} characters in all",
                    code="FG122",
                    hint="a list or mapping counts with all its items, each time that it occurs",
                )
        return total

    def power(self, base: Any, exponent: Any) -> None:
        """Raises an error if `base ** exponent` would have too many digits."""
        if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
            # `9**9**9` would run for hours, so the digits are estimated from the lengths of the operands.
            self._digits(base.bit_length() * exponent, "'**'")

    def product(self, left: Any, right: Any) -> None:
        """Raises an error if `left * right`, a product of numbers or a repeated text or list, would be too large."""
        for value, count in ((left, right), (right, left)):
            if isinstance(value, _REPEATED) and isinstance(count, int):
                unit = 1 if isinstance(value, _TEXTS) else _ITEM_CHARS
                self.reserve(len(value) * max(count, 0) * unit, "'*'")
                return
        if isinstance(left, int) and isinstance(right, int):
            self._digits(left.bit_length() + right.bit_length(), "'*'")

    def addition(self, left: Any, right: Any) -> None:
        """Raises an error if `left + right` would be too large."""
        if isinstance(left, int) and isinstance(right, int):
            self._digits(max(left.bit_length(), right.bit_length()), "'+'")
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            unit = 1 if isinstance(left, str) else _ITEM_CHARS
            self.reserve((len(left) + len(right)) * unit, "'+'")

    def _digits(self, bits: int | float, what: str) -> None:
        if bits > self.limits.max_integer_digits * BITS_PER_DIGIT:
            raise BudgetError(
                f"{what} would make a number of more than {self.limits.max_integer_digits:,} digits",
                code="FG122",
                hint="write the number as a float, as in 1e300",
            )

    def counted(self, values: Iterable[Any], cost: int = 1) -> Counted:
        """Returns an iterable over `values` that counts each item as `cost` loop iterations against the budget."""
        return Counted(self, values, cost)

    def consume(self, value: Any) -> Any:
        """Counts the items of a value against the rendering budget, and returns the value for a filter to read.

        The items of an iterator are counted one by one, when the filter takes them.
        """
        if isinstance(value, str | int):
            return self.weigh(value)
        # An iterator has no length, so its items can only be charged when they are taken.
        if hasattr(value, "__next__"):
            return iter(self.counted(value))
        if hasattr(value, "__len__"):
            self.turn(len(value))
            return self.weigh(value)
        return value


class Counted:
    """An iterable that counts each item against the rendering budget when the item is taken."""

    __slots__ = ("_account", "_values", "cost")

    def __init__(self, account: Account, values: Iterable[Any], cost: int) -> None:
        self._account, self._values, self.cost = account, values, cost

    def __iter__(self) -> Iterator[Any]:
        turn, cost = self._account.turn, self.cost
        for value in self._values:
            turn(cost)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]
