"""Random cases: a frozen dataclass of plain values, and strategies that draw one.

A case is printed as one line of JSON, and `python -m tests.fuzz.fuzz --case LINE` runs it again.
"""

import json
from dataclasses import asdict, dataclass, fields

from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    """One run, as plain values. The defaults are the simplest case.

    Attributes:
        stem: what an example is: "dense" numbers, an "image", or "tokens".
        blocks: the layers between stem and head, see `problems.BLOCKS`.
        tied: whether the head uses the embedding table; "tokens" only.
        annotate: sharding annotations of the kernels: "", "mesh" or "logical" names.
        frozen: a pattern of parameters that are not trained, or "".
        wrt: the variables that are trained: "" for all parameters, "head" or "kernel" for those
            with this name in their path, "kept" also for variables that are not parameters.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype in which the model reads parameters, or "".
        loss: the loss, see `problems.LOSSES`.
        metrics: additional metrics, of the same kinds as losses and some others.
        signature: the arguments of the loss: "", "rngs" or "step", in addition to model and batch;
            "rngs_last" draws random numbers with the examples along the last dim.
        optimizer: the optimizer, see `problems.OPTIMIZERS`.
        data: how batches are passed, see `problems.make_data`.
        structure: the pytree of a batch: "dict", "nested" or "tuple".
        wide: whether the arrays are float64 and int64.
        examples: the number of examples of the source.
        batch_size: examples per batch.
        steps: training steps.
        bad_step: the number of a step whose batch has a NaN, counted from 1; 0 for none.
        seed: the seed of data, parameters and random streams.
        accumulate: micro-batches per batch.
        separate: whether micro-batches may change the result, see `make_train_step`.
        mesh: the mesh; the product of its sizes is the number of devices.
        min_size: `Rules.fsdp_min_size`.
        drive: how the run is carried out: by "steps" or by "fit".
        resume_at: the step after which the run is saved and resumed; 0 for never.
        resume_mesh: the mesh of the resumed run.
        eval_examples: examples of the validation data; 0 disables evaluation.
        eval_batch: the batch size of the evaluation.
        eval_every: steps between evaluations of a "fit".
        compiled_init: whether a case by "steps" starts from `init_state`, instead of arrays that
            were created without `jax.jit`.
        norms: `Run.norms`.
        threads: `Run.data_threads`.
    """

    stem: str = "dense"
    blocks: tuple[str, ...] = ()
    tied: bool = False
    annotate: str = ""
    frozen: str = ""
    wrt: str = ""
    param_dtype: str = "float32"
    compute_dtype: str = ""
    loss: str = "mean"
    metrics: tuple[str, ...] = ()
    signature: str = ""
    optimizer: str = "sgd"
    data: str = "function"
    structure: str = "dict"
    wide: bool = False
    examples: int = 16
    batch_size: int = 8
    steps: int = 3
    bad_step: int = 0
    seed: int = 0
    accumulate: int = 1
    separate: bool = False
    mesh: str = "data=1"
    min_size: int = 8
    drive: str = "steps"
    resume_at: int = 0
    resume_mesh: str = "data=1"
    eval_examples: int = 0
    eval_batch: int = 8
    eval_every: int = 0
    compiled_init: bool = True
    norms: bool = False
    threads: int = 1

    def line(self) -> str:
        """Return the fields that differ from the defaults, as one line of JSON."""
        default = Case()
        values = {
            name: value
            for name, value in asdict(self).items()
            if value != getattr(default, name)
        }
        return json.dumps(values)


