"""The compiled kernels. Tensors are passed as addresses of float32 elements, strides in elements; an address of 0
stands for "none". Every call releases the GIL and blocks until done. Shapes are the caller's duty."""

PANEL: int
GROUP: int
"""Columns of an int8 weight, and of the activations it meets, that share a scale."""

def available() -> list[str]:
    """Kernel sets this CPU can run, widest first."""

def use(name: str) -> bool:
    """Process-wide. False, and nothing changes, when this CPU cannot run it."""

def selected() -> str: ...
def advise_huge(address: int, nbytes: int) -> bool:
    """Asks the system to back page-aligned memory with huge pages; False where it has none to give."""

def packed_floats(outputs: int, columns: int) -> int: ...
def pack(weight: int, outputs: int, columns: int, packed: int, threads: int) -> None: ...
def linear(
    x: int,
    x_stride: int,
    rows: int,
    columns: int,
    packed: int,
    bias: int,
    y: int,
    y_stride: int,
    outputs: int,
    add: bool,
    threads: int,
    /,
) -> None:
    """y (+)= x W^T + bias."""

def packed_int8_nbytes(outputs: int, columns: int) -> int: ...
def pack_int8(values: int, scales: int, outputs: int, columns: int, packed: int, threads: int, /) -> None:
    """values: int8 [outputs, columns]; scales: bfloat16 [outputs, ceil(columns / GROUP)]."""

def linear_int8(
    x: int,
    x_stride: int,
    rows: int,
    columns: int,
    packed: int,
    bias: int,
    y: int,
    y_stride: int,
    outputs: int,
    add: bool,
    threads: int,
    /,
) -> None:
    """y (+)= x W^T + bias, where every GROUP columns of a row of x are rounded to int8 with a scale of their own."""

def rms_norm(
    x: int, x_stride: int, weight: int, eps: float, y: int, rows: int, columns: int, threads: int, /
) -> None: ...
def silu_mul(both: int, y: int, rows: int, columns: int, threads: int, /) -> None:
    """both: [rows, 2 * columns], gate beside up."""

class AttentionStep:
    """One step of one layer group. storage: float32, bfloat16 or int8, by which each row has a float behind it that
    scales it; strides of the pool, and the layer's offset, in bytes. spans: (row, start, length, lowest, number of
    blocks) of each sequence."""

    def __init__(
        self,
        pool: int,
        storage: str,
        slot_stride: int,
        plane_stride: int,
        head_stride: int,
        token_stride: int,
        tokens_per_block: int,
        window: int,
        blocks: list[int],
        spans: list[tuple[int, int, int, int, int]],
        /,
    ) -> None: ...
    def attend(
        self,
        layer_offset: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        turn: int,
        out: int,
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
        threads: int,
        /,
    ) -> None:
        """Stores the step's K and V, then attends; q and k are turned on the way where `turn` is given."""

PackedLinear = tuple[int, int, int, int, bool]
"""packed, bias, outputs, columns, whether it is of bytes"""

class DecoderLayers:
    """Layers of self-attention and a gated MLP, each with a norm before it, computed in one call."""

    def __init__(self, hidden: int, /) -> None: ...
    def add(
        self,
        attention_norm: int,
        attention_eps: float,
        qkv: PackedLinear,
        out: PackedLinear,
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
        mlp_norm: int,
        mlp_eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
        /,
    ) -> None:
        """Raises ValueError when the parts do not fit each other."""

    def run(self, x: int, rows: int, places: list[tuple[AttentionStep, int]], turn: int, threads: int, /) -> None:
        """x: [rows, hidden], written over. places: of each layer, its group's step and its offset in bytes there."""
