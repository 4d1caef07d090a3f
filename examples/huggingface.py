"""A Qwen model of transformers with its Gated DeltaNet layers on these ops: the same tokens.

The model here is tiny and random, of the true architecture. With a checkpoint the lines that matter
are ``model = AutoModelForCausalLM.from_pretrained(...)`` and ``gdn_ops.patch(model)``.
"""

import argparse

import torch

import gdn_ops
from gdn_ops.hf.tiny import FAMILIES, tiny_model

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--family", choices=FAMILIES, default="qwen3_5")
parser.add_argument("--state-mode", choices=("full", "buffered"), default="full")
parser.add_argument("--tokens", type=int, default=16)
args = parser.parse_args()

model = tiny_model(args.family)
prompt = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
options = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}

before = model.generate(prompt, **options)
gdn_ops.patch(model, state_mode=args.state_mode)
for layer, implementation in gdn_ops.active(model).items():
    print(f"{layer}: {implementation}")
after = model.generate(prompt, **options)

assert torch.equal(before, after), "greedy tokens differ"
print(f"{args.tokens} greedy tokens of {len(prompt)} prompts are equal with and without the ops")
