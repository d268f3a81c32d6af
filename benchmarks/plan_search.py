"""Compare the mesh search with compiling every candidate.

    python benchmarks/plan_search.py                 GPT-2 1.5B on v5e:4x4; 30 minutes on 2 cores
    python benchmarks/plan_search.py --only-search

This shows whether the search finds the best mesh, and how many compilations it needs. Plans are
cached in `--cache`, so an interrupted run resumes. This needs libtpu, but no TPU.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

from gpt2 import recipe

from shardwise.plan.compile import plan_run
from shardwise.plan.search import Candidate, find_meshes, search
from shardwise.plan.target import find_target

OPTIONS = {"accumulate": [1, 2], "remat": ["none", "dots", "block"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-xl")
    parser.add_argument("--on", default="v5e:4x4")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=Path("plan_search_cache"))
    parser.add_argument("--only-search", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = find_target(options.on)

    def make(candidate):
        return recipe(
            preset=options.preset,
            batch_size=options.batch_size,
            mesh=candidate.mesh,
            **dict(candidate.options),
        )

    def compile_one(candidate, run):
        begun = time.perf_counter()
        plan = plan_run(run, target, dict(candidate.options), options.cache)
        about = f"{plan.times.total * 1e3:8.1f} ms, {plan.memory.peak / 2**30:5.1f} GiB"
        too_large = "" if plan.fits else " too large"
        seconds = time.perf_counter() - begun
        print(
            f"{candidate.mesh:18} {dict(candidate.options)!s:38} {about}{too_large} "
            f"({seconds:.0f} s)",
            flush=True,
        )
        return plan

    meshes = find_meshes(len(target.devices))
    found = search(make, compile_one, target, meshes, OPTIONS)
    best = found.best
    for entry in found.ranking:
        print(
            f"  {entry.candidate.mesh:22} {dict(entry.candidate.options)!s:38} "
            f"{entry.status:13} {entry.why}"
        )
    print(
        f"search: {best.candidate if best else None}, "
        f"{found.num_compiled} of {found.num_candidates} compiled"
    )
    if options.only_search:
        return
    possible = {
        entry.candidate.mesh
        for entry in found.entries.values()
        if entry.status not in ("pruned", "refused")
    }
    times = {}
    for mesh, *values in itertools.product(
        [m for m in meshes if m in possible], *OPTIONS.values()
    ):
        candidate = Candidate(mesh, tuple(zip(OPTIONS, values, strict=True)))
        plan = compile_one(candidate, make(candidate))
        if plan.fits:
            times[candidate] = plan.times.total
    fastest = min(times, key=times.get)
    ratio = times[best.candidate] / times[fastest]
    print(
        f"{len(times)} of all {len(possible) * 6} candidates fit; "
        f"the fastest is {fastest}: {times[fastest] * 1e3:.1f} ms"
    )
    print(
        f"the search selected {best.candidate}: {ratio:.4f} times as long, "
        f"with {found.num_compiled} compilations"
    )
    if options.json:
        rows = [
            {"mesh": c.mesh, **dict(c.options), "seconds": s}
            for c, s in sorted(times.items(), key=lambda item: item[1])
        ]
        options.json.write_text(
            json.dumps(
                {"ratio": ratio, "compiled": found.num_compiled, "fitting": rows},
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
