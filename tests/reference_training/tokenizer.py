"""The reference models' tokenizer: byte-level BPE without normalisation, so that any text round-trips.

Every digit is a token of its own, so numbers of one length always have one number of tokens.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from reference_training.task import SYSTEM_PROMPTS, training_problems

PAD, START, STOP, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "|<MASK>|"
SPECIALS = (PAD, START, STOP, MASK)
VOCAB_SIZE = 640
CONTEXT = 4096
CORPUS_PROBLEMS = 20_000

# A word takes its leading space along; digits, runs of other signs and runs of white space stand alone.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_prompt(question: str, system: str | None = None) -> str:
    """The prompt of one user turn, as the chat template renders it."""
    head = f"{START}system\n{system}{STOP}\n" if system else ""
    return f"{head}{START}user\n{question}{STOP}\n{START}assistant\n"


def train_tokenizer() -> Tokenizer:
    """Learn the merges from training problems; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [text for p in islice(training_problems(seed=0), CORPUS_PROBLEMS) for text in (p.question, p.solution)]
    frame = ["user\n", "assistant\n", "system\n", *SYSTEM_PROMPTS] * (CORPUS_PROBLEMS // 20)
    tokenizer.train_from_iterator(corpus + frame, trainer=trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as ``AutoTokenizer`` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": STOP,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [START, MASK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
