"""Every tensor of a conversion against its source, decoded by the reference's own codecs, a block of rows at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..quant import Checkpoint, Kind, TensorSpec, Weights
from ..quant.checkpoint import expected_tensors
from ..quant.inventory import GROUP, draft_copies
from ..quant.plan import matrix_shape
from ..quant.rotation import FILE as ROTATION_FILE
from ..quant.rotation import Rotation, read_block, rotation_of
from ..quant.work import Source
from ..reference.numerics import decode_e2m1, decode_e8m0, spread
from .report import Report, TensorError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
BLOCK_ROWS = 32  # whole tiles of scales
FULL_BLOCK = 1 << 22  # elements at a time when everything is compared
BF16_STEP = 2.0**-8  # one step of BF16 at most, relative to the value


class Reader:
    """Rows of tensors, by key.

    Read, not mapped: safetensors maps a file writable for PyTorch, which Linux refuses for an Engram table (98 GB) on a
    host with less memory than that.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = Source(checkpoint.directory)
        self._locations = checkpoint.locations
        stored = expected_tensors(checkpoint.config, checkpoint.layout, checkpoint.weights)
        self._forms = {key: (DTYPES[item.dtype], matrix_shape(item.shape)) for key, item in stored.items()}

    def rows(self, key: str, begin: int, end: int) -> Tensor:
        """Rows as stored; a vector is one row."""
        dtype, (rows, columns) = self._forms[key]
        end, row_bytes = min(end, rows), self._locations[key].bytes // rows
        data = self._source.read(self._locations[key], begin * row_bytes, (end - begin) * row_bytes)
        return torch.from_numpy(data).view(dtype).view(end - begin, columns)

    def source(self, spec: TensorSpec, begin: int, end: int) -> Tensor:
        """Dequantised rows of the official layout, float32."""
        weight, scale = self.rows(spec.name, begin, end), f"{spec.base}.scale"
        if spec.kind is Kind.EXPERT:
            return decode_e2m1(weight) * decode_e8m0(self.rows(scale, begin, end)).repeat_interleave(GROUP, 1)
        if spec.kind is Kind.TABLE:
            return weight.float() * decode_e8m0(self.rows(scale, begin, end)).repeat_interleave(GROUP, 1)
        if spec.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
            factors = decode_e8m0(self.rows(scale, begin // GROUP, -(-end // GROUP)))
            return weight.float() * spread(factors, (len(weight), weight.shape[1]), (GROUP, GROUP))
        return weight.float()


def blocks(rows: int, columns: int, sample: int | None, seed: str) -> Iterator[tuple[int, int]]:
    """Row ranges to compare: all of them, or ``sample`` blocks of 32 rows, the first, the last and random others."""
    if sample is None:
        step = max(FULL_BLOCK // columns // BLOCK_ROWS, 1) * BLOCK_ROWS
        yield from ((begin, min(begin + step, rows)) for begin in range(0, rows, step))
        return
    count = -(-rows // BLOCK_ROWS)
    chosen = {0, count - 1} if sample > 1 else set()
    others = random.Random(seed)  # the same blocks in every run
    while len(chosen) < min(sample, count):
        chosen.add(others.randrange(count))
    yield from ((block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)) for block in sorted(chosen))


def compare(checkpoint: Checkpoint, against: Checkpoint, sample: int | None, report: Report, quiet: bool) -> None:
    """Fill ``report.tensors``; one finding for all. ``sample``: blocks of 32 rows per tensor, None for every row."""
    result, source = Reader(checkpoint), Reader(against)
    block = read_block(checkpoint.directory / ROTATION_FILE, checkpoint.config["text_config"]["hidden_size"])
    jobs = [
        (spec.name, spec, None if block is None else rotation_of(spec, checkpoint.config)) for spec in against.tensors
    ]
    by_name = {spec.name: spec for spec in against.tensors}
    jobs += [(copy.name, by_name[copy.source], None) for copy in draft_copies(checkpoint.config)]
    for name, spec, rotation in tqdm(jobs, desc="compare", unit=" tensors", disable=quiet):
        report.tensors.append(_compare(name, spec, rotation, checkpoint.weights, result, source, sample, block))
    problems = [f"{tensor.name}: {tensor.problem}" for tensor in report.tensors if tensor.problem]
    rows = sum(tensor.rows for tensor in report.tensors)
    extent = "every row" if sample is None else f"{rows:,} rows"
    report.add("numbers", problems, f"{len(report.tensors):,} tensors, {extent}, agree with {against.directory}")


def _compare(
    name: str,
    spec: TensorSpec,
    rotation: Rotation | None,
    weights: Weights | None,
    result: Reader,
    source: Reader,
    sample: int | None,
    block: np.ndarray | None,
) -> TensorError:
    rows, columns = matrix_shape(spec.shape)
    squares = errors = 0.0
    max_code, compared, problem = None, 0, ""
    for begin, end in blocks(rows, columns, sample, name):
        wanted = source.source(spec, begin, end)
        if rotation is not None and block is not None:
            norm = None if rotation.norm is None else source.rows(rotation.norm, 0, 1)[0].float()
            wanted = _turned(rotation, wanted, begin, norm, torch.from_numpy(block))
        found, step, codes = _decode(name, spec, weights, result, begin, end)
        if codes is not None:
            max_code = max(max_code or 0, int(codes.to(torch.int16).abs().max()))
        squares += float(wanted.double().square().sum())
        errors += float((found - wanted).double().square().sum())
        compared += end - begin
        problem = problem or _problem(spec, rotation, found, wanted, step, codes, begin)
    relative = (errors / squares) ** 0.5 if squares else float(errors > 0)
    return TensorError(name, spec.kind.name.lower(), compared, relative, max_code, problem)


def _turned(rotation: Rotation, values: Tensor, first_row: int, norm: Tensor | None, block: Tensor) -> Tensor:
    """What the rotation with this block makes of rows ``first_row`` onwards of a tensor."""
    if rotation.ones:
        return torch.ones_like(values)
    if norm is not None:
        values = values * norm
    if rotation.columns:
        values = (values.unflatten(1, (-1, len(block))) @ block).flatten(1)
    if rotation.rows_from is not None:
        start = max(rotation.rows_from - first_row, 0)
        turned = block.T @ values[start:].unflatten(0, (-1, len(block)))
        values = torch.cat((values[:start], turned.flatten(0, 1)))
    return values


def _decode(
    name: str, spec: TensorSpec, weights: Weights | None, result: Reader, begin: int, end: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, and for INT8 the step of each and the codes."""
    stored = result.rows(name, begin, end)
    if weights is not Weights.W8A8 or stored.dtype is not torch.int8:
        return stored.float(), None, None
    if spec.kind is Kind.TABLE:
        step = result.rows(f"{spec.base}.scale", begin, end).repeat_interleave(GROUP, 1)
    else:
        step = result.rows(f"{name}_scale", begin, end)
    return stored.float() * step, step, stored


def _problem(
    spec: TensorSpec,
    rotation: Rotation | None,
    found: Tensor,
    wanted: Tensor,
    step: Tensor | None,
    codes: Tensor | None,
    begin: int,
) -> str:
    """What is wrong with these rows; empty if nothing."""
    difference = (found - wanted).abs()
    if step is not None and codes is not None:
        if bool((codes == -128).any()):
            return f"rows {begin} ff. hold code -128, which symmetric quantisation does not have"
        # a rotated value is computed in another order here: a tie may fall to the other side
        bad = difference > step * (0.5001 if rotation is None else 0.51)
        expected = "half a step of its scale"
    elif rotation is None:
        bad, expected = difference > 0, "no difference"
    else:
        bad, expected = difference > wanted.abs() * BF16_STEP + wanted.abs().max() * 1e-5, "one BF16 rounding"
    if not bool(bad.any()):
        return ""
    row, column = (int(i) for i in bad.nonzero()[0])
    return (
        f"row {begin + row}, column {column} is {float(found[row, column]):.6g}, the source says "
        f"{float(wanted[row, column]):.6g} (expected: {expected})"
    )
