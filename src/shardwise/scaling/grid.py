"""The runs of a transfer: all widths with all learning rates, and further seeds at the best."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from shardwise.errors import ConfigError, NumericsError
from shardwise.files.durable import text_digest, write_atomically
from shardwise.recipe import Recipe, read_source
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize
from shardwise.scaling.scaled import Settings
from shardwise.scaling.transfer import Best, Losses, best_rates
from shardwise.sweep.grid import (
    Arguments,
    GridPoint,
    check_arguments,
    flat,
    make_points,
    option_of,
    split_words,
)
from shardwise.sweep.runs import Sweep, SweepRecord

SEED = "--seed"
# The recipe that the runs use. They are other processes.
RECIPE_TEXT = '''\
"""The recipe {function} of {path}, scaled. Written by `shardwise scale`."""

from pathlib import Path

from shardwise.recipe import load_recipe
from shardwise.scaling.scaled import Settings, scale_recipe
from shardwise.scaling.size import Size

standard = load_recipe(Path({path!r}), {function!r})
standard = getattr(standard, "__wrapped__", standard)
settings = Settings({base}, {width_name!r}, {depth_name!r}, {roles!r})
recipe = scale_recipe(standard, settings)
'''


@dataclass(frozen=True)
class TransferGrid:
    """What the runs of a transfer have in common.

    Attributes:
        recipe: the recipe without scaling.
        path: its file.
        function: its function.
        settings: how it is scaled.
        is_standard: whether the runs are not scaled.
        rate_name: its argument for the learning rate.
        words: its other arguments, as words of a command line.
        options: options of `shardwise train` for all runs.
        out: the directory of the runs.
        retry: whether failed runs are trained again.
        jobs: how many runs are trained at a time.
    """

    recipe: Recipe
    path: Path
    function: str
    settings: Settings
    is_standard: bool
    rate_name: str
    words: list[str]
    options: list[str]
    out: Path
    retry: bool
    jobs: int

    @property
    def name(self) -> str:
        """The name of the recipe without scaling."""
        return f"{self.path}:{self.function}"

    @property
    def target(self) -> str:
        """The name of the recipe that the runs use, for `shardwise train`."""
        function = "standard" if self.is_standard else "recipe"
        return f"{self.out / 'scaled_recipe.py'}:{function}"

    def write_recipe(self) -> None:
        """Write the recipe that the runs use."""
        settings = self.settings
        text = RECIPE_TEXT.format(
            path=str(self.path.resolve()),
            function=self.function,
            base=settings.base,
            width_name=settings.width_name,
            depth_name=settings.depth_name,
            roles=dict(settings.roles),
        )
        write_atomically(self.out / "scaled_recipe.py", text)

    def train(
        self, widths: Sequence[int], rates: Sequence[float]
    ) -> tuple[Losses, int]:
        """Train all widths with all rates.

        Returns:
            The losses, and the exit code.

        Raises:
            ConfigError: if an argument of the recipe is invalid.
        """
        width, rate = self._axes
        varied = {
            width: [str(width) for width in widths],
            rate: [f"{rate:g}" for rate in rates],
        }
        self._check(varied)
        points = make_points(varied, set())
        code = self._run(self.out, points, self._axes, self._shared)
        losses: dict[int, dict[float, float | None]] = {}
        for point in points:
            of_width, of_rate = point.values.values()
            loss = _loss_of(self.out / point.name)
            losses.setdefault(int(of_width), {})[float(of_rate)] = loss
        # Runs that diverge at a large rate are results, not failures.
        has_diverged = code == NumericsError.exit_code
        return losses, 0 if has_diverged and best_rates(losses) else code

    def train_seeds(
        self, best: Sequence[Best], first: int, count: int
    ) -> tuple[list[Best], int]:
        """Train the best rate of each width with further seeds.

        Args:
            best: the best rate of each width.
            first: the seed that they were found with.
            count: the number of seeds, with this one.

        Returns:
            The same rates with the mean losses of all seeds that have not diverged, and the exit
            code.
        """
        width, rate = self._axes
        seeds = [str(seed) for seed in range(first + 1, first + count)]
        by_width = {
            found.width: make_points(
                {width: [str(found.width)], rate: [f"{found.rate:g}"], SEED: seeds},
                set(),
            )
            for found in best
        }
        points = [point for points in by_width.values() for point in points]
        shared = {
            option: values for option, values in self._shared.items() if option != SEED
        }
        out = self.out / "seeds"
        out.mkdir(mode=0o700, exist_ok=True)
        code = self._run(out, points, (*self._axes, SEED), shared)
        result = []
        for found in best:
            others = [_loss_of(out / point.name) for point in by_width[found.width]]
            finite = [loss for loss in others if loss is not None and isfinite(loss)]
            losses = (found.loss, *finite)
            mean = statistics.mean(losses)
            result.append(replace(found, loss=mean, seeds=losses))
        return result, 0 if code == NumericsError.exit_code else code

    @property
    def _scaled_name(self) -> str:
        """The name of the recipe, and how it is scaled: what the names of runs do not say."""
        if self.is_standard:
            return self.name
        roles = "".join(f" {path}={role}" for path, role in self.settings.roles.items())
        return f"{self.name} scaled from {self.settings.base}{roles}"

    @property
    def _axes(self) -> tuple[str, str]:
        """The options that vary."""
        return option_of(self.settings.width_name), option_of(self.rate_name)

    @property
    def _shared(self) -> Arguments:
        """The arguments of all runs."""
        return split_words(self.words)

    def _check(self, varied: Arguments) -> None:
        """Check all arguments before anything runs."""
        for option in varied:
            if option in self._shared:
                raise ConfigError(
                    f"{option} is varied by --sizes and --rates. Remove it."
                )
        arguments = {**self._shared, **varied}
        grid, _ = check_arguments(
            self.recipe, arguments, f"shardwise scale {self.name}"
        )
        for option in grid.keys() - varied.keys():
            raise ConfigError(
                f"{option} has several values. Only sizes and rates vary."
            )

    def _run(
        self, out: Path, points: list[GridPoint], axes: Sequence[str], shared: Arguments
    ) -> int:
        """Train some runs, and return the exit code of the sweep."""
        about = {
            "recipe": self._scaled_name,
            "fixed": shared,
            "axes": list(axes),
            "source_digest": text_digest(read_source(self.path)),
        }
        record = SweepRecord.open(out, about, points)
        words = [*flat(shared), *self.options]
        sweep = Sweep(self.target, words, out, record, points, self.retry, self.jobs)
        return sweep.run()


def _loss_of(directory: Path) -> float | None:
    """Return the last validation loss of a finished run, or else its training loss."""
    if not (directory / "run.json").exists():
        return None
    summary = summarize(RunFiles(directory).read())
    if summary.status != "finished":
        return None
    validation = summary.held_out.get("loss")
    return summary.loss if validation is None else validation[2]
