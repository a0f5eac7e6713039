"""The boundary of two bottlenecks in the backward pass, as one Pallas kernel for TPUs.

A block ends with out = relu(shortcut + BatchNorm(a W3)). The next one begins with
z = relu(BatchNorm(y1)), y1 = out W1, and its shortcut reads `out` too. XLA makes one fusion for
each product of the backward pass, and each of them reads the block's large arrays again. The kernel
reads them once, a few pixels at a time, and computes all products from the copy in the core's
memory. The sums over the batch that BatchNorm's gradients need are arguments.

The kernel's arrays are [pixel, image, channel], or [pixel, channel, image] where the channels do
not fill the 128 lanes of a register. So do these arrays lie in a TPU's memory (`laid_out`), and
transposing them costs nothing. A step takes some pixels of 128 images.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_WINDOWS = 6 * 2**20  # bytes of the windows of one step; the core's memory holds two steps'


class Arguments(NamedTuple):
    """What the kernel reads, with D channels at the boundary, C and E inside the blocks.

    Activations and kernels have the compute dtype, the others are float32 (or float64).
    """

    dz: Any  # [b, h, w, E], the gradient of z
    y1: Any  # [b, h, w, E]
    # The gradient of `out` from the next block's shortcut: [b, h, w, D], or [b, h', w', D] of the
    # pixels that its projection has a stride for; the others have no gradient there.
    dout: Any
    out: Any  # [b, h, w, D]
    y2: Any  # [b, h, w, C]; a = relu(BatchNorm(y2))
    # [5, E]: mean, factor and bias of BatchNorm 1, and its gradient's slope and constant:
    # dy1 = factor * (dz where z > 0) + slope * (y1 - mean) + constant
    norm1: Any
    norm2: Any  # [3, C]: mean, factor and bias of BatchNorm 2
    w1: Any  # [D, E]
    w3: Any  # [C, D], times the factor of BatchNorm 3
    # Where the shortcut is a projection: its input and kernel times factor, as `y2` and `w3`.
    x: Any = None  # [b, h, w, S]
    wx: Any = None  # [S, D]


class Results(NamedTuple):
    """What the kernel computes; sums are over all pixels and images, float32 (or float64)."""

    dy: Any  # [b, h, w, D], the gradient of shortcut + BatchNorm(a W3)
    product: Any  # [b, h, w, C], dy w3^T
    dw1: Any  # [D, E], the sum of out dy1^T
    sum_ady: Any  # [C, D], the sum of a dy^T
    sum_dy: Any  # [D]
    x_product: Any = None  # [b, h, w, S], dy wx^T
    sum_xdy: Any = None  # [S, D], the sum of x dy^T


def backward(arguments: Arguments) -> Results:
    """The kernel where the program is for a TPU, elsewhere `plain`."""
    return lax.platform_dependent(*arguments, tpu=_fused, default=_plain)


def plain(arguments: Arguments) -> Results:
    """What the kernel computes, without Pallas."""
    dz, y1, dout, out, y2, norm1, norm2, w1, w3, x, wx = arguments
    product = partial(jnp.einsum, precision=_precision(dz), preferred_element_type=norm1.dtype)
    dy1 = norm_gradient(dz, y1, *norm1)
    gradient = product("bhwe,de->bhwd", dy1, w1) + _spread(dout, out).astype(norm1.dtype)
    dy = jnp.where(out > 0, gradient, 0).astype(out.dtype)

    def branch(x: Any, kernel: Any) -> tuple[Any, Any]:
        back = product("bhwd,cd->bhwc", dy, kernel).astype(out.dtype)
        return back, product("bhwc,bhwd->cd", x, dy)

    back, sum_ady = branch(_norm_relu(y2, *norm2), w3)
    dw1 = product("bhwd,bhwe->de", out, dy1)
    more = () if x is None else branch(x, wx)
    return Results(dy, back, dw1, sum_ady, jnp.sum(dy, (0, 1, 2), dtype=norm1.dtype), *more)


def fused(arguments: Arguments, interpret: bool = False) -> Results:
    """The kernel. With `interpret` it runs on any device, slowly."""
    *arrays, norm1, norm2, w1, w3, x, wx = arguments
    kernels = [w3]
    if x is not None:
        arrays, kernels = [*arrays, x], [w3, wx]
    images, height, width, _ = arrays[0].shape
    pixels, dtype = height * width, arrays[0].dtype
    sides = [x.shape[3] for x in arrays]  # E, E, D, D, C, S
    stride = height // arrays[2].shape[1]
    # Where `dout` has a stride, all pixels of a step lie in one row.
    row = pixels if stride == 1 else width
    size = _LANES * dtype.itemsize * (sum(sides) + sum(sides[3:]))
    tiles = [n for n in range(stride, 17, stride) if row % n == 0]
    tile = max(n for n in tiles if n == stride or n * size <= _WINDOWS)
    # On v4 and v5p two cores are one device, and each of them takes half of the pixels.
    steps, per_row = pixels // tile, row // tile
    cores = 2 if steps % 2 == 0 else 1
    steps //= cores

    def step_of(k: Any, i: Any) -> Any:
        return k * steps + i

    def step_of_dout(k: Any, i: Any) -> Any:
        """The steps of a row without values have the last window of the row before."""
        step = step_of(k, i)
        (y, x), last = _divided(step, per_row), lax.full_like(step, per_row - 1)
        sampled, remainder = _divided(y, stride)
        return sampled * per_row + jnp.where(remainder == 0, x, last)

    windows = [_window(tile, channels, step_of) for channels in sides]
    if stride > 1:
        windows[2] = _window(tile // stride, sides[2], step_of_dout)

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda k, j, i: (0,) * len(x.shape))

    def own(shape: tuple[int, ...]) -> pl.BlockSpec:
        """An array of this shape for each core."""
        return pl.BlockSpec((None, *shape), lambda k, j, i: (k,) + (0,) * len(shape))

    inputs = [_to_pixels(x) for x in arrays]
    small = [x if _lanes_are_channels(x.shape[1]) else x.T for x in (norm1, norm2)]
    small += [w1.T, *kernels]
    last = (8, sides[3]) if _lanes_are_channels(sides[3]) else (sides[3], _LANES)
    sums = [w1.T.shape, *(kernel.shape for kernel in kernels), last]
    results = pl.pallas_call(
        partial(_step, images, len(kernels), per_row),
        grid=(cores, pl.cdiv(images, _LANES), steps),
        in_specs=[*windows, *map(whole, small)],
        out_specs=[*windows[3:], *map(own, sums)],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs[3:]),
            *(jax.ShapeDtypeStruct((cores, *shape), norm1.dtype) for shape in sums),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="boundary_backward",
    )(*inputs, *small)
    count = 1 + len(kernels)
    dy, *products = (
        _to_images(x, y.shape) for x, y in zip(results[:count], arrays[3:], strict=True)
    )
    dw1, *products_of_sums, sum_dy = (jnp.sum(x, 0) for x in results[count:])
    sum_dy = jnp.sum(sum_dy, 0 if _lanes_are_channels(sides[3]) else 1)
    (back, sum_ady), *more = zip(products, products_of_sums, strict=True)
    return Results(dy, back, dw1.T, sum_ady, sum_dy, *(more[0] if more else ()))


def _window(pixels: int, channels: int, index_map: Callable[[Any, Any], Any]) -> pl.BlockSpec:
    """Some pixels of 128 images, in the step that `index_map` has for the grid's core and step."""
    if _lanes_are_channels(channels):
        return pl.BlockSpec((pixels, _LANES, channels), lambda k, j, i: (index_map(k, i), j, 0))
    return pl.BlockSpec((pixels, channels, _LANES), lambda k, j, i: (index_map(k, i), 0, j))


