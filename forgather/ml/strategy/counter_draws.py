"""Random numbers by position: each depends on a key and on its own index, and on no number that was drawn before it.

A stream has a key, which is made of a seed, a name and a number. Its element at an index is the same whichever other
elements are computed with it, in whichever process, and on whichever processor: Philox is a function of key and
counter, and what follows uses only operations that IEEE 754 rounds correctly (+, -, *, /, sqrt). Vectorized functions
of libraries, such as `log`, may differ in the last bit between the middle and the end of an array.

Source:
    Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), as in NumPy. The inverse of the
    normal distribution: Wichura, "Algorithm AS 241: The percentage points of the normal distribution" (1988), PPND16.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# The number of elements that are computed together, so that all temporary arrays stay in the processor's cache.
CHUNK = 1 << 13
_WORDS = 4  # Philox gives four words of 64 bits per counter

_CENTER = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457),
    (13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867),
    (5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258),
    (3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459),
    (0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093),
    (0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4),
    (0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)


def stream_key(seed: int, name: str, number: int) -> NDArray[np.uint64]:
    """Returns the key of a stream.

    Args:
        seed: the seed of the run.
        name: the name of the parameter that is filled.
        number: the number of the stream among those of the parameter.

    Shapes:
        Returns (2,).
    """
    text = f"{seed}\n{number}\n{name}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def uniform(key: NDArray[np.uint64], ranges: Iterable[tuple[int, int]], count: int) -> Floats:
    """Returns elements of a stream of numbers that are uniform in the open interval from 0 to 1.

    Args:
        key: the key of the stream.
        ranges: the start and the length of each range of indices.
        count: the sum of the lengths.

    Shapes:
        Returns (count,), in the order of the ranges.
    """
    words = np.empty(count, dtype=np.uint64)
    done = 0
    for start, length in ranges:
        skipped = start % _WORDS
        drawn = Philox(counter=start // _WORDS, key=key).random_raw(skipped + length)
        words[done : done + length] = drawn[skipped:]
        done += length
    # 52 bits and a half: the ends of the interval, where the normal distribution is infinite, cannot occur.
    words >>= np.uint64(12)
    found: Floats = words.astype(np.float64)
    found += 0.5
    found *= 2.0**-52
    return found


def normal_quantile(probabilities: Floats) -> Floats:
    """Returns the numbers below which the standard normal distribution has the given probabilities.

    Args:
        probabilities: numbers between 0 and 1, both excluded. The array may be overwritten.

    Shapes:
        probabilities: (count,). Returns (count,).
    """
    q = probabilities - 0.5
    size = np.abs(q)
    outer = np.flatnonzero(size > 0.425)
    tails = np.minimum(probabilities[outer], 1.0 - probabilities[outer])
    r = q * q
    np.subtract(0.180625, r, out=r)
    found = _ratio(r, _CENTER)
    found *= q
    if outer.size:
        found[outer] = np.copysign(_tail_quantile(tails), q[outer])
    return found


def normal_probability(x: float) -> float:
    """Returns the probability of numbers below x in the standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def _tail_quantile(tails: Floats) -> Floats:
    r = np.sqrt(-logarithm(tails))
    far = np.flatnonzero(r > 5.0)
    found = _ratio(r - 1.6, _TAIL)
    if far.size:
        found[far] = _ratio(r[far] - 5.0, _FAR)
    return found


def _ratio(x: Floats, coefficients: tuple[tuple[float, ...], ...]) -> Floats:
    found = _polynomial(x, coefficients[0] + coefficients[1])
    found /= _polynomial(x, coefficients[2] + coefficients[3])
    return found


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    found: Floats = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        found += coefficient
        found *= x
    found += coefficients[-1]
    return found


_LOG_2 = math.log(2.0)
_ATANH = tuple(1.0 / power for power in range(25, 0, -2))


def logarithm(x: Floats) -> Floats:
    """Returns natural logarithms, by correctly rounded operations alone.

    Args:
        x: positive numbers.

    Shapes:
        x: (count,). Returns (count,).
    """
    mantissa, exponent = np.frexp(x)
    # Into the range from sqrt(1/2) to sqrt(2), where the series of atanh is short.
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    powers = exponent.astype(np.float64) - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    found: Floats = 2.0 * s * _polynomial(s * s, _ATANH) + powers * _LOG_2
    return found
