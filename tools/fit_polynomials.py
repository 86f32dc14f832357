"""Computes the polynomial coefficients of csrc/kernels/math.inc and tanh_table.inc and prints them.

    python tools/fit_polynomials.py            # needs mpmath
    python tools/fit_polynomials.py table      # the text of tanh_table.inc alone

Each is a minimax fit: of all polynomials of its degree, the one whose largest
relative error over the interval is smallest (Remez's exchange algorithm).
Coefficients must be numbers of the type in use, so they are fixed one by one:
round the lowest, fit the others again around it, and so on.
"""

import sys

import mpmath as mp

mp.mp.prec = 200
GRID = 800
LN2 = mp.log(2)


def evaluate(coefficients, x):
    total = mp.mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def alternating_peaks(errors, count):
    """Indices of the `count` largest extremes whose signs alternate."""
    peaks = [0]
    for i in range(1, len(errors)):
        if errors[i] * errors[peaks[-1]] > 0:
            if abs(errors[i]) > abs(errors[peaks[-1]]):
                peaks[-1] = i
        else:
            peaks.append(i)
    while len(peaks) > count:
        sizes = [abs(errors[i]) for i in peaks]
        lowest = sizes.index(min(sizes))
        if len(peaks) == count + 1:
            peaks.pop(0 if sizes[0] < sizes[-1] else -1)
        elif lowest in (0, len(peaks) - 1):
            peaks.pop(lowest)
        else:  # the extremes beside it have one sign: the larger one stays
            smaller = lowest - 1 if sizes[lowest - 1] < sizes[lowest + 1] else lowest + 1
            for i in sorted((lowest, smaller), reverse=True):
                peaks.pop(i)
    return peaks


def minimax(target, weight, fixed, degree, points):
    """Coefficients fixed + free of the given degree, and their largest weighted error."""
    free = degree + 1 - len(fixed)
    # What is left to fit, divided by the lowest power left: the sign of the error
    # then alternates from peak to peak, also across x = 0.
    rest = [(target(x) - evaluate(fixed, x)) / x ** len(fixed) for x in points]
    powers = [[x**k for k in range(free)] for x in points]
    weights = [weight(x) * abs(x) ** len(fixed) for x in points]
    last = len(points) - 1
    # Chebyshev's points, with one equation more than unknowns for the error itself.
    chosen = [round(last * (1 - mp.cos(mp.pi * i / free)) / 2) for i in range(free + 1)]
    for _ in range(40):
        matrix = mp.matrix(free + 1, free + 1)
        right = mp.matrix(free + 1, 1)
        for row, i in enumerate(chosen):
            for k in range(free):
                matrix[row, k] = powers[i][k] * weights[i]
            matrix[row, free] = (-1) ** row
            right[row] = rest[i] * weights[i]
        solution = mp.lu_solve(matrix, right)
        coefficients = [solution[k] for k in range(free)]
        errors = [(r - mp.fdot(coefficients, p)) * w for r, p, w in zip(rest, powers, weights)]
        worst = max(abs(e) for e in errors)
        peaks = alternating_peaks(errors, free + 1)
        if worst <= abs(solution[free]) * mp.mpf("1.0001") or len(peaks) <= free:
            break
        chosen = peaks
    return list(fixed) + coefficients, worst


def round_to(bits, x):
    with mp.workprec(bits):
        return +x


def fit(name, target, weight, degree, low, high, bits):
    points = [low + (high - low) * (1 - mp.cos(mp.pi * (i + mp.mpf(1) / 2) / GRID)) / 2 for i in range(GRID)]
    fixed = []
    for k in range(degree + 1):
        fixed.append(round_to(bits, minimax(target, weight, fixed, degree, points)[0][k]))
    worst = max(abs((target(x) - evaluate(fixed, x)) * weight(x)) for x in points)
    print(f"{name}: degree {degree}, error 2^{float(mp.log(worst, 2)):.2f}")
    for k, c in enumerate(fixed):
        suffix = "f" if bits == 24 else ""
        print(f"    {k:2d}  {mp.nstr(c, 9 if bits == 24 else 17)}{suffix}")


def split_constant(name, value, high_bits, bits):
    """high + low = value; high has few bits, so that small whole n * high is exact."""
    scale = mp.mpf(2) ** (high_bits - 1 - mp.floor(mp.log(value, 2)))
    high = mp.floor(value * scale) / scale
    low = round_to(bits, value - high)
    digits = 9 if bits == 24 else 17
    print(f"{name}: {mp.nstr(high, digits)} + {mp.nstr(low, digits)}")


