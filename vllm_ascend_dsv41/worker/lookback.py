"""The part of a V1 model runner that Engram needs: earlier token ids of each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class LookbackRunner:
    """Hands the model the ids before each request's first scheduled token, wherever the prompt was split.

    Mixed in front of vLLM's V1 runner, or of one derived from it.
    """

    lookback_token_ids: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, then the buffer, which some of its runners do not make."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        depth = getattr(self.model, "token_lookback_depth", 0)  # type: ignore[attr-defined]
        if depth:
            if self.use_async_scheduling:  # type: ignore[attr-defined]
                raise RuntimeError("asynchronous scheduling hides generated tokens from Engram; it must be off")
            size = self.max_num_reqs, depth  # type: ignore[attr-defined]
            self.lookback_token_ids = self._make_buffer(*size, dtype=torch.int32)  # type: ignore[attr-defined]

    def _prepare_lookback_token_ids(self, num_reqs: int) -> torch.Tensor:
        """[max requests, depth] int32, newest first, -1 before the text. Generated ids are included: without
        asynchronous scheduling, which our platforms turn off, the runner knows them all."""
        buffer = self.lookback_token_ids
        buffer.np.fill(-1)
        if num_reqs:
            batch = self.input_batch  # type: ignore[attr-defined]
            position = batch.num_computed_tokens_cpu[:num_reqs, None] - np.arange(1, buffer.np.shape[1] + 1)
            ids = batch.token_ids_cpu[np.arange(num_reqs)[:, None], position.clip(0)]
            buffer.np[:num_reqs] = np.where(position >= 0, ids, -1)
        copied: torch.Tensor = buffer.copy_to_gpu()
        return copied
