"""Numbers: what no healthy checkpoint holds, and every tensor of a conversion against its source."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..quant import Checkpoint, Kind, TensorSpec, Weights
from ..quant.inventory import GROUP, draft_copies
from ..quant.plan import matrix_shape
from ..quant.rotation import FILE as ROTATION_FILE
from ..quant.rotation import Rotation, read_block, rotation_of
from ..reference.numerics import decode_e8m0, power_of_two_scale
from .report import Report, TensorError
from .rows import Reader, blocks

BF16_STEP = 2.0**-8  # one step of BF16 at most, relative to the value
SCALE_SLACK = 2.0**-7  # ours are the next BF16 number above absmax / 127, others' the nearest


def check_values(checkpoint: Checkpoint, sample: int | None, report: Report, quiet: bool) -> None:
    """Finite numbers, positive scales, no code -128, offsets of zero: true of every conversion, whatever its source."""
    reader, problems, rows = Reader(checkpoint), [], 0
    for key, (dtype, (count, columns)) in tqdm(reader.forms.items(), desc="values", unit=" tensors", disable=quiet):
        for begin, end in blocks(count, columns, sample, key):
            rows += end - begin
            if problem := _wrong_values(key, dtype, reader, begin, end):
                problems.append(f"{key}: {problem} in rows {begin} to {end - 1}")
                break
        reader.release()
    report.add("values", problems, f"{len(reader.forms):,} tensors, {rows:,} rows: finite, no bad scales or offsets")


def _wrong_values(key: str, dtype: torch.dtype, reader: Reader, begin: int, end: int) -> str:
    values = reader.rows(key, begin, end)
    if dtype is torch.int8:
        scale = f"{key}_scale"
        if scale not in reader.forms and not key.endswith(".engram.embed.weight"):
            return ""  # packed FP4, where every byte has a meaning
        if bool((values == -128).any()):
            return "code -128, which symmetric quantisation does not have"
        if scale in reader.forms:
            empty = reader.rows(scale, begin, end) == 0
            if bool((values.ne(0).any(1, keepdim=True) & empty).any()):
                return "codes under a scale of 0"
        return ""
    numbers = decode_e8m0(values) if dtype is torch.float8_e8m0fnu else values.float()
    if not bool(torch.isfinite(numbers).all()):
        return "NaN or infinity"
    if key.endswith("_offset") and bool(numbers.any()):
        return "an offset that is not 0, which no reader adds"
    if key.endswith((".weight_scale", ".engram.embed.scale")) and bool((numbers < 0).any()):
        return "a negative scale"
    return ""


def compare(checkpoint: Checkpoint, against: Checkpoint, sample: int | None, report: Report, quiet: bool) -> None:
    """Fill ``report.tensors``; one finding for all. ``sample``: blocks of 32 rows per tensor, None for every row."""
    result, source = Reader(checkpoint), Reader(against)
    block = read_block(checkpoint.directory / ROTATION_FILE, checkpoint.config["text_config"]["hidden_size"])
    rotations = [None if block is None else rotation_of(spec, checkpoint.config) for spec in against.tensors]
    jobs = [(spec.name, spec, rotation) for spec, rotation in zip(against.tensors, rotations, strict=True)]
    by_name = {spec.name: spec for spec in against.tensors}
    jobs += [(copy.name, by_name[copy.source], None) for copy in draft_copies(checkpoint.config)]
    for name, spec, rotation in tqdm(jobs, desc="compare", unit=" tensors", disable=quiet):
        report.tensors.append(_compare(name, spec, rotation, checkpoint.weights, result, source, sample, block))
        result.release()
        source.release()
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
        stored = result.rows(name, begin, end)
        if weights is Weights.W8A8 and stored.dtype is torch.int8:
            key = f"{spec.base}.scale" if spec.kind is Kind.TABLE else f"{name}_scale"
            scale = result.rows(key, begin, end)
            step = scale.repeat_interleave(GROUP, 1) if spec.kind is Kind.TABLE else scale
            found = stored.float() * step
            max_code = max(max_code or 0, int(stored.to(torch.int16).abs().max()))
            problem = problem or _scale_problem(spec, rotation, wanted, scale, begin)
            # a rotated value is computed in another order here: a tie may fall to the other side
            limit, expected = step * (0.5001 if rotation is None else 0.51), "half a step of its scale"
        else:
            found = stored.float()
            limit, expected = _float_limit(stored.dtype, rotation, wanted)
        problem = problem or _value_problem(found, wanted, limit, expected, begin)
        squares += float(wanted.double().square().sum())
        errors += float((found - wanted).double().square().sum())
        compared += end - begin
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
        if start < len(values):
            turned = block.T @ values[start:].unflatten(0, (-1, len(block)))
            values = torch.cat((values[:start], turned.flatten(0, 1)))
    return values


def _scale_problem(spec: TensorSpec, rotation: Rotation | None, wanted: Tensor, scale: Tensor, begin: int) -> str:
    """A scale that the row, or the group, does not ask for; empty if there is none."""
    if spec.kind is Kind.TABLE:
        absmax = wanted.unflatten(1, (-1, GROUP)).abs().amax(-1)
        right = torch.where(absmax > 0, power_of_two_scale(absmax, 127.0), 1.0)
        good, expected = scale == right, right
    else:
        expected = wanted.abs().amax(1, keepdim=True) / 127.0
        slack = SCALE_SLACK + (0.0 if rotation is None else 1e-5)
        good = (scale >= expected * (1 - slack)) & (scale <= expected * (1 + slack))
        good |= (expected == 0) & torch.isfinite(scale) & (scale >= 0)  # any scale serves a row of zeros
        good |= (expected < 2.0**-126) & (scale >= 0) & (scale <= 2.0**-125)  # steps of subnormal numbers are coarse
    if bool(good.all()):
        return ""
    row, group = (int(i) for i in (~good).nonzero()[0])
    found, wished = float(scale[row, group]), float(expected[row, group])
    return f"the scale of row {begin + row} is {found:.6g}, the source asks for {wished:.6g}"


def _float_limit(dtype: torch.dtype, rotation: Rotation | None, wanted: Tensor) -> tuple[Tensor, str]:
    if rotation is None:
        return torch.zeros(()), "no difference"
    rounding = wanted.abs().max() * 1e-5  # of sums in another order
    if dtype is torch.float32:
        return rounding, "the same up to float32 rounding"
    return wanted.abs() * BF16_STEP + rounding, "one BF16 rounding"


def _value_problem(found: Tensor, wanted: Tensor, limit: Tensor, expected: str, begin: int) -> str:
    bad = ~((found - wanted).abs() <= limit)  # NaN is bad
    if not bool(bad.any()):
        return ""
    row, column = (int(i) for i in bad.nonzero()[0])
    return (
        f"row {begin + row}, column {column} is {float(found[row, column]):.6g}, the source says "
        f"{float(wanted[row, column]):.6g} (expected: {expected})"
    )