def exp_tail(r):
    """q of exp(r) = 1 + r + r^2 q(r)."""
    if abs(r) < mp.mpf("1e-15"):
        return mp.mpf(1) / 2 + r / 6
    return (mp.exp(r) - 1 - r) / r**2


def tanh_tail(s):
    """p of tanh(z) = z + z s p(s), s = z^2."""
    z = mp.sqrt(s)
    return (mp.tanh(z) / z - 1) / s


def tanh_weight(edge):
    """Relative error, counted up to four times at the edge of the interval.

    An error there weighs most: just beyond the edge the result of tanh is the small
    difference of two larger numbers, one of them with this error.
    """
    return lambda s: s ** mp.mpf(1.5) / mp.tanh(mp.sqrt(s)) * (1 + 3 * (s / edge) ** 2)


TABLE_DEGREE = 5
TABLE_LEAST, TABLE_MOST = -4, 3  # exponents of the octaves, four intervals each


def centre(low, high):
    """The float in the middle of an interval whose tanh is nearest to a float: of some hundreds, within 0.002 ULP."""
    middle = (low + high) / 2
    step = mp.mpf(2) ** (mp.floor(mp.log(middle, 2)) - 20)

    def miss(c):
        return abs(mp.tanh(c) - round_to(24, mp.tanh(c))) / mp.tanh(c)

    return min((round_to(24, middle + i * step) for i in range(-300, 301)), key=miss)


def through_chebyshev_points(function, low, high, degree):
    """Coefficients of the polynomial that meets the function there: within a factor of two of the best one."""
    n = degree + 1
    points = [(low + high) / 2 + (high - low) / 2 * mp.cos(mp.pi * (2 * i + 1) / (2 * n)) for i in range(n)]
    powers = mp.matrix([[x**k for k in range(n)] for x in points])
    return list(mp.lu_solve(powers, mp.matrix([function(x) for x in points])))


def table_entry(exponent, quarter):
    """Centre c, then coefficients of t^0 .. t^5: tanh(c + t) on a quarter of the octave of 2^exponent."""
    low, high = (mp.mpf(2) ** exponent * (1 + mp.mpf(q) / 4) for q in (quarter, quarter + 1))
    if (exponent, quarter) == (TABLE_LEAST, 0):  # from 0 on: odd, and exactly t for tiny t
        tail = through_chebyshev_points(tanh_tail, high**2 / 1000, high**2, 1)
        return [mp.mpf(n) for n in (0, 0, 1, 0, tail[0], 0, tail[1])]
    if low >= 10:
        return [mp.mpf(n) for n in (10, 1, 0, 0, 0, 0, 0)]
    c = centre(low, high)

    def slope(t):
        return (mp.tanh(c + t) - mp.tanh(c)) / t

    return [c, mp.tanh(c), *through_chebyshev_points(slope, low - c, high - c, TABLE_DEGREE - 1)]


def print_table():
    """One line of four entries for each octave, in the order of the low three bits of a float's exponent."""
    octaves = sorted(range(TABLE_LEAST, TABLE_MOST + 1), key=lambda exponent: (exponent + 127) % 8)
    entries = [[round_to(24, x) for x in table_entry(e, quarter)] for e in octaves for quarter in range(4)]
    for row in range(TABLE_DEGREE + 2):
        print("    {" if row == 0 else "    }, {")
        for i in range(0, len(entries), 4):
            numbers = ", ".join(mp.nstr(entry[row], 9) + "f" for entry in entries[i : i + 4])
            print(f"        {numbers},")
    print("    },")


def main():
    if sys.argv[1:] == ["table"]:
        return print_table()
    edge = LN2 / 2 * mp.mpf("1.0001")
    small = (LN2 / 4 * mp.mpf("1.0001")) ** 2
    tiny = small * mp.mpf("1e-12")
    for bits, exp_degree, tanh_degree in ((24, 4, 1), (53, 9, 5)):
        print(f"--- {'float' if bits == 24 else 'double'}")
        split_constant("ln2", LN2, 16 if bits == 24 else 42, bits)
        half = round_to(bits, LN2 / 2)
        digits = 9 if bits == 24 else 17
        print(f"ln2 / 2: {mp.nstr(half, digits)} + {mp.nstr(LN2 / 2 - half, digits)}")
        fit("exp q", exp_tail, lambda r: r**2 / mp.exp(r), exp_degree, -edge, edge, bits)
        fit("tanh p", tanh_tail, tanh_weight(small), tanh_degree, tiny, small, bits)


if __name__ == "__main__":
    sys.exit(main())
