"""Draw what two trained models have learned: the classifier of digits, and the flow model.

    shardwise train recipes/digits.py --out runs/digits
    shardwise train recipes/flow.py --out runs/flow
    python -m examples.pictures digits runs/digits digits.png
    python -m examples.pictures flow runs/flow flow.png --classifier runs/digits

The example shows how to use a trained model in Python: describe the state of its run, load the
weights from the run directory, and call the module. The weights may come from any mesh.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes import digits, flow
from shardwise import InitFrom, Run, abstract_state, load_initial

# Rows of digits in the picture of the flow model.
NUM_ROWS = 6
# Images of each digit that the classifier judges.
NUM_JUDGED = 100


def load_model(run: Run, path: Path, average: bool = False) -> nnx.Module:
    """Return the trained model of a run, in evaluation mode.

    Args:
        run: the run, for its model and optimizer.
        path: its run directory.
        average: whether to load the averaged weights.
    """
    spec = abstract_state(run.model, run.optimizer, "data=-1")
    state, _ = load_initial(InitFrom(path, average=average), spec, seed=0)
    model = spec.module(state)
    model.eval()
    return model


def classify(path: Path, images: np.ndarray) -> np.ndarray:
    """Return the probabilities (B, 10) of the digits that images (B, 8, 8, 1) may show.

    Args:
        path: run directory of recipes/digits.py.
        images: the images.
    """
    model = load_model(digits.recipe(), path)
    assert isinstance(model, digits.ConvNet)
    return np.asarray(jax.nn.softmax(model(jnp.asarray(images))))


def generate(path: Path, digit: np.ndarray) -> np.ndarray:
    """Return images (B, 8, 8) of digits (B,), from the run directory of recipes/flow.py."""
    model = load_model(flow.recipe(), path, average=True)
    assert isinstance(model, flow.Flow)
    return np.asarray(flow.draw(model, jnp.asarray(digit), jax.random.key(0)))


def distances(images: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the distance of each image (B, 8, 8) to the nearest of `others`."""
    a, b = images.reshape(len(images), -1), others.reshape(len(others), -1)
    squares = (a**2).sum(-1)[:, None] - 2 * a @ b.T + (b**2).sum(-1)
    nearest: np.ndarray = np.sqrt(squares.min(-1).clip(0))
    return nearest


def draw_digits(path: Path, picture: Path) -> str:
    """Draw the confusion matrix, and the 10 validation images that the model knows least."""
    _, validation = digits.read_digits()
    image, label = validation["image"], validation["label"]
    probabilities = classify(path, image)
    predicted = probabilities.argmax(-1)
    counts = digits.confusion(label, predicted)

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(2, 3))
    left, right = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    axes = left.subplots()
    axes.imshow(counts, cmap="Blues")
    axes.set(xticks=range(10), yticks=range(10), xlabel="predicted", ylabel="digit")
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if row == column else "black"
            axes.text(column, row, str(count), color=color, ha="center", va="center")

    certainty = probabilities[np.arange(len(label)), label]
    least = np.argsort(certainty)[:10]
    for index, axes in zip(least, right.subplots(2, 5).flat, strict=True):
        show_image(axes, image[index, ..., 0])
        color = "black" if predicted[index] == label[index] else "tab:red"
        title = f"{label[index]}: {certainty[index]:.0%}"
        axes.set_title(title, fontsize=9, color=color)
    right.suptitle("least certain: digit and its probability", fontsize=10)
    figure.savefig(picture)
    return f"validation accuracy {(predicted == label).mean():.2%}"


def draw_flow(path: Path, picture: Path, classifier: Path | None = None) -> str:
    """Draw generated digits next to real ones, and describe the generated ones.

    Args:
        path: run directory of recipes/flow.py.
        picture: PNG file to write.
        classifier: run directory of recipes/digits.py. Its model judges the generated digits.
    """
    train, validation = digits.read_digits()
    label = np.tile(np.arange(10), NUM_JUDGED)
    generated = generate(path, label)
    columns = [
        np.flatnonzero(train["label"] == digit)[:NUM_ROWS] for digit in range(10)
    ]
    real = train["image"][np.stack(columns, axis=1).reshape(-1), ..., 0]

    figure = Figure(figsize=(9, 3.2), dpi=100, layout="constrained")
    grid = figure.add_gridspec(1, 2)
    left, right = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    for part, title, images in ((left, "generated", generated), (right, "real", real)):
        part.suptitle(title, fontsize=10)
        for number, axes in enumerate(part.subplots(NUM_ROWS, 10).flat):
            show_image(axes, images[number])
    figure.savefig(picture)

    # Copies of training images would be much nearer to them than validation images are.
    of_generated = distances(generated, train["image"]).mean()
    of_validation = distances(validation["image"], train["image"]).mean()
    text = (
        f"mean distance to the nearest training image: {of_generated:.2f}"
        f" (validation images: {of_validation:.2f})"
    )
    if classifier is not None:
        predicted = classify(classifier, generated[..., None]).argmax(-1)
        share = (predicted == label).mean()
        text += f"\nrecognized by the classifier: {share:.1%} of {len(label):,}"
    return text


def show_image(axes: Axes, image: np.ndarray) -> None:
    """Draw an image (8, 8), from 0 to 1, without ticks."""
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=(), yticks=())


def main() -> None:
    """Draw the picture that the command line names."""
    parser = argparse.ArgumentParser(description="Draw what a model has learned.")
    parser.add_argument("recipe", choices=("digits", "flow"))
    parser.add_argument("run", type=Path, help="run directory of that recipe")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument(
        "--classifier", type=Path, help="run directory of recipes/digits.py"
    )
    options = parser.parse_args()
    if options.recipe == "digits":
        print(draw_digits(options.run, options.picture))
    else:
        print(draw_flow(options.run, options.picture, options.classifier))


if __name__ == "__main__":
    main()
