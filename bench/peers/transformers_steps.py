"""transformers as a step child: the library's forward pass with its default cache and attention, in a greedy loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvferry.bench.peers.step_loop import ChildArguments, StepTimes, Tokens, child_arguments, serve


class LibrarySteps:
    """Prompts are given to one forward pass, as long as all are of one length. The last ones stay cached."""

    def __init__(self, arguments: ChildArguments) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        torch.set_num_threads(arguments.threads)
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(arguments.model_dir, dtype=torch.float32).eval()
        self._held: list[Tokens] = []
        self._cache: Any = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StepTimes:
        from transformers import DynamicCache

        times = StepTimes()
        started = time.perf_counter()
        rows = len(prompts)
        if self._cache is not None and self._held[:rows] == list(prompts):
            if rows < len(self._held):
                self._cache.batch_select_indices(torch.arange(rows))
            self._cache.crop(-(self._cache.get_seq_length() - len(prompts[0]) + 1))
            tokens = self._forward([prompt[-1:] for prompt in prompts])
        else:
            self._cache = DynamicCache()
            tokens = self._forward(prompts)
        self._held = list(prompts)
        times.first_s = time.perf_counter() - started
        columns = [tokens]
        while len(columns) < new_tokens:
            before = time.perf_counter()
            tokens = self._forward([[token] for token in tokens])
            times.steps_s.append(time.perf_counter() - before)
            columns.append(tokens)
        times.tokens = [list(row) for row in zip(*columns, strict=True)]
        return times

    def _forward(self, token_ids: Sequence[Tokens]) -> Tokens:
        asked = {"cache": self._cache, "use_cache": True, "logits_to_keep": 1}
        logits = self._model(input_ids=torch.tensor(token_ids), **asked).logits
        tokens: Tokens = logits[:, -1].argmax(dim=-1).tolist()
        return tokens


def main() -> None:
    import transformers

    arguments = child_arguments()
    serve(LibrarySteps(arguments).run, f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
