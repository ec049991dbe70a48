"""What three models need in memory, by hand: closed formulas with literal numbers.

The oracle of `test_planning.py`. It knows nothing of the library; so keep it.
"""

FLOAT32, BFLOAT16 = 4, 2


def llama_elements(embed: int, layers: int, heads: int, hidden: int) -> tuple[int, int, int]:
    """The elements that are divided among all chips, those of norms that are divided among the
    shards of the batch alone, and those that each chip has."""
    attention = 2 * embed * heads * 128 + 2 * embed * 8 * 128
    feed_forward = 3 * embed * hidden
    tables = 2 * 128256 * embed
    return layers * (attention + feed_forward) + tables, layers * 2 * embed, embed


def mixtral_elements() -> tuple[int, int, int]:
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128
    experts = 8 * 3 * 4096 * 14336 + 4096 * 8
    # The norms of all layers have 131,072 elements each, fewer than FSDP divides.
    return 32 * (attention + experts) + 2 * 32000 * 4096, 0, 32 * 2 * 4096 + 4096


ELEMENTS = {
    "70B": llama_elements(8192, 80, 64, 28672),
    "405B": llama_elements(16384, 126, 128, 53248),
    "Mixtral": mixtral_elements(),
}
# Layers and the width of the residual stream.
SIZES = {"70B": (80, 8192), "405B": (126, 16384), "Mixtral": (32, 4096)}
PUBLISHED = {"70B": 70.6e9, "405B": 405e9, "Mixtral": 46.7e9}


def memory(name: str, data: int, model: int) -> dict[str, int]:
    """The bytes on each chip by part: AdamW in float32, one sequence of 8,192 tokens for each shard
    of the batch, of which each block keeps its input in bfloat16."""
    matrices, norms, each = ELEMENTS[name]
    parameters = FLOAT32 * (matrices // (data * model) + norms // data + each)
    layers, embed = SIZES[name]
    return {
        "parameters": parameters,
        "gradients": parameters,
        "moments": 2 * parameters + 4,  # and the number of steps
        "activations": BFLOAT16 * layers * 8192 * embed,
    }