def from_line(line: str) -> Case:
    """Return the case that `Case.line` has printed."""
    values = json.loads(line)
    return Case(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


def simpler(case: Case) -> list[Case]:
    """Return cases that differ from `case` in one field, which has a simpler value."""
    default = Case()
    result = []
    for field in fields(Case):
        value, simple = getattr(case, field.name), getattr(default, field.name)
        if value == simple:
            continue
        options = [simple]
        if isinstance(value, tuple):
            options += [value[:i] + value[i + 1 :] for i in range(len(value))]
        elif field.name == "steps" or (isinstance(value, int) and value > 2):
            options += [1, 2] if field.name == "steps" else [value - 1]
        elif field.name in ("mesh", "resume_mesh"):
            options += ["data=2", "fsdp=2", "model=2"]
        for option in options:
            if option != value:
                result.append(_replaced(case, field.name, option))
    return result


def differing_fields(case: Case, other: Case) -> list[str]:
    """Return the names of the fields in which two cases differ."""
    names = [field.name for field in fields(Case)]
    return [name for name in names if getattr(case, name) != getattr(other, name)]


def _replaced(case: Case, name: str, value: object) -> Case:
    values = {**{f.name: getattr(case, f.name) for f in fields(Case)}, name: value}
    return Case(**values)


# Meshes of at most 8 devices.
MESHES = (
    "data=1",
    "data=2",
    "data=3",
    "fsdp=2",
    "data=4",
    "data=8",
    "fsdp=8",
    "data=4,fsdp=2",
    "data=2,fsdp=2",
    "replica=2,fsdp=4",
    "replica=2,data=2,fsdp=2",
)
# Meshes with an axis that only annotated kernels use.
TENSOR_MESHES = (
    "model=2",
    "data=2,model=2",
    "data=4,model=2",
    "fsdp=2,model=2",
    "data=2,fsdp=2,model=2",
    "replica=2,fsdp=2,model=2",
    "data=2,model=4",
)

BLOCKS = (
    "linear",
    "relu",
    "layernorm",
    "rmsnorm",
    "groupnorm",
    "shared",
    "scan",
    "remat",
    "remat_scan",
    "einsum",
    "lora",
    "table",
    "clipped",
    "jitted",
    "ensemble",
    "conv",
    "recurrent",
    "gate",
    "sow",
)
# Blocks that keep variables which are not parameters.
STATEFUL = (
    "batchnorm",
    "counter",
    "ema",
    "codebook",
    "spectral",
    "frequency",
    "spectralnorm",
    "branched",
    "mask_buffer",
    "carried",
)
RANDOM = ("dropout", "noise")
# Blocks in which the examples of a batch meet.
COUPLING = ("centered", "across_batch", "moe", "slots")
# Losses that are sums or means over examples.
SEPARABLE = (
    "mean",
    "sum",
    "rows",
    "rows_weighted",
    "row_sums",
    "tokens",
    "tokens_plain",
    "summed",
    "summed_ints",
    "masked_mean",
    "weighted",
    "row_means",
    "mean_plus_sum",
    "half_precision",
    "row_max",
    "mean_of_columns",
    "mean_times_count",
    "scaled_sum",
    "two_means",
    "flat",
    "flat_weighted",
    "row_weight",
    "dot",
    "einsum",
    "vmapped",
    "mapped",
    "looped",
    "gradient_penalty",
    "halved",
    "checkpointed",
    "reversed",
    "transposed",
    "columns",
    "param_rows",
    "column_weights",
    "wrong_weight",
    "accuracy",
    "scalar_weight",
    "mean_as_total",
    "repeated",
    "total_weight",
    "learned_weight",
    "learned_scalar_weight",
    "learned_sums",
    "distilled",
    "pinn",
    "sown",
    "maml",
    "hessian",
)
# Losses with one entry per example.
PADDABLE = (
    "rows",
    "rows_weighted",
    "row_sums",
    "tokens",
    "tokens_plain",
    "half_precision",
    "rows_reg",
    "normalized_rows",
    "centered",
    "row_weight",
    "mapped",
    "checkpointed",
    "gradient_penalty",
    "reversed",
    "transposed",
    "columns",
    "param_rows",
    "column_weights",
    "learned_weight",
    "distilled",
    "wrong_weight",
    "top_rows",
    "above_mean",
    "below_max",
    "clipped_rows",
    "softmax_rows",
    "outer",
    "broadcast",
    "total_weight",
    "max_weight",
)
REGULARIZED = ("mean_reg", "sum_reg", "rows_reg", "summed_reg")
# Losses that depend on the size of the batch, or on the position of an example in it.
POSITIONAL = (
    "scaled_rows",
    "scaled_row_mean",
    "size_weight",
    "size_branch",
    "positional",
    "positional_dot",
    "triangle",
    "indexed_half",
    "indexed_four",
    "indexed_rows",
    "first_group",
    "random_pairs",
    "stacked",
    "outer_weights",
    "shifted",
    "alternate",
    "sliced_update",
    "lookup",
    "padded_sum",
    "selected_sum",
    "param_scale",
    "param_divided",
    "column_scale",
    "normalized_gradient",
    "clipped_gradient",
    "scattered",
)
COUPLED = (
    "contrastive",
    "pairwise",
    "standardized",
    "max",
    "lse",
    "rms",
    "first_half",
    "sorted",
    "rolled",
    "normalized_rows",
    "ratio",
    "centered",
    "sum_over_sqrt",
    "column_max",
    "squared_sums",
    "abs_mean",
    "hinge_mean",
    "product",
    "product_sums",
    "variance",
    "covariance",
    "by_class",
    "segments",
    "cumsum",
    "scanned",
    "branched",
    "top",
    "top_rows",
    "above_mean",
    "below_max",
    "pairs",
    "clipped_rows",
    "softmax_rows",
    "taken",
    "conv",
    "fft",
    "outer",
    "broadcast",
    "last",
    "max_weight",
)
LOSSES = (*SEPARABLE, *REGULARIZED, *COUPLED, *POSITIONAL)
METRICS = (
    *LOSSES,
    "constant",
    "python_float",
    "count",
    "int_sum",
    "bool_rows",
    "weight_norm",
    "truncated",
)
OPTIMIZERS = (
    "sgd",
    "momentum",
    "adamw",
    "adamw_masked",
    "clipped_schedule",
    "multisteps",
    "adafactor",
    "lion",
    "rmsprop",
    "partition",
    "inject",
    "polyak",
    "lars",
    "lamb",
    "agc",
    "plateau",
    "optax_ema",
    "amsgrad",
    "adagrad",
    "sw_sgd",
    "sw_adamw",
    "sw_adafactor",
    "sw_muon",
    "sw_lion",
    "sw_ema",
    "sw_schedule_free",
    "sw_groups",
    "sw_spikes",
    "sw_master",
)
DATA = (
    "function",
    "batches",
    "unshuffled",
    "list",
    "iterator",
    "generator",
    "reuse",
    "jax",
    "views",
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case. Most draws are legitimate, so that few of them are refused."""

    def pick(options: tuple[str, ...]) -> str:
        return draw(st.sampled_from(options))

    def one_in(count: int) -> bool:
        # The simple value is the frequent one, as Hypothesis draws small numbers often.
        return draw(st.integers(0, count - 1)) == count - 1

    stem = pick(("dense", "dense", "tokens", "image"))
    kinds = (*BLOCKS, *(("attention",) * 3 if stem == "tokens" else ()))
    if one_in(3):
        kinds = (*kinds, *STATEFUL * 2)
    if one_in(6):
        kinds = (*kinds, *COUPLING * 3)
    if one_in(8):
        kinds = (*kinds, *RANDOM * 4)
    blocks = tuple(draw(st.lists(st.sampled_from(kinds), max_size=3)))
    annotate = pick(("", "", "mesh", "logical"))
    meshes = (*MESHES, *TENSOR_MESHES) if annotate else MESHES
    losses = {
        "separable": SEPARABLE,
        "regularized": REGULARIZED,
        "coupled": COUPLED,
        "positional": POSITIONAL,
    }
    groups = pick(("separable", "separable", "separable", *losses))
    data = pick(DATA)
    accumulate = draw(st.sampled_from((1, 1, 2, 3, 4)))
    # Multiples fit most meshes. Other sizes need padding, or are refused.
    shards = 1
    mesh = pick(meshes)
    for axis in mesh.split(","):
        name, size = axis.split("=")
        shards *= 1 if name == "model" else int(size)
    loss = pick(losses[groups])
    batch_size = shards * accumulate * (1 if shards > 4 else 2)
    if one_in(2 if loss in PADDABLE else 12):
        batch_size = draw(st.sampled_from((4, 4, 5, 6, 7, 8, 8, 10, 13)))
    steps = draw(st.sampled_from((2, 3, 3, 4)))
    drive = pick(("steps", "steps", "fit"))
    resume_at = draw(st.integers(0, steps - 1)) if one_in(3) else 0
    is_stream = data in ("iterator", "generator")
    eval_examples = draw(st.sampled_from((0, 3, 7, 11, 16)))
    return Case(
        stem=stem,
        blocks=blocks,
        tied=stem == "tokens" and one_in(3),
        annotate=annotate,
        frozen=pick(("stem/*", "*bias", "*/linear/kernel")) if one_in(8) else "",
        wrt=pick(("head", "kernel")) if one_in(8) else "",
        param_dtype="bfloat16" if one_in(16) else "float32",
        compute_dtype="bfloat16" if one_in(16) else "",
        loss=loss,
        metrics=tuple(draw(st.lists(st.sampled_from(METRICS), max_size=2, unique=True)))
        if one_in(3)
        else (),
        signature=pick(("step", "rngs", "rngs_last")) if one_in(6) else "",
        optimizer=pick(OPTIMIZERS),
        data=data,
        structure="dict"
        if data in ("batches", "unshuffled", "list")
        else pick(("dict", "nested", "tuple")),
        wide=one_in(4),
        examples=batch_size + draw(st.integers(0, 9)),
        batch_size=batch_size,
        steps=steps,
        bad_step=draw(st.integers(1, steps)) if one_in(10) else 0,
        seed=draw(st.integers(0, 99)),
        accumulate=accumulate,
        separate=one_in(5),
        mesh=mesh,
        min_size=draw(st.sampled_from((8, 16, 64))),
        drive=drive,
        resume_at=0 if is_stream else resume_at,
        resume_mesh=pick(meshes),
        eval_examples=eval_examples,
        eval_batch=draw(st.sampled_from((3, 4, 8))),
        eval_every=draw(st.sampled_from((0, 1, 2))),
        compiled_init=one_in(4),
        norms=one_in(3),
        threads=draw(st.sampled_from((1, 2))),
    )
