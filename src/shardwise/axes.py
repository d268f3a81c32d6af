"""The roles of mesh axis names.

A mesh axis is just a name and a size. Its role follows from the name, and this module is the only
place that knows which name has which role. To add a role, add its names here; `Rules`, `mesh`,
`kernels` and `plan` read them from here.
"""

# Axes that shard the experts of a mixture-of-experts layer. They shard the batch as well: every
# other layer treats them like data axes.
EXPERT = ("expert",)

# Axes that divide the layers of a stack into the stages of a pipeline. Outside of the stack, for
# example in an embedding or a loss, they shard examples.
STAGE = ("stage",)

# Axes that shard the examples of a batch. When a mesh spans several machines, the first of these
# crosses the slow network between them, because batch axes communicate least.
BATCH = (*STAGE, "replica", "data", "dp", "batch", "fsdp", *EXPERT)

# The batch axis that shardwise suggests and tries first.
DATA = "data"

# Axes over which parameters and optimizer state are stored sharded, and gathered where they are
# used.
FSDP = ("fsdp",)

# Axes that shard the tokens of each sequence. For attention they shard heads instead, or keys and
# values are passed around. Everything else in a transformer works on single tokens.
CONTEXT = ("context",)

# Axes that shard attention heads, the hidden dimension of an MLP and the vocabulary.
TENSOR = ("model", "tp", "tensor")

# The axes that `plan --search` tries for every run: one for each role. It tries context, expert and
# stage axes where they can help, see `plan/search.py`.
SEARCHED = (DATA, FSDP[0], TENSOR[0])

# The mesh axes of each logical name that annotations can use on any mesh. `Rules(logical=...)` adds
# names.
LOGICAL: dict[str, tuple[str, ...] | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "mlp": TENSOR,
    "embed": FSDP,
    "layers": None,
    "tokens": CONTEXT,
    "experts": EXPERT,
}
