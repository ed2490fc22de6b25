"""vLLM as a step child: its offline engine, stepped in this process.

Runs in vLLM's own environment, by path, where kvferry is not installed: so it brings its own copy of `step_loop`'s few
lines and imports nothing of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any


class OfflineSteps:
    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        llm = LLM(
            options.model_dir,
            dtype="float32",
            max_model_len=options.tokens,
            max_num_seqs=options.sequences,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._engine: Any = llm.llm_engine
        self._number = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            self._number += 1
            answers[str(self._number)] = []
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
        first_s, steps_s = 0.0, []
        before = started
        while self._engine.has_unfinished_requests():
            grown = 0
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
                grown += len(tokens) > len(answers[output.request_id])
                answers[output.request_id] = tokens
            now = time.perf_counter()
            if not grown:
                continue
            if not first_s:
                if all(answers.values()):
                    first_s = now - started
            elif grown == len(prompts):
                steps_s.append(now - before)
            before = now
        return {"first_s": first_s, "steps_s": steps_s, "tokens": list(answers.values())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints
        import torch
        import vllm

        steps = OfflineSteps(options)
        about = f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        print(json.dumps({"ready": about}), file=answers, flush=True)
        for line in sys.stdin:
            ask = json.loads(line)
            print(json.dumps(steps.run(ask["prompts"], ask["new_tokens"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
