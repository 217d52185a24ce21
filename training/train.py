"""Train the talking model: ``python training/train.py OUT``, on one core in some half an hour.

The reference model is what is trained, its weights replaced by parameters: what is learnt is DeepSeek-V4.1 as written
in ``reference/model.py``. First the vision tower, then the trunk, whose weights are rounded to MXFP4 and MXFP8 in every
step of its second part, as the checkpoint will hold them; then the draft, which learns to foresee what the trunk says.

The checkpoint in tiny_checkpoint/talking is what it wrote, run once from start to end with its defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lessons import Lesson, digit, fixed_phrases, lesson, vocabulary
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from vllm.models.deepseek_v41.common.mm_preprocess import image_token_types, load_image

from vllm_ascend_dsv41.quant.inventory import Kind, TensorSpec, inventory
from vllm_ascend_dsv41.reference import Config, Model, State
from vllm_ascend_dsv41.reference.checkpoint import Linear
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes
from vllm_ascend_dsv41.tiny_checkpoint.formats import quantize_fp4, quantize_fp8_rows, quantize_fp8_tiles
from vllm_ascend_dsv41.tiny_checkpoint.write import write_sidecars

IGNORED = -100


def rounded(spec: TensorSpec, value: Tensor) -> dict[str, Tensor]:
    """The tensors of the official layout."""
    scale = f"{spec.base}.scale"
    if spec.kind is Kind.EXPERT:
        return dict(zip((spec.name, scale), quantize_fp4(value), strict=True))
    if spec.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
        return dict(zip((spec.name, scale), quantize_fp8_tiles(value), strict=True))
    if spec.kind is Kind.TABLE:
        return dict(zip((spec.name, scale), quantize_fp8_rows(value), strict=True))
    return {spec.name: value.to(torch.float32 if spec.kind is Kind.F32 else torch.bfloat16)}


def restored(spec: TensorSpec, stored: dict[str, Tensor]) -> Tensor:
    """float32 values of what ``rounded`` made."""
    from vllm_ascend_dsv41.reference.numerics import decode_e2m1, decode_e8m0, spread

    value = stored[spec.name]
    if spec.kind is Kind.EXPERT:
        return decode_e2m1(value) * decode_e8m0(stored[f"{spec.base}.scale"]).repeat_interleave(32, 1)
    if spec.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
        return value.float() * spread(decode_e8m0(stored[f"{spec.base}.scale"]), tuple(value.shape), (32, 32))
    if spec.kind is Kind.TABLE:
        return value.float() * decode_e8m0(stored[f"{spec.base}.scale"]).repeat_interleave(32, 1)
    return value.float()


class Trained(Linear):
    """A linear whose weight is asked for in every step."""

    def __init__(self, weights: Weights, name: str) -> None:
        self.weights, self.name = weights, name
        self.stored, self.codes, self.scale = "float", None, None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.weights.value(self.name)


class Weights:
    """Stands where the reference expects a checkpoint."""

    def __init__(self, directory: Path, config: dict[str, Any], seed: int) -> None:
        self.directory, self.quantised = directory, False
        self.specs = {spec.name: spec for spec in inventory(config)}
        torch.manual_seed(seed)
        self.parameters = {name: nn.Parameter(first(spec)) for name, spec in self.specs.items()}
        self._now: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def new_step(self) -> None:
        self._now.clear()

    def value(self, name: str) -> Tensor:
        """The parameter; rounded, and still learning, once ``quantised``."""
        parameter, spec = self.parameters[name], self.specs[name]
        if not self.quantised or spec.kind in (Kind.F32, Kind.BF16, Kind.WIDENED):
            return parameter
        if name not in self._now:
            with torch.no_grad():
                difference = restored(spec, rounded(spec, parameter)) - parameter
            self._now[name] = parameter + difference
        return self._now[name]

    def vector(self, name: str) -> Tensor:
        return self.value(name)

    def linear(self, prefix: str) -> Linear:
        return Trained(self, f"{prefix}.weight")

    def rotation(self) -> None:
        return None

    def table_rows(self, prefix: str, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.value(f"{prefix}.weight"))

    def write(self, file: Path) -> dict[str, str]:
        """All of it in the official layout; -> the index."""
        tensors: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            tensors |= {key: value.contiguous() for key, value in rounded(spec, self.parameters[name].detach()).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return dict.fromkeys(sorted(tensors), file.name)


def first(spec: TensorSpec) -> Tensor:
    """Values to begin with: a residual network whose streams are alike."""
    name, shape = spec.name, spec.shape
    if name.endswith("norm.weight") or "norm1" in name or "norm2" in name:
        return torch.ones(shape)
    if name.endswith(("_base", "_scale")) and ".hc_" in name:
        if name.endswith("_scale"):
            return torch.full(shape, 0.3)
        streams = math.isqrt(1 + shape[0]) - 1  # n (n + 2) coefficients
        return torch.cat((torch.full((streams,), -1.1), torch.zeros(streams), 4 * torch.eye(streams).flatten()))
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", ".bias")):
        return torch.zeros(shape)
    if name.endswith(("engram.q_weight", "engram.k_weight")):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.randn(shape) * 0.3
    gain = 1.0
    if name.endswith(("wo_b.weight", "w2.weight", "wo.weight")):
        gain = 0.1
    if name == "embed.weight" or spec.kind is Kind.TABLE:
        return torch.randn(shape) * (0.3 if name == "embed.weight" else 0.03)
    return torch.randn(shape) * gain * shape[-1] ** -0.5


def prepare(weights: Weights, sizes: Sizes) -> set[str]:
    """Two attention heads that copying needs, which small models take long to find.

    Layer 0, head 0 looks at the token before (by its rotary part alone, which a constant in every embedding makes the
    same for all tokens) and writes it into a subspace of the streams. The first head of the last KV source compares the
    current token with that subspace: it finds what followed the current token before. Returns the weights of both: they
    stay as they are, since the first steps of training would take them apart.
    """
    p = weights.parameters
    width, nope = sizes.hidden_size, sizes.head_dim - sizes.qk_rope_head_dim
    low, key = sizes.o_lora_rank, nope // 2
    embed = p["embed.weight"].data
    embed[:, 0] = 1.0
    p["head.weight"].data = F.normalize(embed * (torch.arange(width) > 0), dim=1)
    constant = 1 / float(F.normalize(embed, dim=1).mul(width**0.5)[:, 0].mean())  # makes coordinate 0 a 1

    def blank(layer: int, compressed: bool) -> dict[str, Tensor]:
        names = ["wq_a", "wq_b", "wkv", "wo_a", "wo_b"] + (["compressor.wkv"] if compressed else [])
        return {name: p[f"layers.{layer}.attn.{name}.weight"].data for name in names}

    first = blank(0, False)
    identity = first["wkv"][:nope].clone()
    identity[:, 0] = 0
    first["wkv"][:nope] = identity
    first["wkv"][nope:] = 0
    first["wq_a"][0] = 0
    first["wq_a"][0, 0] = 3 * constant
    first["wq_b"][: sizes.head_dim] = 0
    for pair in range(3):
        angle = torch.tensor(sizes.rope_theta ** (-2.0 * pair / sizes.qk_rope_head_dim))
        first["wkv"][nope + 2 * pair, 0] = 2 * constant
        first["wq_b"][nope + 2 * pair, 0], first["wq_b"][nope + 2 * pair + 1, 0] = 14 * angle.cos(), -14 * angle.sin()
    first["wo_a"][:low] = 0
    first["wo_a"][:low, :low] = torch.eye(low)
    write = torch.linalg.qr(torch.randn(width - 1, low))[0] * (0.3 * (width / low) ** 0.5)
    first["wo_b"][:, :low] = 0
    first["wo_b"][1:, :low] = write

    last = blank(sizes.kv_source_layer_ids[-1], True)
    compare = torch.linalg.qr(torch.randn(low, key))[0].T  # [key, low]
    read = torch.zeros(low, width)
    read[:, 1:] = write.T / (0.09 * width / low)
    value = torch.linalg.qr(torch.randn(width - 1, key))[0].T * (width / key) ** 0.5
    for name in ("wkv", "compressor.wkv"):
        last[name][: 2 * key] = 0
        last[name][:key] = compare @ read * 0.5
        last[name][key : 2 * key, 1:] = value * 0.4
    last["wq_a"][:low] = identity[:low]
    last["wq_b"][: sizes.head_dim] = 0
    last["wq_b"][:key, :low] = 9 * compare
    last["wo_a"][:low] = 0
    last["wo_a"][:key, key : 2 * key] = torch.eye(key)
    last["wo_b"][:, :low] = 0
    last["wo_b"][1:, :key] = value.T
    layers = {0: first, sizes.kv_source_layer_ids[-1]: last}
    return {f"layers.{n}.attn.{name}.weight" for n, names in layers.items() for name in names} | {"embed.weight"}


class Classroom:
    """Lessons as token ids with targets and pictures."""

    def __init__(self, tokenizer: Tokenizer, sizes: Sizes, image: int, seed: int) -> None:
        self.tokenizer, self.sizes, self.image = tokenizer, sizes, image
        self.source = random.Random(seed)

    def encode(self, one: Lesson) -> tuple[list[int], list[int], list[int], list[tuple[Tensor, tuple[int, int]]]]:
        """-> ids, targets (the next token where the model is to say it), types of image tokens, patches with grids."""
        ids, said, types, pictures = [], [], [], []
        given = iter(one.pictures)
        for text, own in one.parts:
            for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
                if token != self.image:
                    ids.append(token), said.append(own), types.append(-1)
                    continue
                patches, grid, shape = patches_of(next(given), self.sizes)
                roles = image_token_types(*shape).tolist()
                ids += [token] * len(roles)
                said += [False] * len(roles)
                types += roles
                pictures.append((patches, grid))
        targets = [following if own else IGNORED for following, own in zip(ids[1:], said[1:], strict=True)] + [IGNORED]
        return ids, targets, types, pictures

    def pack(self, most: int) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
        """Lessons one after the other, up to so many tokens."""
        packed: tuple[list[int], list[int], list[int], list[Any]] = ([], [], [], [])
        while True:
            one = self.encode(lesson(self.source))
            if packed[0] and len(packed[0]) + len(one[0]) > most:
                return *(torch.tensor(part) for part in packed[:3]), packed[3]
            for whole, part in zip(packed, one, strict=True):
                whole.extend(part)


def embeddings(model: Model, ids: Tensor, types: Tensor, pictures: list[Any]) -> Tensor | None:
    """Of a pack with pictures."""
    if not pictures:
        return None
    encoded = [model.vision.align(model.vision.tower(patches, grid), grid) for patches, grid in pictures]
    return model.merge_images(ids, types, encoded)


def drafted(model: Model, weights: Weights, main: Tensor, ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [anchors, block, vocabulary] and confidences of blocks drafted behind the tokens at ``anchors``, each told
    the tokens that really came."""
    from vllm_ascend_dsv41.reference.model import Step, attend, collapse, ignore, rms_norm

    c = model.config
    state = State()
    model.observe(main, state)
    last = f"mtp.{c.num_nextn_predict_layers - 1}"
    size = c.dspark_block_size
    logits, confidences = [], []
    for anchor in anchors.tolist():
        tokens = torch.tensor([int(ids[anchor])] + [c.dspark_noise_token_id] * (size - 1))
        positions = torch.arange(anchor, anchor + size)
        step = Step(positions, state, ignore, torch.zeros(size, dtype=torch.bool))
        streams, pre = model._spread(model.embed[tokens])
        for stage, block in enumerate(model.stages):
            window = state.draft_window[stage][max(anchor - c.sliding_window, 0) : anchor]

            def attention(x: Tensor, attn: Any = block.attn, window: Tensor = window, at: Tensor = positions) -> Tensor:
                rows = torch.cat((window, attn.window_rows(x, at)))
                visible = torch.ones(size, len(rows), dtype=torch.bool)
                mixed = attend(attn.queries(x, at)[1], rows, visible, attn.sink, c.head_dim**-0.5)
                return attn.output(mixed, at)

            streams, pre = block(streams, pre, step, attention)
        hidden = collapse(streams, pre)
        normed = rms_norm(hidden, weights.vector(f"{last}.norm.weight"), c.rms_norm_eps)
        before = weights.vector(f"{last}.markov_head.embed.weight")[ids[anchor : anchor + size]]
        logits.append(normed @ model.head.T + before @ weights.vector(f"{last}.markov_head.head.weight").T)
        confidences.append(torch.cat((hidden, before), 1) @ weights.vector(f"{last}.confidence_head.proj.weight")[0])
    return torch.stack(logits), torch.stack(confidences)


