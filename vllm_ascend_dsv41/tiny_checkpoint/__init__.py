"""Write a small, randomly initialised DeepSeek-V4.1-Flash checkpoint in the official layout.

The result has the same file structure, tensor names, dtypes and scale layouts as the released
Hugging Face repository, only with small sizes, so that loaders, converters and servers can be
tested without the 475 GiB original:

* ``config.json`` (nested ``text_config`` / ``vision_config``, FP8 ``quantization_config`` with
  ``expert_dtype`` FP4), ``generation_config.json``, ``inference/config.json`` (the flat twin);
* ``tokenizer.json`` / ``tokenizer_config.json``: a byte-level BPE trained on a built-in text,
  with the special tokens of the V4.1 prompt format (bos 0, eos 1, pad 2);
* ``model-0000X-of-0000N.safetensors`` + ``model.safetensors.index.json``: vision and aligner in
  shard 1, embedding and image delimiters in shard 2, one shard per trunk layer, one for
  head + final norm, one per DSpark (``mtp``) block, one per Engram layer.

Number formats
--------------
======================  =====================================================================
routed experts          I8 ``[out, in / 2]``: two FP4 E2M1 codes per byte, even column in the
                        low nibble; ``scale`` F8_E8M0 ``[out, in / 32]``
dense linears           F8_E4M3 ``[out, in]``; ``scale`` F8_E8M0 ``[ceil(out/32), in/32]``
(incl. ``attn.wo_a``)   (one power of two per 32 x 32 tile)
``engram.embed``        F8_E4M3 ``[rows, head_dim]``; ``scale`` F8_E8M0 ``[rows, head_dim / 32]``
BF16                    embed, head, norms, gate.weight, compressor.*, indexer.wk/weights_proj,
                        engram q/k_weight, markov/confidence heads, vision, aligner, image_*
F32                     hc_*, attn_sink, gate.bias, gate.bias_vl
======================  =====================================================================

Reproducibility: every tensor is drawn from its own ``torch.Generator``, seeded with a hash of the
seed and the tensor's name, so a tensor's values do not depend on the order of generation or on
which other tensors exist.

Examples::

    python -m vllm_ascend_dsv41.tiny_checkpoint --preset a --out tiny-a
    python -m vllm_ascend_dsv41.tiny_checkpoint --preset a --n-routed-experts 32 --seed 7 --out tiny-x
    python -m vllm_ascend_dsv41.tiny_checkpoint --preset bench --out bench     # about 1.8 GB
    python -m vllm_ascend_dsv41.tiny_checkpoint --preset bench --dry-run       # only print the sizes

Preset ``talk`` has the sizes of the trained model that says things; ``write_talking`` writes that one.
"""

from .sizes import PRESETS, Sizes
from .talking import write_talking
from .write import write_checkpoint

__all__ = ["PRESETS", "Sizes", "write_checkpoint", "write_talking"]
