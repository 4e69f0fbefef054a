"""The plan: a search for each combination of listed values, and which of their winners is best."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from sim.errors import InputError
from sim.planning.evaluate import Bench, Evaluation, Point
from sim.planning.limiting import Limiting, limiting
from sim.planning.objective import check_good
from sim.planning.pace import MOST_USERS, Pace, pace_of, paced
from sim.planning.search import Found, Search, highest, smallest, together
from sim.planning.steady import too_short
from sim.planning.vary import Range, Varied
from sim.resolve import resolve
from sim.scenario import Scenario

COUNT_GPUS = ("cluster.replicas", "engine.tensor_parallel_size")

Choice = tuple[tuple[str, str], ...]  # a value of each list, by path


class Winner(NamedTuple):
    """What the search at one choice found; `best` is None where nothing keeps the promise."""

    choice: Choice
    best: Evaluation | None
    broken: Evaluation | None  # beside the best, or without one the nearest miss
    limiting: Limiting | None
    gpus: int
    notes: list[str]


class Plan(NamedTuple):
    """A finished search: its winners, best first, and all it rests on."""

    scenario: Scenario
    sought: str
    winners: list[Winner]
    evaluations: list[Evaluation]

    @property
    def best(self) -> Winner | None:
        return self.winners[0] if self.winners[0].best is not None else None


class _Answer(NamedTuple):
    best: Evaluation | None
    broken: Evaluation | None
    notes: list[str]


_Asking = Generator[list[Point], list[Evaluation], _Answer]


def make_plan(bench: Bench, varied: Varied) -> Plan:
    """Search. Raises InputError, one line: before the first run for values that make no scenario."""
    scenario = bench.scenario(Point())
    scenarios = {choice: _checked(bench, choice, varied.ranges) for choice in varied.crossed()}
    pace = None if varied.ranges else next(pace_of(one) for one in scenarios.values())
    searches = [
        _fewest(bench, choice, varied.ranges) if varied.ranges else _fastest(choice, one, pace_of(one))
        for choice, one in scenarios.items()
    ]
    answers = together(searches, bench.evaluate)
    evaluations = list(bench.known.values())
    errors = [run.error for one in evaluations for run in one.runs]
    if all(errors):
        raise InputError(f"{scenario.name}: no point could run; the first: {errors[0]}")
    winners = [_winner(bench, *one) for one in zip(scenarios.items(), answers, strict=True)]
    winners.sort(key=lambda winner: _rank(bench, winner, varied.ranges))
    return Plan(scenario, _sought(varied, pace), winners, evaluations)


def num_gpus(scenario: Scenario) -> int:
    """The GPUs that all replicas take together."""
    return scenario.cluster.replicas * scenario.engine.tensor_parallel_size


def _checked(bench: Bench, choice: Choice, ranges: Sequence[Range]) -> Scenario:
    """The scenario of a choice, with every range at its top. Raises InputError for one that is none."""
    for end in ("low", "high"):
        point = _point(choice, [(one.path, getattr(one, end)) for one in ranges])
        try:
            scenario = bench.scenario(point)
            resolve(scenario)
        except InputError as error:
            text = str(error)
            for override in point.overrides:
                text = text.replace(f"--set {override}", f"--vary {override}")
            raise InputError(text) from None
    check_good(bench.limits, scenario)
    return scenario


def _fastest(choice: Choice, scenario: Scenario, pace: Pace) -> _Asking:
    """The highest pace of a choice."""
    most = MOST_USERS if pace.whole else float("inf")

    def at(value: float) -> Point:
        point = _point(choice, [])
        named = int(value) if pace.whole else value
        return Point((*point.values, (pace.name, named)), (*point.overrides, *paced(scenario, pace, value)))

    found = yield from _asking(highest(pace.now, whole=pace.whole, most=most), at)
    best, broken, notes = yield from _neighbours(found, at)
    if best is not None and broken is None:
        notes = [
            *notes,
            "nothing breaks the promise at any pace: so few requests overload nothing; make more",
        ]
    return _Answer(best, broken, notes)


def _fewest(bench: Bench, choice: Choice, ranges: Sequence[Range]) -> _Asking:
    """The smallest value of each range in turn, the ranges behind it at their tops."""
    fixed: list[tuple[str, int]] = []
    best = broken = None
    notes: list[str] = []
    for i, one in enumerate(ranges):
        rest = [(other.path, other.high) for other in ranges[i + 1 :]]

        def at(value: float, path: str = one.path, rest: list[tuple[str, int]] = rest) -> Point:
            return _point(choice, [*fixed, (path, int(value)), *rest])

        found = yield from _asking(smallest(one.low, one.high), at)
        best, beside, told = yield from _neighbours(found, at)
        broken, notes = beside or broken, notes + told
        if found.best is None:
            return _Answer(None, broken, notes)
        if found.best == one.low and one.low > 1:
            notes = [*notes, f"{one.path}={one.low}, the lowest asked for, keeps it: less may do"]
        fixed.append((one.path, int(found.best)))
    return _Answer(best, broken, notes)


def _asking(search: Search, at: Callable[[float], Point]) -> Generator[list[Point], list[Evaluation], Found]:
    """A search among values as one among points."""
    values = next(search)
    while True:
        evaluations = yield [at(value) for value in values]
        try:
            values = search.send([one.kept for one in evaluations])
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _neighbours(found: Found, at: Callable[[float], Point]) -> _Asking:
    """What is known of the answer and of the value beside it, and where bisection was deceived."""
    asked = [at(value) for value in (found.best, found.broken) if value is not None]
    known = iter((yield asked))
    best = next(known) if found.best is not None else None
    broken = next(known) if found.broken is not None else None
    notes = [
        f"more is not always better here: {at(value)} {'keeps' if kept else 'breaks'} the promise; "
        "the answer is one edge of several"
        for value, kept in found.surprises
    ]
    return _Answer(best, broken, notes)


def _point(choice: Choice, settings: Sequence[tuple[str, int]]) -> Point:
    values = (*choice, *settings)
    return Point(values, tuple(f"{path}={value}" for path, value in values))


def _winner(bench: Bench, chosen: tuple[Choice, Scenario], answer: _Answer) -> Winner:
    choice, scenario = chosen
    best, broken, notes = answer
    if best is not None:
        scenario = bench.scenario(best.point)
        notes = [*notes, *_without_meaning(bench, best)]
        if len(best.runs) > 1 and all(run.figures == best.runs[0].figures for run in best.runs):
            notes = [*notes, "every seed gives the same run: this workload draws nothing, --seeds 1 would do"]
    else:
        mine = [one for one in bench.known.values() if one.point.values[: len(choice)] == choice]
        broken = min(mine, key=_miss)
    # A verdict alone, with all limits kept, is as short-sighted as the run is short.
    judged = [one for one in (best, broken) if one is not None and one.worst.ratio <= 1.0]
    shorts = [short for one in judged if (short := too_short(one, bench.limits)) is not None]
    notes = [*notes, *shorts[:1]]
    beside = bench.scenario(broken.point) if broken is not None else scenario
    limited = limiting(broken, beside) if broken is not None else None
    return Winner(choice, best, broken, limited, num_gpus(scenario), notes)


def _without_meaning(bench: Bench, best: Evaluation) -> list[str]:
    """What to say of limits on a figure that no request has: a TPOT, where all outputs are one token."""
    return [
        f"{limit.name}: no request has one, so nothing can break it; outputs of one token have no TPOT"
        for limit in bench.limits
        if all(limit.figure(run.figures) is None for run in best.runs)
    ]


def _miss(one: Evaluation) -> tuple[bool, bool, float]:
    """How far a point is from keeping the promise: by its limits, unless it is overloaded or did not run."""
    worst = one.worst
    return bool(worst.error), worst.ratio <= 1.0, worst.ratio


def _rank(bench: Bench, winner: Winner, ranges: Sequence[Range]) -> tuple[float, ...]:
    """Fewest GPUs, then the smallest values, a pool by its tokens; or the highest pace of a GPU.

    Of equals the one that is furthest from breaking the promise.
    """
    if winner.best is None:
        assert winner.broken is not None
        return (1.0, *map(float, _miss(winner.broken)))
    values = dict(winner.best.point.values)
    if not ranges:
        return (0.0, -float(winner.best.point.values[-1][1]) / winner.gpus, winner.best.worst.ratio)
    block_size = bench.scenario(winner.best.point).engine.block_size
    sizes = [values[one.path] * (block_size if one.path == "engine.num_gpu_blocks" else 1) for one in ranges]
    return (0.0, float(winner.gpus), *map(float, sizes), winner.best.worst.ratio)


def _sought(varied: Varied, pace: Pace | None) -> str:
    by_gpus = any(one.path in COUNT_GPUS for one in varied.lists)
    if pace is not None:
        return f"the highest {pace.name} ({pace.unit})" + (" for each GPU" if by_gpus else "")
    smallest_of = "the smallest " + ", then ".join(one.path for one in varied.ranges)
    return f"the fewest GPUs, then {smallest_of}" if by_gpus else smallest_of