def see(weights: Weights, model: Model, classroom: Classroom, steps: int) -> None:
    """Teach the tower alone: every token of a picture becomes the embedding of its digit, and the token before a
    picture that of " digit", so that what copies words copies from pictures, too."""
    embed = weights.parameters["embed.weight"].data
    weights.parameters["image_start"].data.copy_(embed[classroom.tokenizer.encode("the digit").ids[-1]])
    digits = embed[[classroom.tokenizer.token_to_id(str(value)) for value in range(10)]]
    names = [name for name in weights.specs if name.startswith(("vision.", "aligner."))]

    def loss_of(step: int) -> tuple[Tensor, float]:
        values = [classroom.source.randrange(10) for _ in range(8)]
        made = torch.stack([encode(model, digit(v, classroom.source), classroom.sizes) for v in values])
        close = made @ digits.T / digits.square().sum(1)
        wanted = torch.tensor(values)
        apart = (made - digits[wanted][:, None]).square().mean() / digits.square().mean()
        right = (close.argmax(-1) == wanted[:, None]).float().mean()
        return F.cross_entropy(4 * close.flatten(0, 1), wanted.repeat_interleave(made.shape[1])) + apart, float(right)

    learn(weights, names, steps, 1e-3, loss_of)


def patches_of(picture: Any, sizes: Sizes) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """Patches, their grid, and the grid of tokens, as vLLM makes them."""
    patches, rows, columns, high, wide = load_image(
        picture,
        patch_size=sizes.vision_patch_size,
        downsample_ratio=sizes.vision_downsample_ratio,
        max_n_token=sizes.vision_max_image_tokens,
        min_pixels=sizes.vision_min_pixels,
        max_wh_ratio=None,
    )
    return patches.float(), (rows, columns), (high, wide)


