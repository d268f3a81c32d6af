"""Search for differences between shardwise and a loop by hand, until the time is over.

python -m tests.fuzz.fuzz --seconds 600 --seed 1     # many cases
python -m tests.fuzz.fuzz --case '{"loss": "sum"}'   # one case again
python -m tests.fuzz.fuzz --case LINE --shrink 60    # and a simpler one that fails as well
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

# Compiling takes most of the time, and the programs are tiny.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def prepare_jax(num_devices: int = 8) -> None:
    """Choose virtual CPU devices and fast compilation. Call it before JAX starts."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from shardwise import use_cpu_devices

    use_cpu_devices(num_devices)


def draw_cases(seed: int, chunk: int = 16) -> Iterator[list]:
    """Yield lists of cases, without end."""
    import hypothesis
    from hypothesis import HealthCheck, Phase

    from tests.fuzz.cases import cases, differing_fields

    for number in range(10**9):
        drawn: list = []

        @hypothesis.seed(seed * 1_000_003 + number)
        @hypothesis.settings(
            max_examples=chunk,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(cases())
        def collect(case):
            drawn.append(case)  # noqa: B023

        collect()
        # The first one is always the simplest, and many vary one that was drawn before.
        chosen: list = []
        for case in drawn[1:]:
            if all(len(differing_fields(case, other)) > 4 for other in chosen):
                chosen.append(case)
        yield chosen


def shrink(case, is_same: Callable, seconds: float):
    """Return a simpler case with the same outcome, found within the given time."""
    from tests.fuzz.cases import simpler

    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for candidate in simpler(case):
            if time.monotonic() > end:
                return case
            if is_same(candidate):
                case, changed = candidate, True
                break
    return case


class Report:
    """Counts outcomes, and writes a line of JSON for each case."""

    def __init__(self, path: Path | None):
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: dict[str, list] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def add(self, case, outcome, seconds: float) -> None:
        self.counts[outcome.status] += 1
        if outcome.status == "refused":
            self.refusals[outcome.kind] += 1
        if outcome.status in ("different", "error"):
            key = f"{outcome.status}: {outcome.kind}"
            self.failures.setdefault(key, []).append((case, outcome))
        if self._file:
            record = {
                "status": outcome.status,
                "kind": outcome.kind,
                "seconds": round(seconds, 2),
                "case": json.loads(case.line()),
                "detail": outcome.detail if outcome.status != "same" else "",
            }
            self._file.write(json.dumps(record) + "\n")

    def print(self, seconds: float) -> None:
        total = sum(self.counts.values())
        rate = 60 * total / max(seconds, 1e-9)
        print(f"{total} cases in {seconds:.0f} s, {rate:.0f} per minute: ", end="")
        print(", ".join(f"{n} {status}" for status, n in self.counts.most_common()))
        for kind, n in self.refusals.most_common():
            print(f"  refused {n:4d}  {kind}")
        for kind, found in sorted(self.failures.items(), key=lambda x: -len(x[1])):
            case, outcome = min(found, key=lambda x: len(x[0].line()))
            print(f"  FAILED {len(found):4d}  {kind}")
            print(f"      {case.line()}")
            print(f"      {outcome.detail.strip()[-400:]}")


def wait_while_quiet() -> None:
    """Wait while the file exists that FUZZ_PAUSE_FILE names."""
    name = os.environ.get("FUZZ_PAUSE_FILE")
    while name and Path(name).exists():
        time.sleep(3)


def search(
    seconds: float, seed: int, out: Path | None, most: int, first: Sequence = ()
) -> Report:
    """Run the first cases, and then random ones until the time is over."""
    import jax

    from tests.fuzz.run_case import run_case

    report = Report(out)
    spent = 0.0
    drawn = chain(first, chain.from_iterable(draw_cases(seed)))
    for count, case in enumerate(drawn, 1):
        if count > len(first) and (spent > seconds or count > most):
            break
        wait_while_quiet()
        start = time.monotonic()
        outcome = run_case(case)
        took = time.monotonic() - start
        spent += took
        report.add(case, outcome, took)
        if outcome.status in ("different", "error"):
            print(f"{outcome.status}: {outcome.kind}\n  {case.line()}", flush=True)
        if count % 200 == 0:
            # Compiled programs are kept otherwise, and each one takes memory.
            jax.clear_caches()
        if count % 50 == 0:
            print(f"{count} cases, {spent:.0f} s: {dict(report.counts)}", flush=True)
    report.print(spent)
    return report


def main() -> int:
    """Run the command line; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", 600))
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(os.environ.get("FUZZ_SEED", int(time.time()))),
    )
    parser.add_argument("--most", type=int, default=10**9, help="cases at most")
    parser.add_argument("--out", type=Path, help="a file for one line of JSON per case")
    parser.add_argument("--first", type=Path, help="a file of cases to begin with")
    parser.add_argument("--case", help="run this case only")
    parser.add_argument(
        "--shrink", type=float, default=0, help="seconds to simplify --case"
    )
    words = parser.parse_args()
    prepare_jax()
    from tests.fuzz.cases import from_line
    from tests.fuzz.run_case import run_case

    if words.case:
        case = from_line(words.case)
        outcome = run_case(case)
        if words.shrink:
            first = outcome

            def is_same(candidate) -> bool:
                found = run_case(candidate)
                same_error = first.status != "error" or found.kind == first.kind
                return found.status == first.status and same_error

            case = shrink(case, is_same, words.shrink)
            outcome = run_case(case)
        print(case.line())
        print(f"{outcome.status}: {outcome.kind}\n{outcome.detail}")
        return int(outcome.status in ("different", "error"))
    print(f"seed {words.seed}", flush=True)
    first = words.first.read_text().splitlines() if words.first else []
    report = search(
        words.seconds,
        words.seed,
        words.out,
        words.most,
        [from_line(line) for line in first],
    )
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
