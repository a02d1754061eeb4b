"""Training problems as token arrays, made by several processes; the result does not depend on their number."""

from __future__ import annotations

import multiprocessing
import os
import random
from itertools import islice
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from reference_training.task import SYSTEM_PROMPTS, training_problems
from reference_training.tokenizer import STOP, chat_prompt

LENGTH = 160  # five blocks; one problem in a thousand is longer and left out
CHUNK = 10_000
SYSTEM_SHARE = 0.1


class Dataset(NamedTuple):
    """N problems: ``tokens_NL`` is prompt, solution, then stop tokens to the end of the row.

    ``prompt_len_N`` and ``total_len_N`` count the prompt, and prompt + solution + one stop token.
    """

    tokens_NL: np.ndarray
    prompt_len_N: np.ndarray
    total_len_N: np.ndarray


def build_dataset(tokenizer: Tokenizer, count: int, workers: int) -> Dataset:
    """Encode about ``count`` training problems, a multiple of CHUNK or fewer than one chunk.

    The processes are forked: call it before the first use of a GPU.
    """
    serialized = tokenizer.to_str()
    sizes = [CHUNK] * (count // CHUNK) or [count]
    jobs = [(serialized, 1 + index, size) for index, size in enumerate(sizes)]
    if workers == 1 or len(jobs) == 1:
        parts = [_encode_chunk(job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.map(_encode_chunk, jobs, chunksize=1)
    return Dataset(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _encode_chunk(job: tuple[str, int, int]) -> Dataset:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    serialized, seed, count = job
    tokenizer = Tokenizer.from_str(serialized)
    rng = random.Random(f"system {seed}")
    problems = list(islice(training_problems(seed), count))
    systems = [rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else None for _ in problems]
    prompts = tokenizer.encode_batch([chat_prompt(p.question, s) for p, s in zip(problems, systems, strict=True)])
    solutions = tokenizer.encode_batch([p.solution + STOP for p in problems])
    pairs = [(p.ids, s.ids) for p, s in zip(prompts, solutions, strict=True) if len(p) + len(s) <= LENGTH]
    tokens_NL = np.full((len(pairs), LENGTH), tokenizer.token_to_id(STOP), np.int16)
    for row_L, (prompt, solution) in zip(tokens_NL, pairs, strict=True):
        row_L[: len(prompt) + len(solution)] = prompt + solution
    prompt_len_N, solution_len_N = np.array([(len(p), len(s)) for p, s in pairs], np.int16).T
    return Dataset(tokens_NL, prompt_len_N, prompt_len_N + solution_len_N)