def _step(images: int, branches: int, per_row: int, *refs: Any) -> None:
    """One step of the kernel: some pixels of at most 128 images.

    Each pixel's arrays are matrices of images and channels; `_axes` gives the order. A row of
    pixels has `per_row` steps, and only each `stride`-th pixel and row has a `dout`.
    """
    (dz, y1, dout, out, *inputs), refs = refs[: 4 + branches], refs[4 + branches :]
    (norm1, norm2, w1, *kernels), refs = refs[: 3 + branches], refs[3 + branches :]
    (dy_ref, *backs), (dw1, *sums, sum_dy) = refs[: 1 + branches], refs[1 + branches :]
    (images1, channels1), (images0, channels0) = map(_axes, w1.shape)
    axes = [_axes(kernel.shape[0]) for kernel in kernels]
    acc_dtype, first_image = sum_dy.dtype, pl.program_id(1) * _LANES
    stride = out.shape[0] // dout.shape[0]
    step = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    row_has_dout = _divided(_divided(step, per_row)[0], stride)[1] == 0

    @pl.when((first_image == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        for ref in (dw1, *sums, sum_dy):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    columns1, columns2 = (
        [ref[i : i + 1, :] if axis else ref[:, i : i + 1] for i in range(ref.shape[1 - axis])]
        for ref, axis in ((norm1, channels1), (norm2, axes[0][1]))
    )

    def existing(x: jax.Array, axis: int) -> jax.Array:
        """Zero where the last window reaches beyond the images."""
        if images % _LANES == 0:
            return x
        image = lax.broadcasted_iota(jnp.int32, x.shape, axis) + first_image
        return jnp.where(image < images, x, jnp.zeros_like(x))

    def product(x: jax.Array, x_axis: int, y: jax.Array, y_axis: int) -> jax.Array:
        """The sum over an axis of x and an axis of y: [the other axis of x, the other of y]."""
        dims, precision = (((x_axis,), (y_axis,)), ((), ())), _precision(x)
        return lax.dot_general(x, y, dims, precision, preferred_element_type=acc_dtype)

    def pixel(p: Any, q: Any) -> None:
        """Computes pixel p; pixel q of `dout` belongs to it, if any does."""
        dy1 = existing(norm_gradient(dz[p], y1[p], *columns1), images1)
        o = existing(out[p], images0)
        factors = (dy1, channels1, w1[...], 0) if channels0 else (w1[...], 0, dy1, channels1)
        gradient = product(*factors)
        if q is not None:
            its = dout[q].astype(acc_dtype)
            gradient += its if stride == 1 else jnp.where(row_has_dout, its, 0)
        dy = existing(jnp.where(o > 0, gradient, 0).astype(o.dtype), images0)
        dy_ref[p] = dy
        summed = dy.astype(acc_dtype)
        sum_dy[...] += jnp.sum(summed.reshape(-1, *sum_dy.shape), 0) if channels0 else summed
        dw1[...] += product(dy1, images1, o, images0)
        for i, (kernel, back, sum_) in enumerate(zip(kernels, backs, sums, strict=True)):
            its_images, its_channels = axes[i]
            w, x = kernel[...], inputs[i][p]
            x = existing(x if i else _norm_relu(x, *columns2), its_images)
            factors = (dy, channels0, w, 1) if its_channels else (w, 1, dy, channels0)
            back[p] = product(*factors).astype(o.dtype)
            sum_[...] += product(x, its_images, dy, images0)

    def pixels(q: Any, carry: None) -> None:
        for offset in range(stride):
            pixel(q * stride + offset, None if offset else q)

    lax.fori_loop(0, dy_ref.shape[0] // stride, pixels, None, unroll=True)


def _divided(x: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder; `//` asks for the sign of x, for which Mosaic must know the chip."""
    number = lax.full_like(x, divisor)
    return lax.div(x, number), lax.rem(x, number)


def laid_out(x: jax.Array) -> jax.Array:
    """`x` [b, h, w, c], on a TPU with the layout in memory that the kernel reads.

    XLA chooses it for multiples of 128 images. Of 112 it would lay out some arrays otherwise, and
    copy them for the kernel. So few images that most lanes would be empty keep XLA's choice.
    """
    if x.shape[0] < _LANES // 2:
        return x
    constrained = partial(with_layout_constraint, layouts=Layout(_order(x.shape[3])))
    return lax.platform_dependent(x, tpu=constrained, default=lambda x: x)


def _order(channels: int) -> tuple[int, ...]:
    """The axes of [b, h, w, c] in the order of the kernel's arrays."""
    return (1, 2, 0, 3) if _lanes_are_channels(channels) else (1, 2, 3, 0)


def _lanes_are_channels(channels: int) -> bool:
    return channels % _LANES == 0


def _axes(channels: int) -> tuple[int, int]:
    """The axes of the images and of the channels in a pixel's matrix."""
    return (0, 1) if _lanes_are_channels(channels) else (1, 0)


def _spread(dout: jax.Array, out: jax.Array) -> jax.Array:
    """`dout` with zeros between its pixels, so that it has all pixels of `out`."""
    gaps = [
        (0, n - (n // m * (m - 1) + 1), n // m - 1)
        for n, m in zip(out.shape, dout.shape, strict=True)
    ]
    return lax.pad(dout, jnp.zeros((), dout.dtype), gaps)


def _to_pixels(x: jax.Array) -> jax.Array:
    """[b, h, w, c] to [h * w, b, c] or [h * w, c, b]."""
    x = x.transpose(_order(x.shape[3]))
    return x.reshape(-1, *x.shape[2:])


def _to_images(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_to_pixels`, to this shape."""
    x = x.reshape(shape[1], shape[2], *x.shape[1:])
    return x.transpose((2, 0, 1, 3) if _lanes_are_channels(shape[3]) else (3, 0, 1, 2))


def _fused(*arguments: Any) -> Results:
    return fused(Arguments(*arguments))


def _plain(*arguments: Any) -> Results:
    return plain(Arguments(*arguments))


def _norm_relu(y: Any, mean: Any, factor: Any, bias: Any) -> jax.Array:
    """relu(BatchNorm(y)) in the dtype of y."""
    z = (y.astype(mean.dtype) - mean) * factor + bias
    return jnp.maximum(z.astype(y.dtype), 0)


def norm_gradient(
    dz: Any, y: Any, mean: Any, factor: Any, bias: Any, slope: Any, constant: Any
) -> jax.Array:
    """The gradient of y from the gradient of z = relu(BatchNorm(y)), as `Arguments` says."""
    centred = y.astype(mean.dtype) - mean
    is_alive = (centred * factor + bias).astype(y.dtype) > 0
    gradient = jnp.where(is_alive, dz.astype(mean.dtype), 0)
    return (gradient * factor + (centred * slope + constant)).astype(y.dtype)


def _precision(x: jax.Array) -> lax.Precision | None:
    """The highest precision for float32, which TPUs round to bfloat16 by default."""
    return None if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