def encode(model: Model, picture: Any, sizes: Sizes) -> Tensor:
    """[tokens, D]."""
    patches, grid, _ = patches_of(picture, sizes)
    return model.vision.align(model.vision.tower(patches, grid), grid)


def learn(
    weights: Weights, names: list[str], steps: int, rate: float, loss_of: Any, quantised: bool = True, log: int = 50
) -> None:
    """Adam with warm-up and a cosine; ``quantised``: on weights as the checkpoint will hold them."""
    chosen = [weights.parameters[name] for name in names]
    optimiser = torch.optim.AdamW(chosen, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, seen = time.monotonic(), []
    for step in range(steps):
        weights.new_step()
        weights.quantised = quantised
        for group in optimiser.param_groups:
            group["lr"] = (
                rate * min(1, (step + 1) / 100) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
            )
        loss, right = loss_of(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(chosen, 1.0)
        optimiser.step()
        seen.append((float(loss.detach()), right))
        if step % log == log - 1:
            mean = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
            print(f"{step + 1} {mean[0]:.4f} right {mean[1]:.4f} {time.monotonic() - start:.0f} s", flush=True)
            seen.clear()
            torch.save(weights.parameters, weights.directory.with_suffix(".pt"))


def train(
    out: Path,
    sees: int,
    steps: int,
    settle: int,
    draft_steps: int,
    tokens: int,
    seed: int = 0,
    resume: Path | None = None,
) -> None:
    """Write the checkpoint to ``out``: ``steps`` with the prepared heads as they are, ``settle`` of all weights."""
    sizes = Sizes(**PRESETS["talk"])
    out.mkdir(parents=True, exist_ok=True)
    config = write_sidecars(sizes, out, fixed_phrases(), vocabulary())
    weights = Weights(out, config, seed)
    model = Model(weights, Config.from_hf(config))  # type: ignore[arg-type]
    classroom = Classroom(Tokenizer.from_file(str(out / "tokenizer.json")), sizes, config["image_token_id"], seed)
    kept = prepare(weights, sizes)
    other = ("mtp.", "vision.", "aligner.", "image_start")
    trunk = [name for name in weights.specs if not name.startswith(other)]

    def trunk_loss(step: int) -> tuple[Tensor, float]:
        ids, targets, types, pictures = classroom.pack(tokens if step % 4 else tokens // 4)
        logits = model(ids, State(), embeddings(model, ids, types, pictures)).logits
        counted = targets != IGNORED
        right = (logits.argmax(-1) == targets)[counted].float().mean()
        return F.cross_entropy(logits[counted], targets[counted]), float(right)

    def draft_loss(step: int) -> tuple[Tensor, float]:
        size = sizes.dspark_block_size
        ids, targets, types, pictures = classroom.pack(tokens)
        with torch.no_grad():
            output = model(ids, State(), embeddings(model, ids, types, pictures))
        spoken = (targets != IGNORED).nonzero()[:, 0] + 1  # tokens that the model says may be anchors
        spoken = spoken[(spoken > 1) & (spoken + size < len(ids))]
        anchors = spoken[torch.randperm(len(spoken))[:12]]
        logits, confidence = drafted(model, weights, output.main_hidden, ids, anchors)
        wanted = torch.stack([ids[a + 1 : a + 1 + size] for a in anchors.tolist()])
        hit = (logits.argmax(-1) == wanted).float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss = loss + 0.1 * F.binary_cross_entropy_with_logits(confidence, hit)
        return loss, float(hit.mean())

    see(weights, model, classroom, sees)
    rest = [name for name in trunk if name not in kept]
    learn(weights, rest, steps, 2e-3, trunk_loss, quantised=False)
    learn(weights, trunk, settle, 1e-3, trunk_loss)
    learn(weights, [n for n in weights.specs if n.startswith("mtp.")], draft_steps, 3e-3, draft_loss)
    files = weights.write(out / "model-00001-of-00001.safetensors")
    size = (out / "model-00001-of-00001.safetensors").stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the talking model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--see", type=int, default=1000, help="steps of the vision tower alone")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--settle", type=int, default=2100)
    parser.add_argument("--draft-steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    train(args.out, args.see, args.steps, args.settle, args.draft_steps, args.tokens, args.seed)


if __name__ == "__main__":
    main()
